"""The arithmetic of ZeRO: flat tensors of ranks, in which each parameter has a range.

Stages 1 and 2 put the parameters of a group one after the other, each with its padding if it has
some, and cut the whole into one partition per rank: a cut may fall anywhere within a parameter.
Stage 3 cuts each parameter into one slice per rank, of `ceil(numel / ranks)` elements, with the
last one shorter or empty; each rank puts its slices one after the other, and cuts them into
subgroups.

Source: deepspeed/utils/zero_to_fp32.py (DeepSpeed 0.19).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ....manifest.dtypes import BITS
from ....plans.plan import Proof
from ....sources.joined import Strip
from ....sources.source import Source


class Elements(NamedTuple):
    """The elements of a contiguous tensor, in a file."""

    source: Source
    at: int  #: the offset of the first, in bytes
    dtype: str
    shape: tuple[int, ...]
    numel: int
    #: the checksum of the record that contains them, if it has one
    proof: Proof | None = None
    #: the device tag in its file
    tag: str = "cpu"

    def first(self, numel: int) -> Elements:
        """The first `numel` of these elements."""
        return self._replace(shape=(numel,), numel=numel)


class Slice(NamedTuple):
    """A range of a parameter's elements: its place in the parameter and in a row."""

    row: int
    start: int
    numel: int
    at: int  #: the offset in the parameter


class FlatTensors:
    """Flat tensors of a rank, one after the other."""

    def __init__(self, flats: Sequence[Elements], width: int) -> None:
        """`width`: the bytes of an element."""
        self.flats = flats
        self.width = width
        self._starts = [0, *accumulate(each.numel for each in flats)]

    @property
    def numel(self) -> int:
        """The number of elements of all flat tensors together."""
        return self._starts[-1]

    def within(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """The flat tensors that contain a range: index, first element in it, number of elements."""
        n, end = max(0, bisect_right(self._starts, start) - 1), start + numel
        while start < end:
            until = min(end, self._starts[n + 1])
            if until > start:
                yield n, start - self._starts[n], until - start
                start = until
            n += 1

    def strips(self, start: int, numel: int, at: int) -> Iterator[Strip]:
        """The strips that fill a range, starting at element `at` of a region."""
        for n, first, count in self.within(start, numel):
            flat = self.flats[n]
            run = count * self.width
            yield Strip(flat.source, flat.at + first * self.width, at * self.width, run)
            at += count


class Whole(NamedTuple):
    """A tensor that is assembled from slices of rows."""

    dtype: str
    shape: tuple[int, ...]
    numel: int
    rows: Sequence[FlatTensors]
    #: where its elements, or those of its first slice, start in the rows
    start: int
    #: whether each row has a slice of it, as in stage 3
    in_each_row: bool = False

    def slices(self) -> Iterator[Slice]:
        """The ranges in the rows that hold its elements, in order."""
        if not self.in_each_row:
            yield Slice(0, self.start, self.numel, 0)
            return
        each = share(self.numel, len(self.rows))
        for row in range(len(self.rows)):
            count = min(each, self.numel - row * each)
            if count <= 0:
                return
            yield Slice(row, self.start, count, row * each)

    def strips(self) -> list[Strip]:
        """The strips that fill its bytes, in order."""
        return [
            strip
            for each in self.slices()
            for strip in self.rows[each.row].strips(each.start, each.numel, each.at)
        ]

    def flats(self) -> Iterator[Elements]:
        """The flat tensors that contain its strips, one for each strip."""
        for each in self.slices():
            row = self.rows[each.row]
            yield from (row.flats[n] for n, _, _ in row.within(each.start, each.numel))

    def tags(self) -> tuple[str, ...]:
        """The device tags of the files that hold parts of it."""
        return tuple(dict.fromkeys(flat.tag for flat in self.flats()))

    def pieces(self) -> int:
        """How many ranks have elements of it."""
        if self.in_each_row:
            each = share(self.numel, len(self.rows))
            return -(-self.numel // each) if each else 0
        return sum(1 for _ in self.rows[0].within(self.start, self.numel))


def share(numel: int, ranks: int) -> int:
    """How many elements of a stage 3 parameter each rank has; the last ranks may have fewer."""
    return -(-numel // ranks)


def whole_of(elements: Elements) -> Whole:
    """A tensor that is in one file."""
    width = BITS[elements.dtype] // 8
    return Whole(
        elements.dtype, elements.shape, elements.numel, [FlatTensors([elements], width)], 0
    )
