"""Execute a plan as a stream of parts, without writing them to disk.

The parts come one after the other. Each is assembled in memory and checked before it is handed out:
its checksums must be right. Bytes of a plan that depend on checksums of earlier bytes are inserted
once these are known.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate
from math import prod
from operator import attrgetter

from ...errors import CorruptError, StrPath, UnsupportedError, WriteError
from ...manifest.dtypes import nbytes_of
from ...plans.plan import Checksum, Copy, Gather, Plan, Write
from ...sources.checksums import crc32_of, damage_error
from ...sources.source import Source, check_range
from ..execute import read_gather
from ..running_checksums import RunningChecksums, SummedSource
from ..verify import RangeChecksums

_NO_MORE = (sys.maxsize, memoryview(b""))  # offset after the last bytes


class PlanSource(Source):
    """The output of a plan as a source, not stored anywhere; it does not close the plan's sources.

    Any range of it can be read; this is cheap for written and copied bytes.
    """

    def __init__(self, plan: Plan, sources: Sequence[Source], path: str) -> None:
        self.path = path
        self.nbytes = plan.nbytes
        #: after all parts were taken: whether they are right; if not, they must be taken again
        self.settled = False
        self._plan = plan
        self._sources = sources
        pieces: list[Copy | Gather] = [*plan.copies, *plan.gathers]
        self._pieces = sorted((each for each in pieces if each.nbytes), key=attrgetter("at"))
        self._starts = [piece.at for piece in self._pieces]
        self._writes = _Overlay(plan.writes)
        self._sealed: list[Write] | None = None  # once all checksums are known
        self._seals = _Overlay(self._sealed_with([0] * len(plan.measures)))  # until then

    # -- all of it, part by part ---------------------------------------------------------------

    def parts(self, spans: Sequence[tuple[int, int]]) -> Iterator[BytesIO]:
        """Yield the parts with these bounds, in order; each is released here after use.

        The bytes between them are not read, and may hold no gather or measure. Raises CorruptError
        if a source is damaged or was changed, WriteError if a gather gives other sizes than
        planned.
        """
        self.settled = False
        runs = _joined(spans)
        plan, running = self._plan, RunningChecksums(self._plan.source_checksums, self._sources)
        sums = [each for each in plan.checksums if _within(each.at, each.at + each.nbytes, runs)]
        measured, summed = RangeChecksums(plan.measures), RangeChecksums(sums)
        sealed = list[tuple[int, bytes]]()
        for at, part in self._filled(spans, runs, running):
            view = part.getbuffer()
            self._writes.paint(at, view)
            measured.add(at, view)
            summed.add(at, view)
            self._check_sums(sums, summed.crcs, at, at + len(view))
            if self._seals.meets(at, at + len(view)):
                known = self._seals
                if self._sealed is None:
                    known = _Overlay(self._sealed_with(measured.crcs))
                sealed += ((low, bytes(data)) for low, data in known.pieces(at, at + len(view)))
                known.paint(at, view)
            view.release()
            yield part
            del part  # the caller may release it before the next part exists
        running.check()
        seals = self._sealed_with(measured.crcs)
        if self._sealed is not None and seals != self._sealed:
            raise CorruptError("a source changed while it was read", path=self.path)
        self.settled = _runs(sealed) == _runs(seals)
        self._sealed, self._seals = seals, _Overlay(seals)

    def _sealed_with(self, crcs: Sequence[int]) -> list[Write]:
        """Return the plan's last writes for these checksums, in order."""
        if self._plan.seal is None:
            return []
        return sorted(self._plan.seal(crcs), key=attrgetter("at"))

    def _filled(
        self, spans: Iterable[tuple[int, int]], runs: Sequence[range], running: RunningChecksums
    ) -> Iterator[tuple[int, BytesIO]]:
        """Yield parts with the copied and gathered bytes, and zeros between them."""
        made = self._made(runs, running)
        at, data = next(made, _NO_MORE)
        for start, end in spans:
            part = _zeros(end - start)
            while at < end:
                taken = data[: end - at]
                part.getbuffer()[at - start : at - start + len(taken)] = taken
                at, data = at + len(taken), data[len(taken) :]
                if not data:
                    at, data = next(made, _NO_MORE)
            yield start, part
            del part

    def _made(
        self, runs: Sequence[range], running: RunningChecksums
    ) -> Iterator[tuple[int, memoryview]]:
        for piece in self._pieces:
            if not isinstance(piece, Copy):
                yield from self._gathered(piece, running)
                continue
            shift, end = piece.at - piece.source_at, piece.at + piece.nbytes
            n = bisect_right(runs, piece.at, key=attrgetter("stop"))
            while n < len(runs) and runs[n].start < end:
                low, high = max(piece.at, runs[n].start), min(end, runs[n].stop)
                for start, data in self._sources[piece.source].chunks(low - shift, high - low):
                    if data:
                        yield start + shift, memoryview(data)
                n += 1

    def _gathered(
        self, gather: Gather, running: RunningChecksums
    ) -> Iterator[tuple[int, memoryview]]:
        source = None
        if gather.content is None:
            source = ReadaheadSource(self._sources[gather.source], gather, running)
        yield from read_gather(source, gather, self.path)

    def _check_sums(
        self, sums: Sequence[Checksum], crcs: Sequence[int], start: int, end: int
    ) -> None:
        """Raises CorruptError if a record that ends within this range has a wrong checksum."""
        n = bisect_right(sums, start, key=lambda each: each.at + each.nbytes)
        while n < len(sums) and sums[n].at + sums[n].nbytes <= end:
            if crcs[n] != sums[n].crc32:
                self._blame(sums[n])
            n += 1

    def _blame(self, each: Checksum) -> None:
        """Raise the error for a wrong checksum: it names the source or the destination."""
        source = self._sources[each.source]
        if crc32_of(source, each.source_at, each.nbytes) != each.crc32:
            raise damage_error(each.name, source)
        raise WriteError(f"the record {each.name!r} is not as it is in its source", path=self.path)

    # -- as a source ---------------------------------------------------------------------------

    def close(self) -> None:
        """As `Source.close`: there is nothing to release."""

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Source.read`. A gather is repeated from its start."""
        check_range(self, start, nbytes)
        made, end = bytearray(nbytes), start + nbytes
        view = memoryview(made)
        for piece in self._within(start, end):
            low, high = max(start, piece.at), min(end, piece.at + piece.nbytes)
            if isinstance(piece, Copy):
                source_at = piece.source_at + low - piece.at
                view[low - start : high - start] = self._sources[piece.source].read(
                    source_at, high - low
                )
                continue
            source = None if piece.content is not None else self._sources[piece.source]
            for at, data in read_gather(source, piece, self.path):
                if at + len(data) > low:
                    since, until = max(at, low), min(at + len(data), high)
                    view[since - start : until - start] = data[since - at : until - at]
                if at + len(data) >= high:
                    break
        self._writes.paint(start, view)
        self._seals.paint(start, view)
        return bytes(made)

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        memoryview(buffer).cast("B")[:] = self.read(start, memoryview(buffer).nbytes)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`, passed on for the copied ranges."""
        wanted = dict[int, list[tuple[int, int]]]()
        for start, nbytes in ranges:
            for piece in self._within(start, start + nbytes):
                if isinstance(piece, Copy):
                    low = max(start, piece.at)
                    high = min(start + nbytes, piece.at + piece.nbytes)
                    source_at = piece.source_at + low - piece.at
                    wanted.setdefault(piece.source, []).append((source_at, high - low))
        for source, those in wanted.items():
            self._sources[source].expect(those)

    def _within(self, start: int, end: int) -> Iterator[Copy | Gather]:
        """Yield the pieces that overlap a range."""
        for n in range(max(0, bisect_right(self._starts, start) - 1), len(self._pieces)):
            piece = self._pieces[n]
            if piece.at >= end:
                return
            if piece.at + piece.nbytes > start:
                yield piece

    def check_unchanged(self) -> None:
        """As `Source.check_unchanged`, for all sources of the plan."""
        for source in self._sources:
            source.check_unchanged()

    def same_file(self, path: StrPath) -> bool:
        """As `Source.same_file`: it is in no file."""
        del path
        return False

    def mappable(self, start: int, nbytes: int) -> int:
        """As `Source.mappable`, which it isn't."""
        raise UnsupportedError("can't be mapped: it is not there yet", path=self.path)


