"""Tables of very many rows, which only pages show, and how a page draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .blocks import Block


class Drawing(NamedTuple):
    """How a page draws the bytes of columns, as boxes within boxes."""

    name: int  #: the column of dotted names, whose keys divide the boxes
    above: Sequence[int]  #: the first columns to divide by
    colors: Sequence[int]  #: columns that can give the color
    nbytes: int | Sequence[int]  #: a column; or the sizes of each row, if tensors share bytes


class Lanes(NamedTuple):
    """How a page draws rows in their order, from left to right, each in the lane of its device."""

    above: Sequence[int]  #: the first columns to divide by
    name: int  #: the column of dotted names, whose keys divide them then
    below: Sequence[int]  #: columns that divide them last
    lane: int  #: the column of the lane
    lanes: Sequence[str]  #: all lanes, the first one where rows should be
    length: int  #: the column with the length of each row in the drawing, a count
    unit: str  #: the counted things, in the plural
    marked: str  #: the meaning of a mark, which a row has if its last column is not empty


class Columns(NamedTuple):
    """A table of very many rows, by column; pages show it with a search field."""

    head: Sequence[str]
    columns: Sequence[Sequence[str] | Sequence[int] | Sequence[float | None]]
    right: Sequence[int] = ()  #: the right-aligned columns
    bars: Sequence[int] = ()  #: the number columns that are drawn as bars; others are bytes
    what: str = "rows"  #: the name of the rows, in the plural
    drawn: Drawing | Lanes | None = None
    counts: Sequence[int] = ()  #: the columns of numbers that are counts, not bytes


PageBlock = Block | Columns
