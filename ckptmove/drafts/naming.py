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
    names = _own_names(contents) or [entry.name for entry in contents.tensors]
    return [*zip(names, contents.nodes, strict=True), *_long(draft)]


def _own_names(contents: Contents) -> list[str] | None:
    """The names within the one state dict that all tensors belong to, or None if there is none.

    Where it is there twice, it is still one: the same tensors under the same names.
    """
    names: list[str] = []
    own: dict[str, int] = {}
    dicts: set[str] = set()
    for entry, node in zip(contents.tensors, contents.nodes, strict=True):
        if entry.state_key is None:
            return None
        if entry.state_key not in own:
            dicts.add(entry.name.removesuffix(entry.state_key))
        if own.setdefault(entry.state_key, id(node)) != id(node) or len(dicts) > 1:
            return None
        names.append(entry.state_key)
    return names


def _long(draft: Draft) -> list[tuple[str, Node]]:
    found = [blob for blob in blobs_of(draft) if blob.nbytes > LONGEST_INLINE]
    return [(f"bytes.{n}", blob) for n, blob in enumerate(found)]
