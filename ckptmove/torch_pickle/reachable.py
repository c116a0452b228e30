"""Find all nodes that can be reached from a node."""

from __future__ import annotations

from ..pickles.nodes import Blob, Call, Dict, List, Mapping, Node, Persistent, Set, Text, Tuple

_HOLDING = (Text, Tuple, List, Set, Dict, Call, Persistent, Blob)


def breadth(node: Tuple | List | Set | Dict | Call) -> int:
    """How many things a container or object holds."""
    held = len(node.pairs) if isinstance(node, Mapping) else 0
    if not isinstance(node, Dict):
        held += len(node.items)
    if isinstance(node, Call):
        states = node.state.items if isinstance(node.state, Tuple) else [node.state]
        held += 1 + len(states) + sum(len(each.pairs) for each in states if isinstance(each, Dict))
    return held


def reachable(root: Node) -> set[int]:
    """The `id()` of every node that can be reached, by whatever way."""
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
