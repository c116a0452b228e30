"""Write `.metadata` of torch.distributed.checkpoint: see `metadata` for what is in it.

Every version of torch since 2.3 reads it; what newer ones add, such as `version`, may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from ....pickles.emit import emit
from ....pickles.nodes import Call, Dict, Global, List, Node, Tuple
from .metadata import Lies, Saved, SavedTensor

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_CONTIGUOUS = 0  # of _MEM_FORMAT_ENCODING


def metadata_of(saved: Saved, requires_grad: Mapping[str, bool]) -> bytes:
    """The content of `.metadata`; `requires_grad` has tensors by name, others have False."""
    properties: dict[tuple[str, bool], Node] = {}
    told, where, paths = Dict(), Dict(), Dict()
    for name in saved.names:
        tensor = saved.tensors.get(name)
        if tensor is None:
            told.pairs.append((name, _made(_METADATA, "BytesStorageMetadata")))
            where.pairs.append((_index(name, None, None), _lies(saved.blobs[name])))
        else:
            key = tensor.dtype, requires_grad.get(name, False)
            if key not in properties:
                properties[key] = _properties(*key)
            told.pairs.append((name, _tensor(tensor, properties[key])))
            where.pairs += _places(name, tensor)
        paths.pairs.append((name, Tuple(list(saved.paths[name]), 0)))
    fields: list[tuple[str, Node]] = [
        ("state_dict_metadata", told),
        ("planner_data", paths),
        ("storage_data", where),
    ]
    return emit(_made(_METADATA, "Metadata", fields))


def _tensor(tensor: SavedTensor, properties: Node) -> Node:
    chunks: list[Node] = [
        _made(
            _METADATA,
            "ChunkStorageMetadata",
            [("offsets", _size(box.offsets)), ("sizes", _size(box.sizes))],
        )
        for box in tensor.chunks
    ]
    return _made(
        _METADATA,
        "TensorStorageMetadata",
        [("properties", properties), ("size", _size(tensor.shape)), ("chunks", List(chunks))],
    )


def _places(name: str, tensor: SavedTensor) -> Iterator[tuple[Node, Node]]:
    for n, (box, lies) in enumerate(tensor.chunks.items()):
        yield _index(name, box.offsets, n), _lies(lies)


def _index(name: str, offset: tuple[int, ...] | None, n: int | None) -> Node:
    fields: list[tuple[str, Node]] = [("fqn", name)]
    if offset is not None:
        fields.append(("offset", _size(offset)))
    return _made(_METADATA, "MetadataIndex", [*fields, ("index", n)])


def _lies(lies: Lies) -> Node:
    return _made(
        _FILES,
        "_StorageInfo",
        [("relative_path", lies.file), ("offset", lies.at), ("length", lies.nbytes)],
    )


def _properties(dtype: str, requires_grad: bool) -> Node:
    """The TensorProperties of a tensor, which has them as a tuple."""
    node = _made(_METADATA, "TensorProperties")
    layout = _called("torch.serialization", "_get_layout", "torch.strided")
    memory = _called(_METADATA, "_MEM_FORMAT_ENCODING", _CONTIGUOUS)
    node.state = Tuple([_name("torch", dtype), layout, requires_grad, memory, False], 0)
    node.built = True
    return node


def _size(sizes: tuple[int, ...]) -> Node:
    return _called("torch", "Size", Tuple(list(sizes), 0))


def _made(module: str, name: str, fields: list[tuple[str, Node]] | None = None) -> Call:
    """An object of a class, with these fields."""
    call = Call(_name(module, name), Tuple([], 0), "NEWOBJ", 0)
    if fields is not None:
        state = Dict()
        state.pairs = list(fields)
        call.state, call.built = state, True
    return call


def _called(module: str, name: str, argument: Node) -> Call:
    return Call(_name(module, name), Tuple([argument], 0), "REDUCE", 0)


@cache
def _name(module: str, name: str) -> Global:
    return Global(module, name, 0)
