"""Join ranges of files into one source, so that chunks of a tensor read like one storage.

A chunk is a box of a tensor. Its bytes are contiguous in a file; in the tensor they are separate
runs, unless the box spans all inner dimensions. Adjacent runs are copied by the kernel (`pieces`);
others are interleaved here, a block at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import gcd, prod
from typing import Literal, NamedTuple, Protocol

from ..errors import StrPath, UnsupportedError
from ..plans.crc32 import combine_crc32, extend_crc32
from .file import File
from .source import Piece, Source, check_range

_BLOCK = 1 << 20  # bytes interleaved at once; more than the processor's cache is slower
_LARGE_BLOCK = 1 << 21  # … if not all lie in files here: it takes fewer requests
_ALIGNMENT = 64
#: The type codes of Python's integers, by size in bytes.
FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Filler(Protocol):
    """The origin of a strip: a source, or reordered elements."""

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        """As `Source.read_into`."""


class Strip(NamedTuple):
    """Runs that are contiguous in a source, and separate in the joined bytes. All in bytes."""

    source: Filler  #: a source, if there is only one run
    source_at: int
    at: int  #: offset of the first run in the region
    run: int  #: the size of each run
    counts: tuple[int, ...] = ()  #: the number of runs in each dimension, outermost first
    pitches: tuple[int, ...] = ()  #: distance of their starts, likewise

    @property
    def end(self) -> int:
        """The end of the last run, in the region."""
        spans = zip(self.counts, self.pitches, strict=True)
        return self.at + self.run + sum((n - 1) * pitch for n, pitch in spans)

    @property
    def is_woven(self) -> bool:
        """Whether it has several runs."""
        return prod(self.counts) > 1

    def lines(self) -> int:
        """The number of rows of runs; each row has one pitch."""
        return prod(self.counts[:-1])

    def line_at(self, n: int) -> int:
        """Return the start of a row of runs in the region."""
        at = self.at
        outer = zip(self.counts[:-1], self.pitches[:-1], strict=True)
        for count, pitch in reversed(list(outer)):
            n, index = divmod(n, count)
            at += index * pitch
        return at


class Region(NamedTuple):
    """A range of the joined bytes."""

    at: int
    nbytes: int
    strips: Callable[[], Sequence[Strip]]  #: its strips, in order of their first bytes


class JoinedFiles(Source):
    """Joined files; regions are added one by one, and indexed at the first read."""

    __slots__ = ("_regions", "_runs", "_starts", "_strips", "_sums")

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes = 0
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._strips: dict[int, Sequence[Strip]] = {}
        #: sequential reads, by `id()` of a file and start: the end, and the CRC-32
        self._sums: dict[tuple[int, int], tuple[int, int]] = {}
        self._runs: dict[tuple[int, int], int] = {}  # by the end: the start

    def add(self, nbytes: int, strips: Callable[[], Sequence[Strip]]) -> int:
        """Add a region that these strips fill; return its start."""
        at = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._regions.append(Region(at, nbytes, strips))
        self._starts.append(at)
        self.nbytes = at + nbytes
        return at

    def close(self) -> None:
        """As `Source.close`: its files are closed by the code that opened them."""

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        self._read_into(start, memoryview(buffer).cast("B"), bytearray())

    def _read_into(self, start: int, view: memoryview, scratch: bytearray) -> None:
        """As `read_into`. Runs are read into `scratch`, which grows as needed."""
        check_range(self, start, len(view))
        for n, low, high in self._within(start, start + len(view)):
            region = self._regions[n]
            part = view[low - start : high - start]
            for strip in _meeting(self._strips_of(n), low - region.at, high - region.at):
                weave(strip, low - region.at, part, scratch, self._read)

    def _read(self, strip: Strip, at: int, buffer: memoryview) -> None:
        """Read from the origin of a strip, and update its checksum."""
        strip.source.read_into(at, buffer)
        self.note(strip.source, at, buffer)

    def note(self, source: Filler, at: int, data: bytes | memoryview) -> None:
        """Update the checksum of bytes read from a file; sequential reads are one run."""
        key, end = id(source), at + len(data)
        start = self._runs.pop((key, at), at)
        until, crc32 = self._sums.get((key, start), (at, 0))
        if start == at or until != at:
            start, crc32 = at, 0
        self._sums[key, start] = end, extend_crc32(crc32, data)
        self._runs[key, end] = start

    def read_before(self, source: Source, at: int, nbytes: int) -> tuple[int, int]:
        """Return how far a range of a file was read, and the CRC-32 of those bytes."""
        end, crc32 = at + nbytes, 0
        while at < end:
            until, more = self._sums.get((id(source), at), (at, 0))
            if not at < until <= end:
                break
            crc32 = combine_crc32(crc32, more, until - at)
            at = until
        return at, crc32

    def chunks(self, start: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """As `Source.chunks`; the next block of files here is read while one is used.

        Two buffers take turns: allocating a new one takes longer than filling it. From a store, one
        saves memory; what is decompressed is read by one thread.
        """
        within = self._within(start, start + nbytes)
        is_here = all(_is_file(strip) for n, *_ in within for strip in self._strips_of(n))
        size = _BLOCK if is_here else _LARGE_BLOCK
        count, scratch = -(-nbytes // size), bytearray()
        buffers = [bytearray(min(size, nbytes)) for _ in range(min(2, count) if is_here else 1)]

        def block(n: int) -> tuple[int, memoryview]:
            at = start + n * size
            view = memoryview(buffers[n % len(buffers)])[: start + nbytes - at]
            self._read_into(at, view, scratch)
            return at, view

        if len(buffers) < 2:
            yield from map(block, range(count))
            return
        from .fetch_pool import FetchPool  # imported only here: small tensors do not need it

        reader = FetchPool[tuple[int, memoryview]](1)
        try:
            coming = reader.submit(partial(block, 0))
            for n in range(count):
                found = coming.result()
                if n + 1 < count:
                    coming = reader.submit(partial(block, n + 1))
                yield found
        finally:
            reader.close()

    def pieces(self, start: int, nbytes: int) -> Iterator[Piece]:
        """As `Source.pieces`: of the files if they have contiguous bytes, otherwise of itself."""
        done = start
        for n, low, high in self._within(start, start + nbytes):
            region, strips = self._regions[n], self._strips_of(n)
            if low > done:
                yield Piece(self, done, low - done)
            done = high
            if any(strip.counts for strip in strips):
                yield Piece(self, low, high - low)
                continue
            for strip in _meeting(strips, low - region.at, high - region.at):
                first = max(low - region.at, strip.at)
                last = min(high - region.at, strip.end)
                assert isinstance(strip.source, Source)
                yield Piece(strip.source, strip.source_at + first - strip.at, last - first)
        if done < start + nbytes:
            yield Piece(self, done, start + nbytes - done)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`, for contiguous ranges in its files."""
        for start, nbytes in ranges:
            for piece in self.pieces(start, nbytes):
                if piece.source is not self:
                    piece.source.expect([(piece.at, piece.nbytes)])

    def check_unchanged(self) -> None:
        """As `Source.check_unchanged`: its files are checked by the code that opened them."""

    def same_file(self, path: StrPath) -> bool:
        """As `Source.same_file`: it is in no file."""
        del path
        return False

    def mappable(self, start: int, nbytes: int) -> int:
        """As `Source.mappable`: raises UnsupportedError, as it lies in several files."""
        raise UnsupportedError("can't be mapped: it lies in several files", path=self.path)

    @property
    def own_nbytes(self) -> int:
        """As `Source.own_nbytes`: 0, because all bytes belong to its files."""
        return 0

    @property
    def allocated_nbytes(self) -> int:
        """As `Source.allocated_nbytes`: those of its files."""
        return 0

    def _within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the regions that a range overlaps, each with the overlap."""
        for n in range(max(0, bisect_right(self._starts, start) - 1), len(self._regions)):
            region = self._regions[n]
            low, high = max(start, region.at), min(end, region.at + region.nbytes)
            if region.at >= end:
                return
            if low < high:
                yield n, low, high

    def _strips_of(self, n: int) -> Sequence[Strip]:
        if n not in self._strips:
            self._strips[n] = self._regions[n].strips()
        return self._strips[n]


def _meeting(strips: Sequence[Strip], start: int, end: int) -> Iterator[Strip]:
    """Return the strips that may have bytes in a range of their region."""
    first = 0
    if not any(strip.counts for strip in strips):
        first = max(0, bisect_right(strips, start, key=lambda strip: strip.at) - 1)
    for n in range(first, len(strips)):
        if strips[n].at >= end:
            return
        if strips[n].end > start:
            yield strips[n]


def weave(
    strip: Strip,
    start: int,
    view: memoryview,
    scratch: bytearray,
    read: Callable[[Strip, int, memoryview], None],
) -> None:
    """Copy a strip's bytes into a view that begins at `start` in its region."""
    if not strip.counts:
        low, high = max(start, strip.at), min(start + len(view), strip.end)
        if low < high:
            source_at = strip.source_at + low - strip.at
            read(strip, source_at, view[low - start : high - start])
        return
    rows: Iterable[tuple[int, int, int]] = _rows_of_runs(strip, start, start + len(view))
    source = strip.source
    if isinstance(source, Source) and source.fetch_stats is not None:
        rows = list(rows)
        if len(rows) > 1:  # one request for all of them, not one for each row
            source.expect((source_at, count * strip.run) for source_at, _, count in rows)
    for source_at, at, count in rows:
        _put_runs(strip, source_at, at - start, count, view, scratch, read)


