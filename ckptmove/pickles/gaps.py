"""A pickle from which long byte strings were left out, and where they are in its file."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from ..sources.source import MAX_NBYTES

#: Longer byte strings are left out; shorter ones may be anything.
LONG = 1 << 16


class Gap(NamedTuple):
    """Skipped bytes of a pickle: `nbytes` bytes at `start`, relative to the start of the pickle."""

    #: the offset, in the fetched data, of the opcode that pushes them
    at: int
    #: the offset, in the fetched data, where they would be
    end: int
    start: int
    nbytes: int


class FetchedPickle:
    """A pickle without its long byte strings; `nbytes` is its full size, with them."""

    def __init__(self, data: bytes, gaps: list[Gap]) -> None:
        self.data = data
        self.gaps = {gap.at: gap for gap in gaps}
        self._ends = [gap.end for gap in gaps]
        self._skipped = [0, *accumulate(gap.nbytes for gap in gaps)]
        self.nbytes = len(data) + self._skipped[-1]

    def gap_sizes(self) -> dict[int, int]:
        """Offset of each opcode that pushes skipped bytes → how many were skipped."""
        return {at: gap.nbytes for at, gap in self.gaps.items()}

    def gap_starts(self, start: int) -> Iterator[int]:
        """The file offsets of the skipped bytes, if the pickle starts at `start`."""
        return (start + gap.start for gap in self.gaps.values())

    def place(self, at: int) -> int:
        """The offset in the pickle of the byte at offset `at` of `data`."""
        return at + self._skipped[bisect_right(self._ends, at)]


def is_bare(content: bytes) -> bool:
    """Whether bytes surely have no string that `fetch` would skip, whatever the opcodes are."""
    if len(content) <= LONG:
        return True
    most = len(content) >> 24  # the largest last byte of a count that fits into the content
    counts = rb"[BT\x8e]..(?!\0\0).[\0-\x%02x]" % most
    return len(content) <= MAX_NBYTES and re.search(counts, content, re.DOTALL) is None
