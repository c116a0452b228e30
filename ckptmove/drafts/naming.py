"""What the tensors of a draft are called in a file that knows them by name alone.

Where all tensors belong to one state dict, they have the names that the model gives them, as every
tool expects that reads safetensors; else the dotted names of their paths.
"""

from __future__ import annotations

from ..contents.listing import Contents
from ..pickles.nodes import Node
from .draft import Draft
from .filling import blobs_of
from .raising import LONGEST_INLINE


def names_of(contents: Contents, draft: Draft) -> list[tuple[str, Node]]:
    """Each tensor and storage under each of its names, in order; then the long bytes.

    Args:
        contents: what the graph holds.
        draft: the draft.
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
            return [(str(k), n) for k, n in zip(keys, contents.nodes, strict=True)] + _long(draft)
    return [(e.name, n) for e, n in zip(tensors, contents.nodes, strict=True)] + _long(draft)


def _long(draft: Draft) -> list[tuple[str, Node]]:
    found = [blob for blob in blobs_of(draft) if blob.nbytes > LONGEST_INLINE]
    return [(f"bytes.{n}", blob) for n, blob in enumerate(found)]
