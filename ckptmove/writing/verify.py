"""Verify what a plan has copied, while it is still being copied.

A record with a checksum is verified by it, which also finds damage in the source. Other copies are
compared with their source, byte for byte. Bytes that were written, gathered or fetched from a store
are verified by the code that writes them; they are read here only where a checksum spans them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from ..errors import WriteError
from ..plans.crc32 import combine_crc32, extend_crc32
from ..plans.plan import Check, Checksum, CrcRange, Plan
from ..sources.file import File
from ..sources.joined import Joined, damage_error
from ..sources.nearby import NearbyFiles
from ..sources.source import Source
from ..system.files import read_into
from .running_checksums import RunningChecksums

#: Called with how many bytes were copied and verified since the last call.
Progress = Callable[[int], object]

_BUFFER = 1 << 17  # bytes read at once: more than a processor's cache holds is slower
_PASSED = 1 << 20  # bytes after which it says how far it is, where it reads nothing
_SMALL = 1 << 12  # bytes of a piece of which several are read at once
_SUMMED_TWICE = 1 << 14  # bytes that are summed again sooner than their sum is put to another


class Verifier:
    """Follows the copying, and verifies what is there: by checksum, else against the source."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[Source],
        fd: int,
        path: str,
        running: RunningChecksums,
        *,
        summed: bool = False,
    ) -> None:
        """`running` has the sums of sources, and is asked for them once all is written.

        With `summed` there is a CRC-32 of all; that takes no reading but of what was written.
        """
        self._path = path
        self._plan = plan
        self._sources = sources
        self._running = running
        self._fd = fd
        self._marks: SimpleQueue[int | None] = SimpleQueue()
        self._mark = 0
        self._stopped = False
        self._thread = (  # for a small file it is not worth one
            threading.Thread(target=self._run, name="ckptmove-verify", daemon=True)
            if plan.nbytes > _BUFFER
            else None
        )
        self._error: BaseException | None = None
        self.done = self._taken = 0
        self._summed = summed
        self.crc32 = 0  #: of the whole file, once it has finished, if it was to be summed
        self._measured = Measured(plan.measures)
        size = min(_BUFFER, plan.nbytes)
        self._buffer, self._other = bytearray(size), bytearray(size)
        self._held = 0, 0  # what range of the destination the buffer has
        self._files = NearbyFiles()

    def __enter__(self) -> Verifier:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stopped = True
        self._marks.put(None)
        if self._thread is not None:
            self._thread.join()

    def written(self, end: int) -> None:
        """Say that everything before `end` is in its place."""
        self._marks.put(end)

    def take_done(self) -> int:
        """Bytes verified since this was last asked."""
        done = self.done
        self._taken, new = done, done - self._taken
        return new

    def finish(self, report: Progress) -> None:
        """Wait for the rest, and raise the error that was found."""
        if self._thread is None:
            self._run()
        else:
            while self._thread.is_alive():
                self._thread.join(0.1)
                report(self.take_done())
        report(self.take_done())
        if self._error is not None:
            raise self._error

    @property
    def crcs(self) -> Sequence[int]:
        """The CRC-32s of the measures, once it has finished."""
        return self._measured.crcs

    def _run(self) -> None:
        done = 0
        try:
            for check in self._plan.checks():
                self._measure(done, check.at)
                self._verify(check)
                done = check.at + check.nbytes
            self._measure(done, self._plan.nbytes)
            self._wait_for(self._plan.nbytes)
            for proof, at, crc32 in self._running.so_far():
                source = self._sources[proof.source]
                left = proof.source_at + proof.nbytes - at
                if self._sum(source, at, left, crc32) != proof.crc32:
                    raise damage_error(proof.name, source)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error

    def _measure(self, start: int, end: int) -> None:
        """Measure or sum what needs no other check, where it is to be measured or summed."""
        if self._summed:
            for _, view in self._read_back(start, end):
                self.crc32 = extend_crc32(self.crc32, view)
            return
        for _, at, stop in self._measured.within(start, end):
            for _ in self._read_back(at, stop):
                pass

    def _verify(self, check: Check) -> None:
        if check.checksum is None:
            self._compare(check)
            return
        crc32, combined = 0, check.nbytes > _SUMMED_TWICE
        for _, view in self._read_back(check.at, check.at + check.nbytes):
            crc32 = extend_crc32(crc32, view)
            if self._summed and not combined:
                self.crc32 = extend_crc32(self.crc32, view)
            self.done += len(view)
        if crc32 != check.checksum.crc32:
            self._blame(check)
        if self._summed and combined:
            self.crc32 = combine_crc32(self.crc32, crc32, check.nbytes)

    def _compare(self, check: Check) -> None:
        """Compare what was read back with the files of a source; what is in none was compared."""
        source, at = self._sources[check.source], check.at
        for piece in source.pieces(check.source_at, check.nbytes):
            end = at + piece.nbytes
            if not isinstance(piece.source, File):
                self._pass_over(at, end)
                at = end
                continue
            for start, view in self._read_back(at, end):
                where = piece.at + start - at
                if not self._is_in(piece.source, where, view):
                    raise self._lost(f"the {len(view):,} bytes at offset {start:,} did not arrive")
                if isinstance(source, Joined):
                    source.note(piece.source, where, view)
                if self._summed:
                    self.crc32 = extend_crc32(self.crc32, view)
                self.done += len(view)
            at = end

    def _pass_over(self, start: int, end: int) -> None:
        """Follow what was read back by who wrote it: only what is measured or summed is read."""
        for at in range(start, end, _PASSED):
            stop = min(at + _PASSED, end)
            self._wait_for(stop)
            self._measure(at, stop)
            self.done += stop - at

    def _read_back(self, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Give what was written piece by piece, as soon as it is there, and measure it.

        With a piece is read what is there after it: small ones lie close together.
        """
        at = start
        while at < end:
            if not self._held[0] <= at < self._held[1]:
                self._wait_for(min(at + _BUFFER, end))
                stop = min(at + _BUFFER, max(end, self._mark))
                view = memoryview(self._buffer)[: stop - at]
                if read_into(self._fd, view, at) != len(view):
                    raise self._lost("the written bytes can't be read back")
                self._held = at, stop
            first, stop = self._held[0], min(end, self._held[1])
            view = memoryview(self._buffer)[at - first : stop - first]
            self._measured.add(at, view)
            yield at, view
            at = stop

    def _is_in(self, source: File, start: int, view: memoryview) -> bool:
        """Whether what was read back is what a file has there."""
        # that bytes stand first makes it one memcmp; two views are compared by element
        if len(view) <= _SMALL:
            return self._files.read(source, start, len(view)) == view
        other = memoryview(self._other)[: len(view)]
        source.read_into(start, other)
        return (self._other if len(view) == len(self._other) else self._other[: len(view)]) == view

    def _wait_for(self, end: int) -> None:
        while self._mark < end and not self._stopped:
            mark = self._marks.get()
            if mark is None:
                raise _Stopped
            self._mark = mark
        if self._stopped:
            raise _Stopped

    def _blame(self, check: Check) -> None:
        """Raise the error for a wrong checksum: it names the source or the destination."""
        assert check.checksum is not None
        source = self._sources[check.source]
        if self._sum(source, check.source_at, check.nbytes) != check.checksum.crc32:
            raise damage_error(check.checksum.name, source)
        raise self._lost(f"the record {check.checksum.name!r} did not arrive as it was")

    def _sum(self, source: Source, start: int, nbytes: int, crc32: int = 0) -> int:
        """The CRC-32 of a range of a source, going on from one of what lies before."""
        for _, data in source.chunks(start, nbytes):
            if self._stopped:
                raise _Stopped
            crc32 = extend_crc32(crc32, data)
        return crc32

    def _lost(self, message: str) -> WriteError:
        return WriteError(message, path=self._path)


class _Stopped(Exception):
    """Raised to stop the verifier thread."""


class Measured:
    """The CRC-32s of ranges, of bytes that come by from the start to the end."""

    def __init__(self, measures: Sequence[CrcRange] | Sequence[Checksum]) -> None:
        #: one for each of the ranges, which are in order and don't overlap
        self.crcs = [0] * len(measures)
        self._measures = measures
        self._ends = [measure.at + measure.nbytes for measure in measures]

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The measures that a range meets: which, and from where to where they do."""
        for n in range(bisect_right(self._ends, start), len(self._ends)):
            if self._measures[n].at >= end:
                return
            yield n, max(start, self._measures[n].at), min(end, self._ends[n])

    def add(self, at: int, view: memoryview) -> None:
        """Take the bytes from an offset on into account."""
        for n, start, end in self.within(at, at + len(view)):
            self.crcs[n] = extend_crc32(self.crcs[n], view[start - at : end - at])
