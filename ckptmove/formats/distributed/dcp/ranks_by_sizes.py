"""Infer from the sizes of a model's tensors how many ranks divided them, if no file tells.

The rows of a layer are the columns of the next one: a model's rows are among its columns. If the
rows of the last ranks are missing, they are not, but would be with a few more ranks. This is no
proof: it is looked for in several sizes, and found in no model that is whole, since in such a model
some rows are among the columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..boxes import Box

_MOST_SIZES = 16  # different sizes that are looked at
_FEWEST_SIZES = 2  # that must fit with more ranks
_FEWEST = 6  # tensors that must
_TIMES = 4  # as many as fit with the ranks that are there


class DividedShape(NamedTuple):
    """The shape of a tensor as far as there are chunks of it, and these."""

    shape: tuple[int, ...]
    boxes: Sequence[Box]

    def rows_per_rank(self, ranks: int) -> int | None:
        """The rows of each chunk; None unless each of the ranks has as many, and whole rows."""
        sizes = {box.sizes for box in self.boxes}
        if len(sizes) != 1 or len(self.boxes) != ranks or not self.shape or not self.shape[0]:
            return None
        (size,) = sizes
        return size[0] if size[1:] == self.shape[1:] else None


def number_of_ranks(tensors: Iterable[DividedShape], ranks: int) -> int:
    """How many ranks divided these tensors by rows, of which the first `ranks` are there.

    It is `ranks` unless the sizes of at least half of the tensors say that there were more.
    """
    rows, columns = Counter[int](), Counter[int]()
    for each in tensors:
        found = each.rows_per_rank(ranks)
        if found is not None:
            rows[found] += 1
            columns.update(each.shape[1:])
    counted = rows.most_common(_MOST_SIZES)
    widths = [width for width, _ in columns.most_common(_MOST_SIZES)]

    def fitting(world: int) -> tuple[int, int]:
        """How many tensors, and how many sizes, have rows that would be among the columns."""
        counts = [
            count
            for size, count in counted
            if any(width >= ranks * size and -(-width // world) == size for width in widths)
        ]
        return sum(counts), len(counts)

    best, most = ranks, 0
    for world in sorted({-(-width // size) for size, _ in counted for width in widths}):
        count, sizes = fitting(world)
        if world > ranks and sizes >= _FEWEST_SIZES and count > most:
            best, most = world, count
    here, _ = fitting(ranks)
    is_sure = most >= _FEWEST and 2 * most >= rows.total() and most >= _TIMES * here
    return best if is_sure else ranks
