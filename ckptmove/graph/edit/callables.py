"""Find the unknown callables in a graph, and remove what they make.

Each is named by the nearest place around it that can be removed: an item of a list or tuple, a
value of a dict, an attribute of an object. The function and arguments of a call cannot be removed
from it; then the object that the call makes is removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from typing import NamedTuple, TypeGuard

from ...errors import RefusedError
from ...manifest.dtypes import STORAGE_CLASSES
from ...manifest.paths import spell
from ...pickles.hash_costs import check_keys
from ...pickles.nodes import (
    Blob,
    Call,
    Dict,
    Global,
    Items,
    List,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
)
from ...pickles.nodes import Mapping as MappingNode
from ...pickles.opcodes.plain_tensors import compact_form, is_compact
from ...sources.budget import Budget
from ...torch_pickle.callables.allowlist import KNOWN
from ...torch_pickle.callables.uses import NEVER_BARE, wrong_use
from ..traversal import held_by, nodes_of

#: Returns the name of an unknown callable that a node is, calls or holds as bytes, or None.
Judge = Callable[[Node], "str | None"]
_ROOM = 1 << 26  # most characters of all names
#: Names that plain tensors and ordered dicts import: harmless, and the same in any protocol.
_OF_TENSORS = frozenset(
    (
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch.storage", "UntypedStorage"),
        *(("torch", name) for name in STORAGE_CLASSES),
    )
)
_NODES = (Blob, Call, Dict, Global, List, Persistent, Set, Tuple)


class CallablePlace(NamedTuple):
    """A place where an unknown callable is."""

    #: as for `--drop`; empty for the whole object
    name: str
    #: the name of the callable, or of one of several
    callable: str
    #: the items or pairs of its container; None for the whole object
    holder: Items | MutableSequence[tuple[Node, Node]] | None
    slot: int


def unlisted_callable(node: Node) -> str | None:
    """Return the name that a node itself is or calls, if it is not known to be harmless."""
    if isinstance(node, Global) and (node.qualname not in KNOWN or "." in node.name):
        return node.qualname
    return wrong_use(node) if isinstance(node, Call) else None


def names_are_harmless(names: Collection[object], root: Node) -> bool:
    """Whether a pickle made from a graph certainly has no unknown callable, without reading it.

    `names` are all names that it imports. The graph must consist of tensors and plain values; other
    objects, and bytes, import further names. CorruptError if the keys of a dict take too long to
    hash, as when the pickle is read.
    """
    if not _OF_TENSORS.issuperset(names):
        return False
    budget = Budget()
    for node in nodes_of(root, compact=False):
        if isinstance(node, Persistent):
            if not is_compact(node):
                return False
        elif not isinstance(node, Call) or compact_form(node) is None:
            if isinstance(node, Call) and wrong_use(node) is not None:
                return False
            check_keys(node, budget)
    return True


def callables_in(root: Node, judge: Judge) -> tuple[str, ...]:
    """Return the names of unknown callables in a graph, each once, in the order of a pickle."""
    return tuple(dict.fromkeys(_find_unknown(root, judge)[0].values()))


def places_of(root: Node, judge: Judge) -> Iterator[CallablePlace]:
    """Yield the places of unknown callables, none of them inside another.

    RefusedError if their names are extremely long in total.
    """
    own, tainted = _find_unknown(root, judge)
    if id(root) not in tainted:
        return
    if _is_whole(root, own, tainted):
        yield CallablePlace("", tainted[id(root)], None, 0)
        return
    room = _ROOM
    met, todo = {id(root)}, [(root, "")]
    while todo:
        node, prefix = todo.pop()
        below: list[tuple[Node, str]] = []
        for holder, slot, key, child in _slots(node):
            if not isinstance(child, _NODES) or id(child) not in tainted:
                continue
            name = f"{prefix}.{key}" if prefix else key
            room -= len(name)
            if room < 0:
                raise RefusedError("it uses unknown callables in too many places")
            if _is_whole(child, own, tainted):
                yield CallablePlace(name, tainted[id(child)], holder, slot)
            elif id(child) not in met:
                met.add(id(child))
                below.append((child, name))
        todo += reversed(below)


def leave_out(places: Sequence[CallablePlace]) -> None:
    """Remove the content of these places from their graph."""
    for place in sorted(places, key=lambda place: -place.slot):
        if place.holder is None:
            raise RefusedError("nothing would be left: an unknown callable makes all of it")
        del place.holder[place.slot]


def _find_unknown(root: Node, judge: Judge) -> tuple[dict[int, str], dict[int, str]]:
    """Return unknown callables by the `id()` of their nodes, and the nodes that lead to them."""
    names: dict[int, str] = {}
    holders: defaultdict[int, list[Node]] = defaultdict(list)
    todo: list[int] = []

    def note(node: Node) -> None:
        name = judge(node)
        if name is not None:
            names[id(node)] = name
            todo.append(id(node))

    leaves: set[int] = set()
    if not _is_composite(root):
        note(root)
    for node in nodes_of(root):
        note(node)
        for held in held_by(node):
            if isinstance(held, _NODES):
                holders[id(held)].append(node)
                if _is_bare(held, node) and id(held) not in names:
                    names[id(held)] = held.qualname
                    todo.append(id(held))
                if isinstance(held, (Global, Blob)) and id(held) not in leaves:
                    leaves.add(id(held))
                    note(held)
    own = dict(names)
    while todo:
        found = todo.pop()
        for holder in holders.get(found, ()):
            if id(holder) not in names:
                names[id(holder)] = names[found]
                todo.append(id(holder))
    return own, names


def _is_bare(held: Node, holder: Node) -> TypeGuard[Global]:
    """Whether a function is stored as a value, so that other code may call it."""
    if not isinstance(held, Global) or held.qualname not in NEVER_BARE:
        return False
    return not isinstance(holder, Call) or held is not holder.function


def _is_composite(node: Node) -> bool:
    return isinstance(node, (Call, Dict, List, Persistent, Set, Tuple))


def _is_whole(node: Node, own: dict[int, str], tainted: dict[int, str]) -> bool:
    """Whether a node can only be left out as a whole."""
    return id(node) in own or any(id(each) in tainted for each in _required_parts(node))


def _required_parts(node: Node) -> Iterator[Node]:
    """Return the children of a node that can't be removed from it."""
    if isinstance(node, Set):
        yield from node.items
    elif isinstance(node, Persistent):
        yield node.pid
    elif isinstance(node, MappingNode):
        yield from (key for key, _ in node.pairs)
    if isinstance(node, Call):
        yield from (node.function, node.args, node.kwargs, *node.items)
        states = _states(node)
        if not states:
            yield node.state
        elif isinstance(node.state, Tuple):
            yield from (each for each in node.state.items if not isinstance(each, Dict))
        for state in states:
            yield from (key for key, _ in state.pairs)


def _states(node: Call) -> list[Dict]:
    """Return the attributes of an object, if they can be removed from it."""
    if node.pairs:
        return []
    states = node.state.items if isinstance(node.state, Tuple) else [node.state]
    return [each for each in states if isinstance(each, Dict)]


def _slots(
    node: Node,
) -> Iterator[tuple[Items | MutableSequence[tuple[Node, Node]], int, str, Node]]:
    """Yield the removable children of a node: container, key and child."""
    if isinstance(node, (List, Tuple)):
        for n, item in enumerate(node.items):
            yield node.items, n, str(n), item
    if isinstance(node, MappingNode):
        for n, (key, value) in enumerate(node.pairs):
            yield node.pairs, n, _key(key, n), value
    if isinstance(node, Call):
        for state in _states(node):
            yield from _slots(state)


def _key(node: Node, n: int) -> str:
    if node is None or isinstance(node, (Text, str, int, float, bytes)):
        return spell((node,))
    return str(n)
