"""What the tensors of a draft are called in a file that knows them by name alone.

Where all tensors belong to one state dict, they have the names that the model gives them, as every
tool expects that reads safetensors; else the dotted names of their paths.
"""

from __future__ import annotations

from ..contents.listing import Contents
from ..pickles.nodes import Blob, Node
from .canonical import held_by, nodes_of

#: Bytes within a tree that are longer are written as a tensor of their own.
LONGEST_INLINE = 4096


def names_of(contents: Contents, root: Node) -> list[tuple[str, Node]]:
    """Each tensor and storage under each of its names, in order; then the long bytes.

    Args:
        contents: what the graph holds.
        root: the graph.
    """
    tensors = contents.tensors
    keys = [entry.state_key for entry in tensors]
    own = dict[str, int]()
    if None not in keys:
        for key, node in zip(keys, contents.nodes, strict=True):
            assert key is not None
            if own.setdefault(key, id(node)) != id(node):
                break
        else:
            return [(str(k), n) for k, n in zip(keys, contents.nodes, strict=True)] + _long(root)
    return [(e.name, n) for e, n in zip(tensors, contents.nodes, strict=True)] + _long(root)


def _long(root: Node) -> list[tuple[str, Node]]:
    found: dict[int, Blob] = {}
    for node in nodes_of(root):
        for held in held_by(node):
            if isinstance(held, Blob) and held.nbytes > LONGEST_INLINE:
                found.setdefault(id(held), held)
    if isinstance(root, Blob):
        found[id(root)] = root
    return [(f"bytes.{n}", blob) for n, blob in enumerate(found.values())]
