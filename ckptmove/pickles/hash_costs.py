"""Refuse keys of dicts and items of sets that would take forever to hash.

A file can choose numbers that all have the same hash, so that each new key is compared with all
keys before it. And a tuple that holds itself twice, many levels deep, has too many items to hash.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ..errors import CorruptError
from ..sources.budget import Budget
from .nodes import TEXTS, Call, Dict, List, Node, Set, Tuple
from .nodes import Mapping as MappingNode
from .opcodes.pairs import keys_of

_MOST_ALIKE = 100  # the most different keys with the same hash; by accident there are not even two
_LEAST_BUCKETS = 1 << 12
_LARGEST_KEY = 4096  # the most items of a key; an item of a shared tuple counts at each use
_OF_ITEMS = {
    *("builtins.set", "builtins.frozenset", "builtins.dict"),
    *("collections.OrderedDict", "collections.Counter"),
}
_COMPLEX = "builtins.complex"


class _Unknown(Exception):
    """A key is not of a type that is hashed by value."""


def check_keys(node: Tuple | List | Set | Dict | Call, budget: Budget) -> None:
    """Check the keys or items that a container hashes; CorruptError if hashing is too costly."""
    if isinstance(node, MappingNode) and node.pairs:
        _check(keys_of(node.pairs), budget)
    if isinstance(node, (Set, Call)) and node.items:
        _check(node.items, budget)
    if isinstance(node, Call) and node.qualname in _OF_ITEMS and isinstance(node.args, Tuple):
        for each in node.args.items[:1]:
            if isinstance(each, (List, Tuple, Set)):
                _check(each.items, budget)
                pairs = [e.items for e in each.items if isinstance(e, (List, Tuple)) and e.items]
                _check([pair[0] for pair in pairs], budget)
            elif isinstance(each, Dict):
                _check(keys_of(each.pairs), budget)


def check_added(every: Sequence[Node], added: int, budget: Budget) -> None:
    """Check the keys of a container after `added` of them were appended; fast for any number.

    Keys that are added one by one are checked each time their number doubles.
    """
    count = len(every)
    if count <= _MOST_ALIKE:
        _check_sizes(every[-added:] if added else (), budget)
    elif added > _MOST_ALIKE:
        _check(every if added == count else every[-added:], budget)
    elif not count & (count - 1):
        _check(every, budget)


def _check(keys: Sequence[Node], budget: Budget) -> None:
    if isinstance(keys, array) or TEXTS.issuperset(map(type, keys)):
        # at most eight integers of 63 bits have the same hash; text hashes are not predictable
        return
    if len(keys) <= _MOST_ALIKE:
        _check_sizes(keys, budget)
        return
    # Most keys have different hashes: a bucket of a few bytes counts those of many keys.
    many = max(_LEAST_BUCKETS, len(keys) // 8)
    counts = array("L", bytes(array("L").itemsize * many))
    for value in _values(keys, budget):
        counts[hash(value) % many] += 1
    if max(counts) <= _MOST_ALIKE:
        return
    alike: dict[int, set[str]] = defaultdict(set)
    for value in _values(keys, budget):
        if counts[hash(value) % many] > _MOST_ALIKE:
            found = alike[hash(value)]
            found.add(_text(value))
            if len(found) > _MOST_ALIKE:
                raise CorruptError("a dict has too many keys with the same hash")


def _check_sizes(keys: Sequence[Node], budget: Budget) -> None:
    tuples = [key for key in keys if type(key) is Tuple]
    for _ in _values(tuples, budget) if tuples else ():
        pass  # the loop raises if a tuple is too large


def _values(keys: Sequence[Node], budget: Budget) -> Iterator[object]:
    """The values of plain keys that are not text.

    CorruptError if tuples in the keys are very large: a small file can build them from shared
    tuples, in one dict or in many.
    """
    for key in keys:
        if not isinstance(key, str):
            with suppress(_Unknown):
                value = _value(key)
                if isinstance(value, tuple) and not budget.take_key(len(value)):
                    raise CorruptError("the keys of a dict are too large")
                yield value


def _value(node: Node) -> object:
    """The value of a plain key: a number, text, or a tuple of these."""
    if node is None or isinstance(node, (bool, int, float, str, bytes)):
        return node
    if isinstance(node, Call) and node.qualname == _COMPLEX and isinstance(node.args, Tuple):
        real, imaginary, *_ = (*map(_value, node.args.items[:2]), 0, 0)
        if isinstance(real, (int, float)) and isinstance(imaginary, (int, float)):
            try:
                return complex(real, imaginary)
            except OverflowError:
                raise _Unknown from None
    if not isinstance(node, Tuple):
        raise _Unknown
    flat: list[object] = []
    todo: list[Node] = [node]
    while todo:  # the nesting of a tuple counts too, but does not matter here
        each = todo.pop()
        if isinstance(each, Tuple):
            flat.append(len(each.items))
            todo.extend(each.items)
        else:
            flat.append(_value(each))
        if len(flat) + len(todo) > _LARGEST_KEY:
            raise CorruptError("a key is too large")
    return tuple(flat)


def _text(value: object) -> str:
    """A value as text; numbers in hex, since decimals take long."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, (str, bytes)):  # the hash identifies it
        return f"text {hash(value)}"
    return f"{value:x}" if isinstance(value, int) else repr(value)
