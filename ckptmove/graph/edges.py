"""The type and children of a node, the same for every spelling of sets, bytes and devices."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from ..manifest.paths import Key, Path
from ..pickles.device_tags import names_device
from ..pickles.nodes import (
    TEXTS,
    Blob,
    Call,
    Dict,
    Global,
    Items,
    List,
    Node,
    Persistent,
    Set,
    Tuple,
)
from ..pickles.opcodes.pairs import keys_of
from ..pickles.opcodes.plain_tensors import kind_of
from ..torch_pickle.callables.uses import ENCODE, LATIN_1, latin_1
from ..torch_pickle.children import TRANSPARENT, children_of
from ..torch_pickle.pickled_modules import attributes_of, is_frame
from ..torch_pickle.values.numpy_arrays import CONTENT_AT, array_of
from ..torch_pickle.values.strided import Child
from ..torch_pickle.values.tensors import device_text
from .traversal import Composite

COMPOSITE = (Tuple, List, Set, Dict, Call, Persistent)
_SETS = {"builtins.set": "set", "builtins.frozenset": "frozenset"}
_SAFE_BITS = 60  # largest number that is its own hash

#: The children of an object, by comparable keys: the keys that lead there, and the node.
Edges = dict[Hashable, tuple[Path, Node]]


def edges_of(node: Composite) -> Edges:
    """Return the children of a node by comparable keys, with the keys that lead there."""
    members = _members(node)
    if members is not None:
        labels = _labels_of(members)
        pairs = zip(labels, members, strict=True)
        return {("member", label): (("<member>",), item) for label, item in pairs}
    if isinstance(node, Persistent):
        return {"pid": (("<id>",), node.pid)}
    children = list(children_of(node))
    if isinstance(node, Call) and node.qualname in TRANSPARENT and isinstance(node.args, Tuple):
        # the fields of a wrapper have no path, but are compared too
        children += [(("<args>", n), each) for n, each in enumerate(node.args.items) if n]
    edges = _edges_by_key(children)
    if attributes_of(node) is not None:  # names come from its state dict
        return {key: (() if is_frame(keys) else keys, at) for key, (keys, at) in edges.items()}
    if array_of(node) is not None:  # its bytes have its own name
        return {key: (() if keys == CONTENT_AT else keys, at) for key, (keys, at) in edges.items()}
    return edges


def have_same_keys(old: Dict, new: Dict) -> bool:
    """Whether two dicts have the same keys in the same order: texts, or numbers; a fast check."""
    keys, others = keys_of(old.pairs), keys_of(new.pairs)
    kinds = {*map(type, keys), *map(type, others)}
    safe = TEXTS.issuperset(kinds) or (
        kinds == {int} and all(key.bit_length() <= _SAFE_BITS for key in keys)  # type: ignore[union-attr]
    )
    return safe and keys == others and len(set(keys)) == len(keys)


def _labels_of(members: Items) -> Iterator[Hashable]:
    """Return keys that distinguish members of a set; long bytes by size and order."""
    times = Counter[int]()
    for n, item in enumerate(members):
        if isinstance(item, Blob):
            times[item.nbytes] += 1
            yield "blob", item.nbytes, times[item.nbytes]
        else:
            yield scalar_of(item) if is_leaf(item) else (n,)


def _edges_by_key(children: list[tuple[Path, Node]]) -> Edges:
    found: Edges = {}
    times: dict[tuple[Hashable, ...], int] = {}
    for keys, child in children:
        label: tuple[Hashable, ...] = tuple(map(_label, keys))
        times[label] = again = times.get(label, 0) + 1
        if again > 1:  # an attribute and an item may have the same name
            label = (*label, "again", again)
        found[label] = keys, child
    return found


def _label(key: Key) -> Hashable:
    """Return a hashable form of a key in which 1, 1.0 and True differ."""
    if isinstance(key, str):
        return str(key)
    return type(key).__name__, struct.pack("<d", key) if isinstance(key, float) else key


def _members(node: Node) -> Items | None:
    """Return the members of a set, whether an opcode or a call makes it."""
    if isinstance(node, Set):
        return node.items
    if isinstance(node, Call) and node.qualname in _SETS and isinstance(node.args, Tuple):
        items = node.args.items
        if not items:
            return []
        if len(items) == 1 and isinstance(items[0], (List, Tuple)):
            return items[0].items
    return None


def type_of(node: Node) -> str:
    """Return the usual name of a container's type."""
    if _members(node) is not None:
        frozen = node.frozen if isinstance(node, Set) else "frozen" in str(node.qualname)  # type: ignore[union-attr]
        return "frozenset" if frozen else "set"
    if isinstance(node, Call):
        return (node.qualname or "(called indirectly)").removeprefix("builtins.")
    return kind_of(node).__name__.lower()


