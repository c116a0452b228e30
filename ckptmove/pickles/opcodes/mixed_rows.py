"""Store long rows of integers mixed with other nodes in a few bytes per integer.

An integer takes forty bytes as an object, and five in a pickle.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import islice
from typing import TypeAlias, overload

from ..nodes import Blob, Call, Dict, Global, List, Persistent, Set, Tuple

_Node: TypeAlias = (
    "bool | int | float | str | bytes | Blob | Global | Tuple | List | Set | Dict | Call"
    " | Persistent | None"
)
_BITS = 63
_SHORTEST = 1 << 12  # items
_PART = 1 << 12  # items that are converted at once
_INTEGERS = {int}
_SHARED_BELOW = 1 << 16  # smaller integers are shared objects (`rows`)


class MixedRow(MutableSequence["_Node"]):
    """A row of 63-bit integers and other nodes; integers are created anew at each access."""

    __slots__ = ("numbers", "others", "which")

    def __init__(self, items: Iterable[_Node] = ()) -> None:
        #: for each item, its value, or its index in `others`
        self.numbers = array("q")
        #: for each item, whether it is in `others`
        self.which = bytearray()
        self.others: list[_Node] = []
        self.extend(items)

    def _put(self, item: _Node) -> int:
        if type(item) is int and item.bit_length() <= _BITS:
            return item
        self.others.append(item)
        return len(self.others) - 1

    def extend(self, items: Iterable[_Node]) -> None:
        """Add items at the end."""
        rest = iter(items)
        while part := list(islice(rest, _PART)):
            if set(map(type, part)) == _INTEGERS and _fit(part):  # type: ignore[arg-type] # as just told
                self.numbers.extend(part)  # type: ignore[arg-type] # as was just found
                self.which += bytes(len(part))
                continue
            for item in part:
                before = len(self.others)
                self.numbers.append(self._put(item))
                self.which.append(len(self.others) - before)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[_Node]:
        others = self.others
        for other, number in zip(self.which, self.numbers, strict=True):
            yield others[number] if other else number

    @overload
    def __getitem__(self, at: int) -> _Node: ...
    @overload
    def __getitem__(self, at: slice) -> list[_Node]: ...
    def __getitem__(self, at: int | slice) -> _Node | list[_Node]:
        if isinstance(at, slice):
            both = zip(self.which[at], self.numbers[at], strict=True)
            return [self.others[number] if other else number for other, number in both]
        return self.others[self.numbers[at]] if self.which[at] else self.numbers[at]

    @overload
    def __setitem__(self, at: int, item: _Node) -> None: ...
    @overload
    def __setitem__(self, at: slice, item: Iterable[_Node]) -> None: ...
    def __setitem__(self, at: int | slice, item: _Node | Iterable[_Node]) -> None:
        if isinstance(at, int) and self.which[at]:
            self.others[self.numbers[at]] = item  # type: ignore[assignment]
            return
        part = slice(at, at + 1 or None) if isinstance(at, int) else at
        new = MixedRow([item] if isinstance(at, int) else item)  # type: ignore[list-item, arg-type]
        start = len(self.others)
        moved = zip(new.which, new.numbers, strict=True)
        self.numbers[part] = array("q", [n + start if other else n for other, n in moved])
        self.which[part] = new.which
        self.others += new.others

    def __delitem__(self, at: int | slice) -> None:
        del self.numbers[at], self.which[at]

    def insert(self, at: int, item: _Node) -> None:
        """Insert an item before the one at `at`."""
        before = len(self.others)
        self.numbers.insert(at, self._put(item))
        self.which.insert(at, len(self.others) - before)


def _fit(numbers: list[int]) -> bool:
    """Whether all of these integers have at most 63 bits."""
    return max(max(numbers).bit_length(), min(numbers).bit_length()) <= _BITS


def parts_of(items: Sequence[_Node]) -> Sequence[_Node]:
    """All items except the integers of mixed rows; every item of any other row."""
    return items.others if isinstance(items, MixedRow) else items


def is_worth_it(items: Sequence[_Node]) -> bool:
    """Whether a list takes less memory as a mixed row."""
    if len(items) < _SHORTEST:
        return False
    if isinstance(items, MixedRow):
        return 4 * (len(items) - len(items.others)) > len(items)
    large = sum(type(each) is int and not 0 <= each < _SHARED_BELOW for each in items)
    return 4 * large > len(items)
