"""The nodes of a tree, with where each hangs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import torch

Path = tuple[object, ...]


def named_tensors(tree: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its dotted name, shared ones under each of their names."""
    for path, node in nodes(tree):
        if isinstance(node, torch.Tensor):
            yield ".".join(map(str, path)), node


def nodes(tree: object, path: Path = (), above: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every node with its path, through containers and the attributes of objects."""
    yield path, tree
    if isinstance(tree, torch.Tensor) or any(tree is node for node in above):
        return  # a container may hold itself
    for key, child in _children(tree):
        yield from nodes(child, (*path, key), (*above, tree))


def _children(node: object) -> Iterator[tuple[object, object]]:
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, (list, tuple, deque)):
        yield from enumerate(node)
    elif hasattr(node, "__dict__") and not isinstance(node, type):
        yield from vars(node).items()
