"""Replace bytes in a graph with the checkpoints that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..manifest.paths import Path, spell
from ..pickles.nodes import Call, Dict, List, Node, Set, Tuple
from ..torch_pickle.children import children_of
from ..torch_pickle.pickled_modules import attributes_of, is_frame
from .draft import CheckpointGraph
from .traversal import replace_nodes


def show_within(draft: CheckpointGraph, wanted: Callable[[str], bool]) -> None:
    """Replace bytes that have a wanted name and hold checkpoints with the saved objects.

    The draft is one made with `nested`.
    """
    within = draft.graph.within
    new = {id(node): within[id(node)] for name, node in _places(draft, wanted) if wanted(name)}
    if not new:
        return

    draft.graph.root = replace_nodes(draft.graph.root, new)


def names_within(draft: CheckpointGraph) -> list[str]:
    """Return the names of bytes that hold checkpoints, without nested ones."""
    return [name for name, _ in _places(draft, lambda name: False)]


def _places(draft: CheckpointGraph, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Node]]:
    """Yield bytes that hold checkpoints, with their names; nested ones only if wanted."""
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
