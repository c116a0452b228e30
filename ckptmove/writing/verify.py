"""Verify copied bytes while a plan is still copying.

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
from ..plans.plan import Check, Checksum, CrcRange, Plan, Stretch
from ..sources.checksums import damage_error
from ..sources.file import File
from ..sources.nearby import NearbyFiles
from ..sources.source import Source
from ..system.files import read_into
from .running_checksums import RunningChecksums

#: Called with the number of bytes copied and verified since the last call.
Progress = Callable[[int], object]

_BUFFER = 1 << 17  # bytes read at once; more than the processor's cache is slower
_PASSED = 1 << 20  # bytes between two progress reports, if nothing is read
_SMALL = 1 << 12  # largest piece that is read together with others
_SUMMED_TWICE = 1 << 14  # for fewer bytes, summing again is faster than combining sums


class Verifier:
    """Follows the copying, and verifies copied bytes: by checksum, or else against the source."""

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
        """`running` has the checksums of sources, and is checked once all is written.

        With `summed`, the CRC-32 of the whole file is computed; this reads only written bytes.
        """
        self._path = path
        self._plan = plan
        self._sources = sources
        self._running = running
        self._fd = fd
        self._marks: SimpleQueue[int | None] = SimpleQueue()
        self._mark = 0
        self._stopped = False
        self._thread = (  # a small file is not worth a thread
            threading.Thread(target=self._run, name="ckptmove-verify", daemon=True)
            if plan.nbytes > _BUFFER
            else None
        )
        self._error: BaseException | None = None
        self.done = self._taken = 0
        self._summed = summed
        self.crc32 = 0  #: CRC-32 of the whole file after the end, if `summed`
        self._measured = RangeChecksums(plan.measures)
        size = min(_BUFFER, plan.nbytes)
        self._buffer, self._other = bytearray(size), bytearray(size)
        self._held = 0, 0  # the range of the destination in the buffer
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

    def report_written(self, end: int) -> None:
        """Report that all bytes before `end` are written."""
        self._marks.put(end)

    def take_done(self) -> int:
        """Return the number of bytes verified since the last call."""
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
        """Return the CRC-32s of the measures, after the end."""
        return self._measured.crcs

    def _run(self) -> None:
        done = 0
        try:
            for stretch in self._plan.stretches():
                if done < stretch.at:
                    self._measure(done, stretch.at)
                for part in _parts(stretch):
                    self._verify(part)
                done = stretch.end
            self._measure(done, self._plan.nbytes)
            self._wait_for(self._plan.nbytes)
            for proof, at, crc32 in self._running.so_far():
                source = self._sources[proof.source]
                left = proof.source_at + proof.nbytes - at
                if self._sum(source, at, left, crc32) != proof.crc32:
                    raise damage_error(proof.name, source)
        except _StopVerifier:
            pass
        except BaseException as error:
            self._error = error

    def _measure(self, start: int, end: int) -> None:
        """Measure or sum ranges that need no other check, if requested."""
        if self._summed:
            for _, view in self._read_back(start, end):
                self.crc32 = extend_crc32(self.crc32, view)
            return
        for _, at, stop in self._measured.within(start, end):
            for _ in self._read_back(at, stop):
                pass

    def _verify(self, part: Stretch) -> None:
        source = self._sources[part.source]
        if len(part.checksums) > 1 and isinstance(source, File):
            self._compare_file(source, part.at + part.shift, part.at, part.end, part.checksums)
            return
        for check in part.checks():
            if check.checksum is None:
                self._compare(check)
            else:
                self._check_sum(check)

    def _check_sum(self, check: Check) -> None:
        """Compare the checksum of a record."""
        assert check.checksum is not None
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
        """Compare read-back bytes with a source's files; others were compared when written."""
        source, at = self._sources[check.source], check.at
        for piece in source.pieces(check.source_at, check.nbytes):
            end = at + piece.nbytes
            if isinstance(piece.source, File):
                self._compare_file(piece.source, piece.at, at, end, joined=source)
            else:
                self._pass_over(at, end)
            at = end

    def _compare_file(
        self,
        file: File,
        file_at: int,
        start: int,
        end: int,
        checksums: Sequence[Checksum] = (),
        *,
        joined: Source | None = None,
    ) -> None:
        """Compare read-back bytes with those of a file, and with checksums of ranges in them."""
        crc32, n, shift = 0, 0, file_at - start
        for at, view in self._read_back(start, end):
            if not self._is_in(file, at + shift, view):
                raise self._lost(f"the {len(view):,} bytes at offset {at:,} did not arrive")
            if joined is not None:
                joined.note(file, at + shift, view)
            if self._summed:
                self.crc32 = extend_crc32(self.crc32, view)
            stop = at + len(view)
            while n < len(checksums):
                first, nbytes, wanted, name, _, _ = checksums[n]
                last = first + nbytes
                if first >= stop:
                    break
                low, high = max(first, at), min(last, stop)
                crc32 = extend_crc32(crc32, view[low - at : high - at])
                if high < last:
                    break
                if crc32 != wanted:
                    raise damage_error(name, file)
                crc32, n = 0, n + 1
            self.done += len(view)

    def _pass_over(self, start: int, end: int) -> None:
        """Pass over bytes that their writer read back: only measured or summed ranges are read."""
        for at in range(start, end, _PASSED):
            stop = min(at + _PASSED, end)
            self._wait_for(stop)
            self._measure(at, stop)
            self.done += stop - at

    def _read_back(self, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Yield written bytes piece by piece, as soon as they are there, and measure them.

        A read also takes the bytes after a piece, because small pieces lie close together.
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
        """Whether the read-back bytes equal those of a file."""
        # with bytes first, this is one memcmp; two views are compared by element
        if len(view) <= _SMALL:
            return self._files.read(source, start, len(view)) == view
        other = memoryview(self._other)[: len(view)]
        source.read_into(start, other)
        return (self._other if len(view) == len(self._other) else self._other[: len(view)]) == view

    def _wait_for(self, end: int) -> None:
        while self._mark < end and not self._stopped:
            mark = self._marks.get()
            if mark is None:
                raise _StopVerifier
            self._mark = mark
        if self._stopped:
            raise _StopVerifier

    def _blame(self, check: Check) -> None:
        """Raise the error for a wrong checksum: it names the source or the destination."""
        assert check.checksum is not None
        source = self._sources[check.source]
        if self._sum(source, check.source_at, check.nbytes) != check.checksum.crc32:
            raise damage_error(check.checksum.name, source)
        raise self._lost(f"the record {check.checksum.name!r} did not arrive as it was")

    def _sum(self, source: Source, start: int, nbytes: int, crc32: int = 0) -> int:
        """Return the CRC-32 of a range of a source, continuing a given CRC-32."""
        for _, data in source.chunks(start, nbytes):
            if self._stopped:
                raise _StopVerifier
            crc32 = extend_crc32(crc32, data)
        return crc32

    def _lost(self, message: str) -> WriteError:
        return WriteError(message, path=self._path)


def _parts(stretch: Stretch) -> Iterator[Stretch]:
    """Divide a range: large records alone, and many small ones together with what lies between.

    Bytes of large records are not compared with the source, since their checksum proves them.
    """
    at, end, shift, source, checksums = stretch
    if len(checksums) < 2:  # there may be very many
        yield stretch
        return
    first = 0
    for n, (start, nbytes, *_) in enumerate(checksums):
        if nbytes > _SMALL:
            if at < start:
                yield Stretch(at, start, shift, source, checksums[first:n])
            at, first = start + nbytes, n + 1
            yield Stretch(start, at, shift, source, checksums[n:first])
    if at < end:
        yield Stretch(at, end, shift, source, checksums[first:])


class _StopVerifier(Exception):
    """Raised to stop the verifier thread."""


class RangeChecksums:
    """The CRC-32s of ranges in a stream of bytes."""

    def __init__(self, measures: Sequence[CrcRange] | Sequence[Checksum]) -> None:
        #: one for each of the ranges, which are in order and don't overlap
        self.crcs = [0] * len(measures)
        self._measures = measures
        self._ends = [measure.at + measure.nbytes for measure in measures]

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the measures that a range overlaps, each with the overlap."""
        for n in range(bisect_right(self._ends, start), len(self._ends)):
            if self._measures[n].at >= end:
                return
            yield n, max(start, self._measures[n].at), min(end, self._ends[n])

    def add(self, at: int, view: memoryview) -> None:
        """Add bytes that start at an offset."""
        if not self.crcs:
            return
        for n, start, end in self.within(at, at + len(view)):
            self.crcs[n] = extend_crc32(self.crcs[n], view[start - at : end - at])