def signature_of(node: Composite) -> Hashable:
    """Return a value that is equal for containers of the same type."""
    if not isinstance(node, Call) or _members(node) is not None:
        return type_of(node)
    states = node.state.items if isinstance(node.state, Tuple) else [node.state]
    kinds = tuple(None if each is None else _kind(each) for each in states if node.built)
    return type_of(node), node.opcode, kinds, node.kwargs is None, isinstance(node.args, Tuple)


def _kind(node: Node) -> type:
    """Return the type of a node; bytes in any form are bytes."""
    return bytes if isinstance(node, Blob) else kind_of(node)


def types_of(old: Composite, new: Composite) -> tuple[str, str]:
    """Return the types of two containers, as different texts."""
    types = type_of(old), type_of(new)
    if types[0] != types[1]:
        return types
    hows = [
        f"{type_of(each)}, made by {each.opcode if isinstance(each, Call) else 'an opcode'}"
        for each in (old, new)
    ]
    return (hows[0], hows[1]) if hows[0] != hows[1] else (types[0], f"{types[1]}, of another form")


def is_mutable(node: Composite) -> bool:
    """Whether it matters that two names refer to one object."""
    if isinstance(node, Call):
        filled = node.pairs or node.items or isinstance(node.state, Dict)
        return bool(filled) or node.qualname == "builtins.set" or array_of(node) is not None
    return isinstance(node, (List, Dict)) or (isinstance(node, Set) and not node.frozen)


def is_leaf(node: Node) -> bool:
    """Whether a node is compared as one value."""
    return (
        not isinstance(node, COMPOSITE)
        or device_text(node) is not None
        or bytes_of(node) is not None
    )


def bytes_of(node: Node) -> bytes | None:
    """Return bytes, whether an opcode pushes them or a call makes them."""
    if isinstance(node, bytes):
        return node
    if not isinstance(node, Call) or not isinstance(node.args, Tuple):
        return None
    args = node.args.items
    if node.qualname == "builtins.bytes" and not args:
        return b""
    if node.qualname == ENCODE and len(args) == 2 and args[1] in LATIN_1:
        return latin_1(args[0]) if isinstance(args[0], str) else None
    return None


def scalar_of(node: Node) -> tuple[Hashable, ...]:
    """Return the identity of a scalar: its type and its bits."""
    if isinstance(node, str):
        return "str", str(node)
    if isinstance(node, float):
        return "float", struct.pack("<d", node)
    if isinstance(node, Global):
        return "name", node.qualname
    content = bytes_of(node)
    if content is not None:
        return "bytes", content
    if isinstance(node, Blob):
        return "bytes", node.nbytes, id(node)
    if isinstance(node, int) and node.bit_length() > _SAFE_BITS:
        return "int", f"{node:x}"
    device = device_text(node)
    return ("device", device) if device is not None else (kind_of(node).__name__, node)


def device_of(node: Node) -> str | None:
    """Return the device that a value names, as text or as an object."""
    if isinstance(node, str):
        return str(node) if names_device(node) else None
    return device_text(node)


def children_edges(children: Sequence[Child]) -> Edges:
    """Return the children of a tensor."""
    return _edges_by_key([((child.key,), child.node) for child in children])
