"""A hash of what a graph means: equal graphs have equal hashes, whatever their format.

The text of one graph is gone when that of the next is made. Tensors count by their elements, not by
how their storages are divided among files.
"""

from __future__ import annotations

from typing import Any

from ..pickles.nodes import Blob, Call, Node, Persistent
from ..pickles.opcodes.plain_tensors import PlainTensor, compact_form
from ..pickles.terms import json_parts, to_terms
from .canonical import Graph, flags_of, is_plain, is_untouched

_PART = 1 << 20  # characters that are hashed at once


def fingerprint(graph: Graph) -> bytes:
    """The hash of a graph as terms, with each plain tensor by its dtype, shape and device alone."""
    from hashlib import sha256  # here, since only conversions need it

    known: dict[str, dict[str, Any]] = {}
    compact: dict[tuple[int, str, str], dict[str, Any]] = {}  # by form, dtype and device

    def leaf(node: Node) -> dict[str, Any] | None:
        if isinstance(node, Blob):
            return {"$": "blob", "of": node.nbytes}
        if isinstance(node, Persistent):
            found = graph.ids.get(id(node))
            return found and {
                "$": "storage",
                "dtype": found.dtype,
                "nbytes": found.nbytes,
                "device": str(found.location),
            }
        form = compact_form(node)
        if form is None or not isinstance(node, PlainTensor):
            return tensor_leaf(node)
        storage = graph.ids.get(id(node.storage))
        if storage is None or storage.dtype is None:
            return tensor_leaf(node)
        alike = id(form), storage.dtype, storage.location
        term = compact.get(alike) or tensor_leaf(node)
        if term is not None:
            compact[alike] = term
        return term

    def tensor_leaf(node: Node) -> dict[str, Any] | None:
        if isinstance(node, Call) and is_plain(node) and is_untouched(node):
            tensor = None if flags_of(node) is None else graph.recogniser.tensor(node)
            if tensor is None:
                return None
            dtype, shape, device = tensor[:3]
            # As text: sizes can be chosen to have all one hash.
            alike = str((dtype, shape, device, tensor.requires_grad))
            if alike not in known:  # one term for all that are alike
                known[alike] = {
                    "$": "tensor",
                    "dtype": dtype,
                    "shape": list(shape),
                    "device": device,
                    "grad": tensor.requires_grad,
                }
            return known[alike]
        return None

    hashed = sha256()
    for text in json_parts(to_terms(graph.root, leaf)):
        for at in range(0, len(text), _PART):
            hashed.update(text[at : at + _PART].encode("ascii"))
    return hashed.digest()
