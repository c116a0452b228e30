"""Flat tensors that ranks hold, of which each parameter has a range: the arithmetic of ZeRO.

Stages 1 and 2 put the parameters of a group one after the other, each with its padding if it has
some, and cut the whole into one partition a rank: a cut falls anywhere within a parameter. Stage 3
cuts each parameter into one slice a rank, of `ceil(numel / ranks)` elements, the last one short or
empty; each rank puts its slices one after the other, and cuts that into subgroups.

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
    at: int  #: of the first, in bytes
    dtype: str
    shape: tuple[int, ...]
    numel: int
    #: the checksum of the record that they lie in, if it has one
    proof: Proof | None = None
    #: the device that its file says
    tag: str = "cpu"

    def first(self, numel: int) -> Elements:
        """The first of them."""
        return self._replace(shape=(numel,), numel=numel)


class Slice(NamedTuple):
    """A range of the elements of a parameter: where in it, and where in a row of flat tensors."""

    row: int
    start: int
    numel: int
    at: int  #: of the parameter


class Row:
    """Flat tensors, one after the other."""

    def __init__(self, flats: Sequence[Elements], width: int) -> None:
        """`width`: bytes of an element."""
        self.flats = flats
        self.width = width
        self._starts = [0, *accumulate(each.numel for each in flats)]

    @property
    def numel(self) -> int:
        """How many elements all have."""
        return self._starts[-1]

    def within(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """The flat tensors that have a range: which, from where in it, and how many elements."""
        n, end = max(0, bisect_right(self._starts, start) - 1), start + numel
        while start < end:
            until = min(end, self._starts[n + 1])
            if until > start:
                yield n, start - self._starts[n], until - start
                start = until
            n += 1

    def strips(self, start: int, numel: int, at: int) -> Iterator[Strip]:
        """What fills a range, which is at element `at` of a region."""
        for n, first, count in self.within(start, numel):
            flat = self.flats[n]
            run = count * self.width
            yield Strip(flat.source, flat.at + first * self.width, at * self.width, run)
            at += count


class Whole(NamedTuple):
    """A tensor, as it is put together of slices of rows."""

    dtype: str
    shape: tuple[int, ...]
    numel: int
    rows: Sequence[Row]
    #: where its elements, or those of its first slice, begin in the rows
    start: int
    #: whether each row has a slice of it, as in stage 3
    in_each_row: bool = False

    def slices(self) -> Iterator[Slice]:
        """Its elements in the rows, in order."""
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
        """What fills its bytes, in order."""
        return [
            strip
            for each in self.slices()
            for strip in self.rows[each.row].strips(each.start, each.numel, each.at)
        ]

    def flats(self) -> Iterator[Elements]:
        """The flat tensors that have its strips, one for each."""
        for each in self.slices():
            row = self.rows[each.row]
            yield from (row.flats[n] for n, _, _ in row.within(each.start, each.numel))

    def tags(self) -> tuple[str, ...]:
        """The devices that the files say which have it."""
        return tuple(dict.fromkeys(flat.tag for flat in self.flats()))

    def pieces(self) -> int:
        """How many ranks have elements of it."""
        if self.in_each_row:
            each = share(self.numel, len(self.rows))
            return -(-self.numel // each) if each else 0
        return sum(1 for _ in self.rows[0].within(self.start, self.numel))


def share(numel: int, ranks: int) -> int:
    """How many elements of a parameter of stage 3 each rank has, but for the last ones."""
    return -(-numel // ranks)


def whole_of(elements: Elements) -> Whole:
    """A tensor that one file has."""
    width = BITS[elements.dtype] // 8
    return Whole(elements.dtype, elements.shape, elements.numel, [Row([elements], width)], 0)
