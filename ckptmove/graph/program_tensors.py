"""The state dict of an exported or scripted program, as a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..manifest.manifest import Manifest, Section, TensorEntry
from ..pickles.nodes import Call, Global, Node, Text, Tuple
from ..torch_pickle.values.persistent_ids import StorageId, TensorId
from ..torch_pickle.values.strided import reach_of
from .canonical import Graph, canonical


def state_dict(
    manifest: Manifest,
    nodes: Sequence[Node],
    ids: Mapping[int, StorageId],
    tensors: Mapping[int, TensorId],
) -> Graph:
    """Return the tensors of a program as the state dict of a module with the same parts.

    Tensors without bytes (example inputs) are left out. `nodes` belong to the last of the tensors;
    earlier tensors have none.
    """
    root = Call(Global("collections", "OrderedDict", 0), Tuple([], 0), "REDUCE", 0)
    root.pairs = []
    raw = len(manifest.tensors) - len(nodes)
    taken: dict[str, str] = {}
    names: list[str] = []
    for entry in manifest.tensors:
        key = entry.state_key or entry.name
        names.append(key if taken.setdefault(key, entry.name) == entry.name else entry.name)
    for entry, node, name in zip(manifest.tensors[raw:], nodes, names[raw:], strict=True):
        if entry.part_of is None and _has_bytes(entry, manifest):
            root.pairs.append((Text(name, 0), node))
    graph = canonical(root, ids, tensors, manifest.storages)
    graph.sections = {
        name: entry.section
        for entry, name in zip(manifest.tensors, names, strict=True)
        if entry.section is not Section.MODEL
    }
    for entry, name in zip(manifest.tensors[:raw], names, strict=False):
        if entry.storage is not None and _has_bytes(entry, manifest):
            stored = manifest.storages[entry.storage]
            storage = graph.storage(stored.id, stored.dtype, stored.nbytes, stored.location)
            lies = entry.shape, entry.stride, entry.offset
            root.pairs.append((Text(name, 0), graph.tensor(storage, entry.dtype, *lies)))
    return graph


def _has_bytes(entry: TensorEntry, manifest: Manifest) -> bool:
    storage = manifest.storages.get(entry.storage or "")
    if storage is None:
        return entry.layout != "strided"
    return reach_of(entry.shape, entry.stride, entry.offset, entry.dtype) <= storage.nbytes
