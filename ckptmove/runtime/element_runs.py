"""Read a tensor's elements in order, from a file, from memory, or from a strided view."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..graph.compare.difference import StoredElements
from ..graph.draft import View
from ..manifest.dtypes import BITS
from ..sources.source import Source
from ..torch_pickle.values.strided import reach_of


class ElementRun(Protocol):
    """The elements of a tensor in order, read from the start to the end."""

    def data_from(self, at: int) -> int:
        """The offset, from `at` on, of the first byte that is not known to be zero."""

    def read(self, at: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes at an offset."""


class Range:
    """Elements in part of a file."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.source = source
        self.start, self.end = start, end
        self.dense = source.allocated_nbytes >= source.nbytes
        self.known = start, start
        source.expect([(start, end - start)])

    def data_from(self, at: int) -> int:
        """As `ElementRun.data_from`."""
        at += self.start
        if self.dense or self.known[0] <= at < self.known[1]:
            return at - self.start
        ranges = self.source.data_ranges(at, self.end)
        self.known = next(ranges, (self.end, self.end))
        return self.known[0] - self.start

    def read(self, at: int, buffer: memoryview) -> None:
        """As `ElementRun.read`."""
        self.source.read_into(self.start + at, buffer)


class Content:
    """Elements in memory."""

    def __init__(self, content: memoryview) -> None:
        self.content = content

    def data_from(self, at: int) -> int:
        """As `ElementRun.data_from`."""
        return at

    def read(self, at: int, buffer: memoryview) -> None:
        """As `ElementRun.read`."""
        buffer[:] = self.content[at : at + len(buffer)]


class GatheredElements:
    """Elements that come in chunks of any size."""

    def __init__(self, chunks: Iterator[bytearray]) -> None:
        self.chunks = chunks
        self.rest = memoryview(b"")

    def data_from(self, at: int) -> int:
        """As `ElementRun.data_from`."""
        return at

    def read(self, at: int, buffer: memoryview) -> None:
        """As `ElementRun.read`."""
        while len(buffer):
            if not len(self.rest):
                self.rest = memoryview(next(self.chunks))
            count = min(len(buffer), len(self.rest))
            buffer[:count] = self.rest[:count]
            buffer, self.rest = buffer[count:], self.rest[count:]


def plain(shown: StoredElements, start: int) -> ElementRun:
    """The stored bytes of a storage from an offset on, without conversion."""
    stored = shown.stored
    if stored.content is not None:
        return Content(memoryview(stored.content)[start:])
    source = shown.draft.sources[stored.source]
    return Range(source, stored.start + start, stored.start + stored.nbytes)


def span(view: View) -> tuple[int, int]:
    """The start and end, in bytes, of the part of a storage that a view covers."""
    start = view.offset * BITS[view.dtype] // 8
    return start, max(start, reach_of(view.shape, view.stride, view.offset, view.dtype))
