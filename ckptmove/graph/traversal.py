"""The children of nodes, and all nodes that can be reached in a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ..pickles.nodes import Call, Dict, List, Node, Persistent, Set, Tuple, are_plain
from ..pickles.nodes import Mapping as MappingNode
from ..pickles.opcodes.mixed_rows import parts_of
from ..pickles.opcodes.pairs import change_each, with_each_changed
from ..pickles.opcodes.plain_tensors import PlainTensor, StorageReference, compact_form, is_compact

Composite = Tuple | List | Set | Dict | Call | Persistent
#: The types of nodes that hold other nodes.
COMPOSITE = {Tuple, List, Set, Dict, Call, Persistent, PlainTensor, StorageReference}


def nodes_of(
    root: Node,
    enter: Callable[[Composite], None] | None = None,
    skip: Collection[int] = (),
    met: set[int] | None = None,
    *,
    compact: bool = True,
) -> Iterator[Composite]:
    """Yield every composite node that can be reached, each once, in the order of a pickle.

    `enter` is called with each node before its children are visited. `skip` has the `id()` of nodes
    whose children are not visited; it is checked after the node was yielded. `met` has the `id()`
    of nodes that were reached before and are left out; other nodes are added to it. Without
    `compact`, compact tensors inside other nodes are left out, with their storages if these are
    compact too, because they have no further children.
    """
    met = set() if met is None else met
    todo: list[Any] = [root] if type(root) in COMPOSITE else []
    while todo:
        node = todo.pop()
        known = id(node)
        if known in met:
            continue
        met.add(known)
        if enter is not None:
            enter(node)
        yield node
        if known in skip:
            continue
        if type(node) is PlainTensor and compact_form(node) is not None:
            if compact or not is_compact(node.storage):
                todo.append(node.storage)  # as below, but faster: there may be very many
        elif type(node) is not StorageReference or not is_compact(node):
            held = parts_of(held_by(node))
            if not are_plain(held) and not COMPOSITE.isdisjoint(map(type, held)):
                inner = [each for each in reversed(held) if type(each) in COMPOSITE]
                todo += inner if compact else [each for each in inner if not _is_inert(each)]


def _is_inert(node: Node) -> bool:
    """Whether this is a tensor that its form and its storage describe completely."""
    return type(node) is PlainTensor and compact_form(node) is not None and is_compact(node.storage)


def replace_nodes(root: Node, new: Mapping[int, Node]) -> Node:
    """Replace nodes, by their `id()`; return the new root."""

    def replaced(node: Node) -> Node:
        while id(node) in new:
            node = new[id(node)]
        return node

    def enter(node: Composite) -> None:
        if isinstance(node, Call):
            node.args, node.state = replaced(node.args), replaced(node.state)
        if isinstance(node, MappingNode) and node.pairs:
            node.pairs = with_each_changed(node.pairs, replaced)
        if isinstance(node, (Tuple, List, Set, Call)):
            change_each(node.items, replaced)

    root = replaced(root)
    for _ in nodes_of(root, enter):
        pass  # each was entered
    return root


def held_by(node: Composite) -> Sequence[Node]:
    """Return all children of a node; for a compact tensor, only its storage."""
    if type(node) is StorageReference and is_compact(node):
        return ()
    if isinstance(node, Call):
        if type(node) is PlainTensor and compact_form(node) is not None:
            return [node.storage]
        if not node.items and not node.pairs:
            return [node.function, node.args, node.kwargs, node.state]
        pairs = [each for pair in node.pairs for each in pair]
        return [node.function, node.args, node.kwargs, *node.items, *pairs, node.state]
    if isinstance(node, Dict):
        return [each for pair in node.pairs for each in pair]
    return [node.pid] if isinstance(node, Persistent) else node.items
