"""The contents of a container and all containers nested in it, merged."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import CorruptError
from ..manifest.manifest import Storage
from ..manifest.paths import Path
from ..pickles.nodes import Call, Node, Tuple
from .callables.uses import LOADER
from .streams import Container, PickleStream
from .values.persistent_ids import StorageId, TensorId


class MergedContents(NamedTuple):
    """The merged contents of all containers of a checkpoint."""

    streams: Sequence[PickleStream]
    #: `id()` of persistent ids of storages, and of calls that load a storage from bytes
    ids: Mapping[int, StorageId]
    storages: Mapping[str, Storage]
    #: `id()` of a node → the saved objects in its bytes, with their paths
    grafts: Mapping[int, list[tuple[Path, Node]]]
    #: `id()` of a persistent id → the tensor that it names
    tensors: Mapping[int, TensorId]


def merge_contents(container: Container) -> MergedContents:
    """Merge a container and all containers nested in it."""
    all_of_it = list(container.everything())
    if len(all_of_it) == 1:  # it may hold very many storages: avoid copies
        return MergedContents(
            container.streams, container.ids, container.storages, {}, container.tensors
        )
    streams: list[PickleStream] = []
    ids: dict[int, StorageId] = {}
    storages: dict[str, Storage] = {}
    tensors: dict[int, TensorId] = {}
    grafts: dict[int, list[tuple[Path, Node]]] = {}
    for each in all_of_it:
        streams.extend(each.streams)
        ids.update(each.ids)
        tensors.update(each.tensors)
        storages.update(each.storages)
        for stream in each.streams:
            for nested in stream.nested:
                grafts[id(nested.maker)] = nested.container.roots
    for stream in streams:
        for call in stream.calls_of(LOADER):
            graft = grafts.get(id(loaded_from(call)))
            if graft is not None:
                if call.built or call.pairs or call.items:
                    raise CorruptError("a storage is changed after it was loaded from bytes")
                grafts[id(call)] = graft
                root = graft[0][1]
                if id(root) in ids:
                    ids[id(call)] = ids[id(root)]
    return MergedContents(streams, ids, storages, grafts, tensors)


def loaded_from(call: Call) -> Node:
    """The bytes that a call of `LOADER` loads; None for other calls."""
    if call.qualname != LOADER or not isinstance(call.args, Tuple):
        return None
    return call.args.items[0] if len(call.args.items) == 1 else None
