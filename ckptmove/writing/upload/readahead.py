"""Sources that are read from start to end: fetched ahead, with running checksums."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import attrgetter

from ...errors import StrPath
from ...manifest.dtypes import nbytes_of
from ...plans.crc32 import extend_crc32
from ...plans.plan import Gather, SourceChecksum
from ...sources.joined import crc32_of, damage_error, read_before
from ...sources.source import Source


class RunningChecksums:
    """Checksums of sources, computed while a plan reads them; `check` reads the rest."""

    def __init__(self, checksums: Sequence[SourceChecksum], sources: Sequence[Source]) -> None:
        self._sources = sources
        self._sums = {each: [each.source_at, 0] for each in checksums}  # up to where; so far
        self._of = dict[int, list[SourceChecksum]]()  # in the order of their source
        for each in sorted(self._sums, key=attrgetter("source_at")):
            self._of.setdefault(each.source, []).append(each)
        self._ends = {  # of each, or of one before it that goes beyond
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

    def check(self) -> None:
        """Read what was not read to its end. Raises CorruptError if a source is damaged."""
        for each, (at, crc32) in self._sums.items():
            source = self._sources[each.source]
            left = each.source_at + each.nbytes - at
            if left == each.nbytes:
                at, crc32 = read_before(self._sources, each)
                left -= at - each.source_at
            if crc32_of(source, at, left, crc32) != each.crc32:
                raise damage_error(each.name, source)


class ReadaheadSource(Source):
    """A source as one gather reads it: what it reads in a row is asked for at once."""

    def __init__(self, source: Source, gather: Gather, running: RunningChecksums) -> None:
        self.path, self.nbytes = source.path, source.nbytes
        self._source = source
        self._gather = gather
        self._running = running
        self._coming: Iterator[tuple[int, bytes]] | None = None
        self._at, self._held = 0, memoryview(b"")  # where the next byte lies; what came of it

    def close(self) -> None:
        """As `Source.close`: nothing more is asked for; the source stays open."""
        self._coming = None

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer)
        if self._coming is None:
            nbytes = nbytes_of(prod(self._gather.shape), self._gather.dtype)
            self._at = start
            self._coming = self._source.chunks(start, nbytes)
        if start != self._at:
            self._source.read_into(start, view)
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
        self._running.bytes_read(self._gather.source, start, view)

    def read(self, start: int, nbytes: int) -> bytes:
        return self._source.read(start, nbytes)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def same_file(self, path: StrPath) -> bool:
        return self._source.same_file(path)

    def mappable(self, start: int, nbytes: int) -> int:
        return self._source.mappable(start, nbytes)
