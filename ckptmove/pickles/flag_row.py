"""Store long rows of True, False and None in one byte per item.

In a pickle each item takes one byte, but in a list eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from typing import Any, TypeAlias, overload

Flag: TypeAlias = "bool | None"

_VALUES: tuple[Flag, ...] = (None, False, True)
_CODES: dict[Flag, int] = {value: code for code, value in enumerate(_VALUES)}
_OPCODES = bytes.maketrans(b"\x00\x01\x02", b"N\x89\x88")


class FlagRow(MutableSequence[Any]):  # the items are nodes, if it is a row of nodes
    """A row of True, False and None; it can't store other values."""

    __slots__ = ("codes",)

    def __init__(self, items: Iterable[Flag] = ()) -> None:
        #: for each item, its index in `_VALUES`
        self.codes = bytearray(map(_CODES.__getitem__, items))

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[Flag]:
        return map(_VALUES.__getitem__, self.codes)

    def __reversed__(self) -> Iterator[Flag]:
        return map(_VALUES.__getitem__, reversed(self.codes))

    @overload
    def __getitem__(self, at: int) -> Flag: ...
    @overload
    def __getitem__(self, at: slice) -> FlagRow: ...
    def __getitem__(self, at: int | slice) -> Flag | FlagRow:
        if isinstance(at, slice):
            part = FlagRow()
            part.codes = self.codes[at]
            return part
        return _VALUES[self.codes[at]]

    @overload
    def __setitem__(self, at: int, item: Flag) -> None: ...
    @overload
    def __setitem__(self, at: slice, item: Iterable[Flag]) -> None: ...
    def __setitem__(self, at: int | slice, item: Flag | Iterable[Flag]) -> None:
        value: Any = item
        if isinstance(at, int):
            self.codes[at] = _CODES[value]
        else:
            self.codes[at] = FlagRow(value).codes

    def __delitem__(self, at: int | slice) -> None:
        del self.codes[at]

    def insert(self, at: int, item: Flag) -> None:
        """Insert an item before the one at `at`."""
        self.codes.insert(at, _CODES[item])

    def extend(self, items: Iterable[Flag]) -> None:
        """Add items at the end."""
        self.codes += items.codes if isinstance(items, FlagRow) else FlagRow(items).codes

    @property
    def opcodes(self) -> bytes:
        """The opcodes that push these values."""
        return bytes(self.codes.translate(_OPCODES))