def _joined(spans: Iterable[tuple[int, int]]) -> list[range]:
    """Return spans in order; adjacent spans are merged."""
    runs = list[range]()
    for start, end in spans:
        if runs and runs[-1].stop == start:
            runs[-1] = range(runs[-1].start, end)
        else:
            runs.append(range(start, end))
    return runs


def _within(start: int, end: int, runs: Sequence[range]) -> bool:
    """Whether a range lies in one of these."""
    n = bisect_right(runs, start, key=attrgetter("stop"))
    return n < len(runs) and runs[n].start <= start and end <= runs[n].stop


def _zeros(nbytes: int) -> BytesIO:
    """Return a zeroed part, in a form that can be changed and sent without another copy."""
    return BytesIO(bytes(nbytes))


class _Overlay:
    """Writes that overlay other bytes, in order; they are not copied."""

    def __init__(self, writes: Iterable[Write]) -> None:
        self._writes = sorted(writes, key=attrgetter("at"))
        ends = (write.at + len(write.data) for write in self._writes)
        self._ends = list(accumulate(ends, max))  # largest end so far

    def meets(self, start: int, end: int) -> bool:
        """Whether a range overlaps the overlay."""
        return any(True for _ in self._within(start, end))

    def paint(self, at: int, view: memoryview) -> None:
        """Write the overlay over bytes that start at an offset."""
        for low, data in self.pieces(at, at + len(view)):
            view[low - at : low - at + len(data)] = data

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the pieces that lie in a range."""
        for at, data in self._within(start, end):
            low, high = max(start, at), min(end, at + len(data))
            yield low, memoryview(data)[low - at : high - at]

    def _within(self, start: int, end: int) -> Iterator[Write]:
        for n in range(bisect_right(self._ends, start), len(self._writes)):
            write = self._writes[n]
            if write.at >= end:
                return
            if write.at + len(write.data) > start:
                yield write


def _runs(pieces: Iterable[tuple[int, bytes | memoryview]]) -> list[tuple[int, bytes]]:
    """Yield pieces in order; adjacent pieces are merged."""
    runs = list[tuple[int, list[bytes | memoryview]]]()
    end = -1
    for at, data in pieces:
        if not data:
            continue
        if at != end:
            runs.append((at, []))
        runs[-1][1].append(data)
        end = at + len(data)
    return [(at, b"".join(data)) for at, data in runs]


class ReadaheadSource(SummedSource):
    """A source for one gather: the ranges that it reads in sequence are requested ahead."""

    def __init__(self, source: Source, gather: Gather, running: RunningChecksums) -> None:
        super().__init__(source, gather.source, running)
        self._gather = gather
        self._coming: Iterator[tuple[int, bytes | memoryview]] | None = None
        self._at, self._held = 0, memoryview(b"")  # offset of the next byte; result of its request

    def close(self) -> None:
        """As `Source.close`: nothing more is requested; the source stays open."""
        self._coming = None

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the first read shows what follows."""

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer)
        if self._coming is None:
            nbytes = nbytes_of(prod(self._gather.shape), self._gather.dtype)
            self._at = start
            self._coming = self.source.chunks(start, nbytes)
        if start != self._at:
            self.source.read_into(start, view)
            return
        self._at += len(view)
        done = 0
        while done < len(view):
            if not self._held:
                _, data = next(self._coming)
                self._held = memoryview(data)
            taken = self._held[: len(view) - done]
            view[done : done + len(taken)] = taken
            self._held = self._held[len(taken) :]
            done += len(taken)
        self.running.bytes_read(self.number, start, view)
