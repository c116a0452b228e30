"""Join several roots into one tree, each at its path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..manifest.paths import Key, Path, spell
from ..pickles.nodes import Call, Dict, List, Node, Set, Tuple
from .children import children_of


class _NodeAtPath(NamedTuple):
    """A node, its path, and how many keys of the path are already used."""

    path: Path
    depth: int
    node: Node

    @property
    def key(self) -> Key:
        """The last used key."""
        return self.path[self.depth - 1]


def join_roots(roots: Sequence[tuple[Path, Node]]) -> Node:
    """One node that leads to each root under its path.

    The contents of a root at the top, such as the attributes of a module, are placed beside the
    other roots. If two nodes have the same path, the last one is used.
    """
    holder = Dict()
    todo: list[tuple[Dict, Key, list[_NodeAtPath]]] = [
        (holder, None, [_NodeAtPath(path, 0, root) for path, root in roots])
    ]
    while todo:  # without recursion: a path may be long
        outer, key, rooted = todo.pop()
        if rooted and all(each.depth == len(each.path) for each in rooted):
            outer.pairs.append((key, rooted[-1].node))
            continue
        tree, inner = Dict(), dict[str | tuple[type, str], list[_NodeAtPath]]()
        outer.pairs.append((key, tree))
        for each in (one for all_of in map(_opened, rooted) for one in all_of):
            name = each.path[each.depth]
            # numbers can be chosen to have the same hash
            slot = name if isinstance(name, str) else (type(name), spell((name,)))
            inner.setdefault(slot, []).append(_NodeAtPath(each.path, each.depth + 1, each.node))
        todo += [(tree, held[0].key, held) for held in reversed(inner.values())]
    return holder.pairs[0][1]


def _opened(rooted: _NodeAtPath) -> Iterator[_NodeAtPath]:
    """The item itself, or its children if its path ends here."""
    if rooted.depth < len(rooted.path):
        yield rooted
    else:
        for keys, child in _children(rooted.node):
            yield _NodeAtPath(keys, 0, child)


def _children(root: Node) -> Iterator[tuple[Path, Node]]:
    """The children of a root; transparent wrappers are skipped."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, (Call, Dict, List, Set, Tuple)):
            for keys, child in children_of(node):
                if keys:
                    yield keys, child
                else:
                    todo.append(child)
