"""Sources that are fetched ahead, because they are read from start to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from ...manifest.dtypes import nbytes_of
from ...plans.plan import Gather
from ...sources.source import Source
from ..running_checksums import RunningChecksums, SummedSource


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
