"""Names for the tensors of a graph in a file that stores tensors by name.

If all tensors belong to one state dict, they have the names that the model gives them, which every
tool that reads safetensors expects. Otherwise they have the dotted names of their paths. Tensors
that a whole saved module holds outside its state dict get names that cannot be mistaken for keys of
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..manifest.manifest import TensorEntry
from ..pickles.nodes import Node
from ..torch_pickle.listed_tensors import PickleContents
from .draft import CheckpointGraph
from .edit.numpy_arrays import ArrayBytes
from .fill import blobs_of
from .normalize import LONGEST_INLINE

#: The suffix of names of tensors outside a state dict.
_BESIDE = "~extra"


def names_of(
    contents: PickleContents, draft: CheckpointGraph, arrays: Mapping[int, ArrayBytes]
) -> list[tuple[str, Node]]:
    """Yield tensors and storages under all names, in order; then other long arrays and bytes.

    `arrays`: `id()` of an array → its bytes, which get the array's name.
    """
    nodes = [arrays[id(node)].blob if id(node) in arrays else node for node in contents.nodes]
    listed = list(zip(contents.tensors, nodes, strict=True))
    state = [(entry, node) for entry, node in listed if not entry.beside]
    names, around = _own_names(state) or ([entry.name for entry, _ in state], "")
    held = {id(node) for _, node in state}
    beside = [
        (f"{entry.name.removeprefix(around)}{_BESIDE}", node)
        for entry, node in listed
        if entry.beside and id(node) not in held
    ]
    loose = [(name, arrays[id(node)].blob) for name, node in contents.loose if id(node) in arrays]
    own = zip(names, (node for _, node in state), strict=True)
    return [*own, *beside, *loose, *_long(draft, arrays)]


def _own_names(listed: Sequence[tuple[TensorEntry, Node]]) -> tuple[list[str], str] | None:
    """Return the names inside the only state dict, if all tensors belong to one.

    A second copy with the same tensors under the same names does not count. Also returns the prefix
    that the tensors' full names have.
    """
    names: list[str] = []
    own: dict[str, int] = {}
    dicts: set[str] = set()
    for entry, node in listed:
        if entry.state_key is None:
            return None
        if entry.state_key not in own:
            dicts.add(entry.name.removesuffix(entry.state_key))
        if own.setdefault(entry.state_key, id(node)) != id(node) or len(dicts) > 1:
            return None
        names.append(entry.state_key)
    return (names, dicts.pop()) if dicts else None


def _long(draft: CheckpointGraph, arrays: Mapping[int, ArrayBytes]) -> list[tuple[str, Node]]:
    known = {id(each.blob) for each in arrays.values()}
    found = [
        blob
        for blob in blobs_of(draft)
        if (blob.nbytes > LONGEST_INLINE or blob.content is None) and id(blob) not in known
    ]
    return [(f"bytes.{n}", blob) for n, blob in enumerate(found)]