def _is_file(strip: Strip) -> bool:
    """Whether a strip's source is a file here, which any thread can read."""
    return isinstance(strip.source, File)


def _rows_of_runs(strip: Strip, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of runs in a range of the region: offset in the source, there, and number."""
    count, pitch, lines = strip.counts[-1], strip.pitches[-1], strip.lines()
    first = bisect_right(range(lines), start, key=strip.line_at) - 1
    for line in range(max(0, first), lines):
        at = strip.line_at(line)
        if at >= end:
            return
        low = max(0, -((at + strip.run - 1 - start) // pitch)) if at < start else 0
        high = min(count, -(-(end - at) // pitch))
        if low < high:
            source_at = strip.source_at + (line * count + low) * strip.run
            yield source_at, at + low * pitch, high - low


def _put_runs(
    strip: Strip,
    source_at: int,
    at: int,
    count: int,
    view: memoryview,
    scratch: bytearray,
    read: Callable[[Strip, int, memoryview], None],
) -> None:
    """Copy runs at one pitch into a view; the first and last run may extend beyond it."""
    run, pitch = strip.run, strip.pitches[-1]
    before = max(0, -at)  # bytes of the first run that are not wanted
    after = max(0, at + (count - 1) * pitch + run - len(view))  # … and of the last
    nbytes = count * run - before - after
    if len(scratch) < nbytes:
        scratch += bytes(nbytes - len(scratch))
    came = memoryview(scratch)[:nbytes]
    read(strip, source_at + before, came)
    taken = 0
    if before:
        taken = min(run - before, len(came))
        view[:taken] = came[:taken]
        at, count = at + pitch, count - 1
    if after and count:
        left = run - after
        count -= 1
        view[at + count * pitch : at + count * pitch + left] = came[len(came) - left :]
        came = came[: len(came) - left]
    if count:
        scatter(came[taken:], view[at : at + (count - 1) * pitch + run], run, pitch, count)


def scatter(data: memoryview, view: memoryview, run: int, pitch: int, count: int) -> None:
    """Copy contiguous runs into a view in which each begins a pitch after the last."""
    unit = gcd(run, pitch, 8)
    if run // unit > count:
        for n in range(count):
            view[n * pitch : n * pitch + run] = data[n * run : (n + 1) * run]
        return
    source, to = data.cast(FORMATS[unit]), view.cast(FORMATS[unit])
    for n in range(run // unit):
        to[n :: pitch // unit] = source[n :: run // unit]
