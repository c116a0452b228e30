"""Store the pairs of a long dict as two rows, with keys as plain text.

A pair as a tuple takes seventy bytes, and a key with its offset ninety bytes more than its text,
while a file may need only ten bytes for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, TypeAlias, overload

from ...manifest.device import may_be_tag
from ..nodes import Items, Node, Text, are_plain
from .mixed_rows import MixedRow
from .rows import extended, packed

_LONG = 1 << 10  # pairs; a pickler sets a thousand at once
_SHORT = 64  # characters; shorter keys are stored as plain text

Pair: TypeAlias = "tuple[Node, Node]"


class Pairs(MutableSequence["tuple[Node, Node]"]):
    """A sequence of key/value pairs, which are created anew at each access."""

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: Items = []
        self.values: Items = []

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Pair]:
        return zip(self.keys, self.values, strict=True)

    def __reversed__(self) -> Iterator[Pair]:
        return zip(reversed(self.keys), reversed(self.values), strict=True)

    @overload
    def __getitem__(self, at: int) -> Pair: ...
    @overload
    def __getitem__(self, at: slice) -> list[Pair]: ...
    def __getitem__(self, at: int | slice) -> Pair | list[Pair]:
        if isinstance(at, slice):
            return list(zip(self.keys[at], self.values[at], strict=True))
        return self.keys[at], self.values[at]

    @overload
    def __setitem__(self, at: int, pair: Pair) -> None: ...
    @overload
    def __setitem__(self, at: slice, pair: Iterable[Pair]) -> None: ...
    def __setitem__(self, at: int | slice, pair: Pair | Iterable[Pair]) -> None:
        self.loosen()
        both: list[Any] = [pair] if isinstance(at, int) else list(pair)
        keys, values = [each[0] for each in both], [each[1] for each in both]
        part = at if isinstance(at, slice) else slice(at, at + 1 or None)
        self.keys[part], self.values[part] = keys, values

    def __delitem__(self, at: int | slice) -> None:
        del self.keys[at], self.values[at]

    def insert(self, at: int, pair: Pair) -> None:
        """Insert a pair before the one at `at`."""
        self.loosen()
        self.keys.insert(at, pair[0])
        self.values.insert(at, pair[1])

    def loosen(self) -> None:
        """Turn both rows into lists, which accept any node."""
        self.keys = self.keys if isinstance(self.keys, list) else list(self.keys)
        self.values = self.values if isinstance(self.values, list) else list(self.values)

    def add(self, flat: Sequence[Node]) -> None:
        """Add alternating keys and values."""
        keys, values = list(map(_plain_key, flat[::2])), flat[1::2]
        self.keys = extended(self.keys, keys) if self.keys else packed(keys)
        self.values = extended(self.values, list(values)) if self.values else packed(list(values))


def with_pairs(pairs: MutableSequence[Pair], flat: list[Node]) -> MutableSequence[Pair]:
    """Pairs with more pairs added, from alternating keys and values.

    The same object if possible.
    """
    if isinstance(pairs, Pairs):
        pairs.add(flat)
        return pairs
    if len(pairs) + len(flat) // 2 > _LONG:
        found = Pairs()
        if pairs:
            found.add([each for pair in pairs for each in pair])
        found.add(flat)
        return found
    added = zip(flat[::2], flat[1::2], strict=True)
    if not pairs:
        return list(added)
    pairs.extend(added)
    return pairs


def changed(pairs: MutableSequence[Pair], change: Callable[[Node], Node]) -> MutableSequence[Pair]:
    """Pairs with each key and value replaced by `change`; a long row is changed in place."""
    if not isinstance(pairs, Pairs):
        return [(change(key), change(value)) for key, value in pairs]
    for row in (pairs.keys, pairs.values):
        change_each(row, change)
    return pairs


def change_each(row: Items, change: Callable[[Node], Node]) -> None:
    """Replace the nodes of a row by `change`, in place."""
    if isinstance(row, MixedRow):
        row = row.others
    if not are_plain(row):
        last = new = None
        for n, each in enumerate(row):
            if each is not last:  # the same node may occur a million times in a row
                last, new = each, change(each)
            if new is not each:
                row[n] = new


def _plain_key(key: Node) -> Node:
    """A key as plain text, unless it may name a device: only such keys need their offset."""
    if type(key) is Text and len(key) <= _SHORT and not may_be_tag(key):
        return str(key)
    return key


def keys_of(pairs: Iterable[Pair]) -> Sequence[Node]:
    """The keys of the pairs; a long row of keys is not copied."""
    return pairs.keys if isinstance(pairs, Pairs) else [key for key, _ in pairs]
