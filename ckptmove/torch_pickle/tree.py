"""Join several roots into one tree, each at its path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..manifest.paths import Key, Path, spell
from ..pickles.nodes import Call, Dict, List, Node, Set, Tuple
from .children import children_of


class _Placed(NamedTuple):
    """A node, its path, and how many keys of that already led here."""

    path: Path
    depth: int
    node: Node

    @property
    def key(self) -> Key:
        """The last of them."""
        return self.path[self.depth - 1]


def joined(roots: Sequence[tuple[Path, Node]]) -> Node:
    """One node that leads to each root under its path.

    What a root at the top holds, such as the attributes of a module, is beside the other roots. Of
    two that are under the same path the last is shown.
    """
    holder = Dict()
    todo: list[tuple[Dict, Key, list[_Placed]]] = [
        (holder, None, [_Placed(path, 0, root) for path, root in roots])
    ]
    while todo:  # without recursion: a path may be long
        outer, key, placed = todo.pop()
        if placed and all(each.depth == len(each.path) for each in placed):
            outer.pairs.append((key, placed[-1].node))
            continue
        tree, inner = Dict(), dict[str | tuple[type, str], list[_Placed]]()
        outer.pairs.append((key, tree))
        for each in (one for all_of in map(_opened, placed) for one in all_of):
            name = each.path[each.depth]
            # numbers can be chosen to have all one hash
            slot = name if isinstance(name, str) else (type(name), spell((name,)))
            inner.setdefault(slot, []).append(_Placed(each.path, each.depth + 1, each.node))
        todo += [(tree, held[0].key, held) for held in reversed(inner.values())]
    return holder.pairs[0][1]


def _opened(placed: _Placed) -> Iterator[_Placed]:
    """The value itself, or its children if its path ends here."""
    if placed.depth < len(placed.path):
        yield placed
    else:
        for keys, child in _held(placed.node):
            yield _Placed(keys, 0, child)


def _held(root: Node) -> Iterator[tuple[Path, Node]]:
    """What a root holds, without what is merely wrapped around it."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, (Call, Dict, List, Set, Tuple)):
            for keys, child in children_of(node):
                if keys:
                    yield keys, child
                else:
                    todo.append(child)
