"""Checksums of sources, computed while they are read for something else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter

from ..errors import StrPath
from ..plans.crc32 import extend_crc32
from ..plans.plan import SourceChecksum
from ..sources.checksums import crc32_of, damage_error, read_before
from ..sources.source import Source


class RunningChecksums:
    """Checksums of sources, computed while a plan reads them; `check` reads the rest."""

    def __init__(self, checksums: Sequence[SourceChecksum], sources: Sequence[Source]) -> None:
        self._sources = sources
        self._sums = {each: [each.source_at, 0] for each in checksums}  # end, CRC-32 so far
        self._of = dict[int, list[SourceChecksum]]()  # sorted by their place in the source
        for each in sorted(self._sums, key=attrgetter("source_at")):
            self._of.setdefault(each.source, []).append(each)
        self._ends = {  # largest end of each range and the ranges before it
            source: list(accumulate((each.source_at + each.nbytes for each in those), max))
            for source, those in self._of.items()
        }

    def bytes_read(self, source: int, start: int, data: memoryview) -> None:
        """Update the running CRC-32s with bytes read from a source."""
        if source not in self._of:
            return
        end, those = start + len(data), self._of[source]
        for n in range(bisect_right(self._ends[source], start), len(those)):
            each = those[n]
            if each.source_at >= end:
                return
            so_far = self._sums[each]
            if start <= so_far[0] < min(end, each.source_at + each.nbytes):
                stop = min(end, each.source_at + each.nbytes)
                so_far[1] = extend_crc32(so_far[1], data[so_far[0] - start : stop - start])
                so_far[0] = stop

    def so_far(self) -> Iterator[tuple[SourceChecksum, int, int]]:
        """Yield each checksum, with the start of its unread rest and the CRC-32 up to there."""
        for each, (at, crc32) in self._sums.items():
            if at == each.source_at:
                at, crc32 = read_before(self._sources, each)
            yield each, at, crc32

    def check(self) -> None:
        """Read the unread rest of each range. Raises CorruptError if a source is damaged."""
        for each, at, crc32 in self.so_far():
            source = self._sources[each.source]
            if crc32_of(source, at, each.source_at + each.nbytes - at, crc32) != each.crc32:
                raise damage_error(each.name, source)


class SummedSource(Source):
    """A source for one gather; it sums the bytes that are read."""

    def __init__(self, source: Source, number: int, running: RunningChecksums) -> None:
        """`number`: which of the sources of the checksums it is."""
        self.path, self.nbytes = source.path, source.nbytes
        self.source, self.number, self.running = source, number, running

    def close(self) -> None:
        """Do nothing: the source stays open."""

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        self.source.read_into(start, buffer)
        self.running.bytes_read(self.number, start, memoryview(buffer))

    def read(self, start: int, nbytes: int) -> bytes:
        return self.source.read(start, nbytes)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.source.expect(ranges)

    def check_unchanged(self) -> None:
        self.source.check_unchanged()

    def same_file(self, path: StrPath) -> bool:
        return self.source.same_file(path)

    def mappable(self, start: int, nbytes: int) -> int:
        return self.source.mappable(start, nbytes)
