"""The children of a node of a walked pickle, and their keys."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TypeGuard

from ..manifest.paths import Key, Path, spell
from ..pickles.device_tags import names_device
from ..pickles.nodes import (
    TEXTS,
    Blob,
    Call,
    Dict,
    Global,
    List,
    Mapping,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
    are_plain,
)
from ..pickles.nodes import Mapping as MappingNode
from ..pickles.opcodes.mixed_rows import parts_of
from ..pickles.opcodes.pairs import Pairs, keys_of, record_of
from ..pickles.opcodes.plain_tensors import PlainTensor
from .pickled_modules import INNER, body_of, is_compiled
from .values.tensors import device_text

#: Functions that libtorch's pickler wraps around a list or dict to store its type.
TRANSPARENT = {
    *(f"torch.jit._pickle.build_{kind}list" for kind in ("tensor", "int", "double", "bool")),
    "torch.jit._pickle.restore_type_tag",
}
_HOLDING = (Call, Text, Tuple, List, Set, Dict, Persistent, Blob)
_MADE = frozenset((Call, PlainTensor))  # objects are always visited
_LONGEST_COPY = 1000  # characters of a key
_LONGEST_IN_KEY = 64  # characters of a text in a key tuple that is spelled in full
_MOST_IN_KEY = 8  # items of a key tuple that is spelled in full
_FEW = 8  # rows this short are checked again, without a cache
_MOST_OF_ENTRY = 64  # pairs
_PLAIN = frozenset((int, float, bool, str, type(None)))
_SAFE_BITS = 60  # a number of at most so many bits is its own hash


def children_of(node: Tuple | List | Set | Dict | Call) -> Iterator[tuple[Path, Node]]:
    """The children of a node, each with the keys that lead to it; attributes count as keys."""
    if isinstance(node, Call):
        body = body_of(node)
        if not isinstance(node.function, Global):
            yield ("<function>",), node.function
        if node.qualname in TRANSPARENT and isinstance(node.args, Tuple) and node.args.items:
            yield (), node.args.items[0]
        elif body is not None and isinstance(node.args, Tuple):
            yield from _pairs(body)
            rest = [(n, each) for n, each in enumerate(node.args.items) if each is not body]
            yield from ((("<args>", n), each) for n, each in rest)
        elif is_compiled(node) and isinstance(node.args, Tuple):
            yield (INNER,), node.args.items[0]
            yield from ((("<args>", n), each) for n, each in enumerate(node.args.items) if n)
        elif not (isinstance(node.args, Tuple) and not node.args.items):
            yield ("<args>",), node.args
        if node.kwargs is not None:
            yield ("<kwargs>",), node.kwargs
        states = node.state.items if isinstance(node.state, Tuple) else [node.state]
        for n, state in enumerate(states):
            if isinstance(state, Dict):
                yield from _pairs(state)
            elif state is not None:
                yield ("<state>", n) if len(states) > 1 else ("<state>",), state
    if isinstance(node, MappingNode):
        yield from _pairs(node)
    if not isinstance(node, Dict):
        yield from (((n,), each) for n, each in enumerate(node.items))


def visits_of(
    node: Tuple | List | Set | Dict | Call, leads: dict[int, bool], opened: Container[int]
) -> tuple[Iterable[tuple[Path, Node]], list[Node]]:
    """The children to visit, with their keys; and all children that are not plain values.

    A long row of references takes few bytes in a file: paths are created only for children that
    lead to something, when they are visited. `leads` caches, by `id()` of a row, whether it has
    anything to visit; `opened` has the `id()` of bytes that were read as checkpoints.
    """
    children: list[Node]
    if record_of(node) is not None:
        return (), []
    if isinstance(node, Dict) and isinstance(node.pairs, Pairs):
        values: Iterable[Node] = node.pairs.values
        if not _are_unique_texts(node.pairs.keys):
            values = (each for _, each in children_of(node))
        children = [each for each in values if isinstance(each, _HOLDING)]
        if len(children) == len(node.pairs) and _MADE.issuperset(map(type, children)):
            return children_of(node), children
        lead = any(_leads_on(each, leads, opened) for each in children)
        inside = children_of(node) if lead else ()
        return ((k, each) for k, each in inside if _leads_on(each, leads, opened)), children
    if not isinstance(node, (Tuple, List, Set)):
        both = [(keys, each) for keys, each in children_of(node) if isinstance(each, _HOLDING)]
        leading = [(k, each) for k, each in both if _leads_on(each, leads, opened)]
        return leading, [each for _, each in both]
    children = []
    if not are_plain(node.items):
        children = [each for each in parts_of(node.items) if isinstance(each, _HOLDING)]
    is_long = len(children) > _FEW

    def leads_on(each: Node) -> bool:
        return _leads_on(each, leads, opened) and not (is_long and _is_entry(each))

    if not any(map(leads_on, children)):
        leads[id(node)] = False
        return (), children
    return ((k, each) for k, each in children_of(node) if leads_on(each)), children


def _is_entry(node: Node) -> bool:
    """Whether this is a small dict of plain values, as logs have very many."""
    if record_of(node) is not None:
        return True
    if type(node) is not Dict or len(node.pairs) > _MOST_OF_ENTRY:
        return False
    return all(
        type(key) in TEXTS
        and (type(value) in _PLAIN or (type(value) is Text and not names_device(value)))
        for key, value in node.pairs
    )


def _leads_on(node: Node, leads: dict[int, bool], opened: Container[int]) -> bool:
    if isinstance(node, Blob):
        return id(node) in opened
    if isinstance(node, Text):
        return names_device(node)
    if isinstance(node, (Tuple, List, Set)):
        known = leads.get(id(node))
        if known is None:  # rows of only numbers are not visited, as there may be a million
            known = bool(node.items) and (isinstance(node, Set) or not are_plain(node.items))
            if len(node.items) > _FEW:
                leads[id(node)] = known
        return known
    return bool(node.pairs) if isinstance(node, Dict) else isinstance(node, _HOLDING)


def _pairs(node: MappingNode) -> Iterator[tuple[Path, Node]]:
    """The pairs that a dict keeps: for equal keys, the last one."""
    keys = keys_of(node.pairs)
    if _are_unique_texts(keys):
        for key, value in node.pairs:
            assert isinstance(key, str)
            yield (str(key) if len(key) <= _LONGEST_COPY else key,), value
        return
    last = {_hashed(key): n for n, (key, _) in enumerate(node.pairs) if _is_plain(key)}
    for n, (key, value) in enumerate(node.pairs):
        if _is_plain(key):
            if last[_hashed(key)] == n:
                short = isinstance(key, str) and len(key) <= _LONGEST_COPY  # a long one is shared
                yield (str(key) if short else _in_path(key),), value
        else:
            spelled = spell_key(key, n)
            yield (spelled,), value
            yield (spelled, "<key>"), key


def _are_unique_texts(keys: Sequence[Node]) -> bool:
    return TEXTS.issuperset(map(type, keys)) and len(set(keys)) == len(keys)


def _hashed(key: Key) -> Key:
    """The value to look a key up by: large numbers can be chosen to have the same hash."""
    return f"{key:x}" if isinstance(key, int) and key.bit_length() > _SAFE_BITS else key


def _in_path(key: Key) -> Key:
    """A key for a path; large numbers become text, since paths are hashed too."""
    return spell((key,)) if isinstance(key, int) and key.bit_length() > _SAFE_BITS else key


def _is_plain(key: Node) -> TypeGuard[Key]:
    return key is None or isinstance(key, (str, int, float, bytes))


def spell_key(key: Node, n: int) -> Key:
    """A key for a path: scalars and short tuples by value, any other key by its number `n`."""
    if _is_plain(key):
        return str(key) if isinstance(key, str) else _in_path(key)
    if isinstance(key, Tuple) and len(key.items) <= _MOST_IN_KEY:
        items = [item for item in key.items if isinstance(item, (int, str))]
        short = all(len(item) <= _LONGEST_IN_KEY for item in items if isinstance(item, str))
        if short and len(items) == len(key.items):
            return "(" + ", ".join(map(_spell_item, items)) + ")"
    return device_text(key) or f"<key {n}>"


def _spell_item(item: int | str) -> str:
    return repr(str(item)) if isinstance(item, str) else spell((item,))


def breadth(node: Tuple | List | Set | Dict | Call) -> int:
    """How many children a container or object has."""
    held = len(node.pairs) if isinstance(node, Mapping) else 0
    if not isinstance(node, Dict):
        held += len(node.items)
    if isinstance(node, Call):
        states = node.state.items if isinstance(node.state, Tuple) else [node.state]
        held += 1 + len(states) + sum(len(each.pairs) for each in states if isinstance(each, Dict))
    return held


def reachable(root: Node) -> set[int]:
    """The `id()` of every node that can be reached from `root` in any way."""
    found: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in found or not isinstance(node, _HOLDING):
            continue
        found.add(id(node))
        if isinstance(node, Mapping):
            todo.extend(each for pair in node.pairs for each in pair)
        if isinstance(node, Call):
            todo += [node.function, node.args, node.kwargs, node.state]
        if isinstance(node, (Tuple, List, Set, Call)):
            todo.extend(node.items)
    return found
