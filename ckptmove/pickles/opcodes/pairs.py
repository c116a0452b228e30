"""Store the pairs of a dict as two rows, with keys as plain text.

A pair as a tuple takes seventy bytes, and a key with its offset ninety bytes more than its text,
while a file may need only ten bytes for both. That matters in long dicts, and in records: short
dicts of numbers under the same keys, such as the entries of a log, of which there may be very many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, TypeAlias, overload

from ..device_tags import may_be_tag
from ..nodes import TEXTS, Dict, Items, Node, are_plain
from .mixed_rows import MixedRow
from .rows import compact_row, extend_row

_LONG = 1 << 10  # pairs; a pickler sets a thousand at once
_SHORT = 64  # characters; shorter keys are stored as plain text
_LARGEST_RECORD = 64  # pairs
_LEAST_PACKED = 3  # values of one type
_MOST_KINDS = 1 << 10  # kinds of records whose keys are stored once

Pair: TypeAlias = "tuple[Node, Node]"


class Pairs(MutableSequence["tuple[Node, Node]"]):
    """A sequence of key/value pairs, which are created anew at each access."""

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        #: a row, or the tuple of texts that records share: then the values are plain
        self.keys: Any = []
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
        self.loosen()
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
        keys, values = list(flat[::2]), flat[1::2]
        if not {str}.issuperset(map(type, keys)):
            keys = list(map(_plain_key, keys))
        before = list(self.keys) if isinstance(self.keys, tuple) else self.keys
        self.keys = extend_row(before, keys) if before else compact_row(keys)
        self.values = (
            extend_row(self.values, list(values)) if self.values else compact_row(list(values))
        )


class RecordKinds:
    """The kinds of records of one pickle, which share their keys."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Node, ...], tuple[str, ...]] = {}

    def pairs_of(self, flat: Sequence[Node]) -> Pairs | None:
        """The pairs of a dict as a record, from alternating keys and values; None if it is none."""
        if not 4 <= len(flat) <= 2 * _LARGEST_RECORD:
            return None
        values, keys = flat[1::2], tuple(flat[::2])
        if not are_plain(values) or not TEXTS.issuperset(map(type, keys)):
            return None
        known = self._kinds.get(keys)
        if known is None:
            if not all(map(_can_be_plain, keys)) or len(set(keys)) < len(keys):
                return None
            if len(self._kinds) == _MOST_KINDS:
                self._kinds.clear()
            known = self._kinds[keys] = tuple(map(str, keys))
        found = Pairs()
        found.keys, found.values = known, compact_row(list(values), _LEAST_PACKED)
        return found


def record_of(node: Node) -> Pairs | None:
    """The pairs of a record; None for any other node."""
    if type(node) is Dict and type(node.pairs) is Pairs and type(node.pairs.keys) is tuple:
        return node.pairs
    return None


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


def with_each_changed(
    pairs: MutableSequence[Pair], change: Callable[[Node], Node]
) -> MutableSequence[Pair]:
    """Pairs with each key and value replaced by `change`; a long row is changed in place.

    Records remain as they are.
    """
    if not isinstance(pairs, Pairs):
        return [(change(key), change(value)) for key, value in pairs]
    if not isinstance(pairs.keys, tuple):
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


def _can_be_plain(key: Node) -> bool:
    """Whether a short key can't name a device: only device names need their offset."""
    return isinstance(key, str) and len(key) <= _SHORT and not may_be_tag(key)


def _plain_key(key: Node) -> Node:
    """A key as plain text, if it can be."""
    return str(key) if _can_be_plain(key) else key


def keys_of(pairs: Iterable[Pair]) -> Sequence[Node]:
    """The keys of the pairs; a long row of keys is not copied."""
    return pairs.keys if isinstance(pairs, Pairs) else [key for key, _ in pairs]
