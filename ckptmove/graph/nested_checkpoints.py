"""Replace bytes in a graph by the checkpoints that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..manifest.paths import Path, spell
from ..pickles.nodes import Call, Dict, List, Node, Set, Tuple
from ..pickles.nodes import Mapping as MappingNode
from ..pickles.pairs import change_each, changed
from ..torch_pickle.children import children_of
from ..torch_pickle.pickled_modules import attributes_of, is_frame
from .draft import CheckpointGraph
from .reach import Composite, nodes_of


def show_within(draft: CheckpointGraph, wanted: Callable[[str], bool]) -> None:
    """Replace bytes that hold checkpoints, and have a wanted name, by what these hold.

    The draft is one made with `nested`.
    """
    within = draft.graph.within
    new = {id(node): within[id(node)] for name, node in _places(draft, wanted) if wanted(name)}
    if not new:
        return

    def replaced(node: Node) -> Node:
        while id(node) in new:
            node = new[id(node)]
        return node

    def enter(node: Composite) -> None:
        if isinstance(node, Call):
            node.args, node.state = replaced(node.args), replaced(node.state)
        if isinstance(node, MappingNode):
            node.pairs = changed(node.pairs, replaced)
        if isinstance(node, (Tuple, List, Set, Call)):
            change_each(node.items, replaced)

    draft.graph.root = replaced(draft.graph.root)
    for _ in nodes_of(draft.graph.root, enter):
        pass  # each was entered


def names_within(draft: CheckpointGraph) -> list[str]:
    """The names of bytes that hold checkpoints, without those within others."""
    return [name for name, _ in _places(draft, lambda name: False)]


def _places(draft: CheckpointGraph, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Node]]:
    """Bytes that hold checkpoints, and their names; of those in such bytes only where wanted."""
    within = draft.graph.within
    met: set[int] = set()
    todo: list[tuple[Node, Path]] = [(draft.graph.root, ())]
    while todo:
        node, path = todo.pop()
        if id(node) in met:
            continue
        met.add(id(node))
        if id(node) in within:
            name = spell(path)
            yield name, node
            if wanted(name):
                todo.append((within[id(node)], path))
            continue
        if not isinstance(node, (Call, Dict, List, Set, Tuple)):
            continue
        module = attributes_of(node) is not None
        children = list(children_of(node))
        for keys, child in reversed(children):
            todo.append((child, path if module and is_frame(keys) else (*path, *keys)))
