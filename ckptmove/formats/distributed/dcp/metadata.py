"""`.metadata` of torch.distributed.checkpoint: what is saved, in which chunks, and where they lie.

    Metadata
        state_dict_metadata   name → TensorStorageMetadata or BytesStorageMetadata
            properties, size, chunks: [ChunkStorageMetadata: offsets, sizes]
        planner_data          name → path of keys; missing if the state dict was not flattened
        storage_data          MetadataIndex: fqn, offset
                              → _StorageInfo: relative_path, offset, length
        storage_meta, version since torch 2.4, 2.13

It is a pickle, of which the loader of torch runs whatever it names; here it is walked. A name is
that of a tensor, or of any other value, which is saved as bytes. Ranks that saved without
collectives each wrote a `__R.metadata` with what they saved themselves.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py (torch 2.1 to 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....errors import CorruptError, UnsupportedError
from ....manifest.dtypes import ALIASES, BITS
from ....pickles.nodes import Call, Dict, Global, List, Node, Tuple
from ....torch_pickle.values.persistent_ids import is_size
from ....torch_pickle.values.strided import MOST_DIMENSIONS
from ..boxes import Box

METADATA = ".metadata"
_LONGEST_NAME = 255  # bytes of a file's name
_ZSTD = re.compile(r"stream\.zstd/1(\..*)?")
_SEPARATORS = frozenset("/\\\0")
Keys = tuple[str | int, ...]


class Lies(NamedTuple):
    """Where an item lies: a file, and a range of it."""

    file: str
    at: int
    nbytes: int
    is_packed: bool = False  #: whether it is compressed: see `packed`


class SavedTensor(NamedTuple):
    """A tensor, by its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: dict[Box, Lies]


@dataclass
class Saved:
    """What `.metadata` tells."""

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    blobs: dict[str, Lies] = field(default_factory=dict)
    #: the keys that lead to each
    paths: dict[str, Keys] = field(default_factory=dict)
    #: items that another rank has saved too
    copies: list[Lies] = field(default_factory=list)

    def join(self, other: Saved) -> None:
        """Add what another rank saved by itself; what all saved is taken once."""
        for name, tensor in other.tensors.items():
            mine = self.tensors.setdefault(name, tensor)
            if mine[:2] != tensor[:2]:
                raise CorruptError(f"ranks differ in the shape or dtype of {name!r}")
            for box, lies in tensor.chunks.items():
                if mine.chunks.setdefault(box, lies) != lies:
                    self.copies.append(lies)
        for name, lies in other.blobs.items():
            if self.blobs.setdefault(name, lies) != lies:
                self.copies.append(lies)
        self.paths |= {name: keys for name, keys in other.paths.items() if name not in self.paths}

    @property
    def names(self) -> list[str]:
        """All names, in the order of the state dict as far as that is known."""
        known = [name for name in self.paths if name in self.tensors or name in self.blobs]
        return list(dict.fromkeys((*known, *self.tensors, *self.blobs)))

    def items(self) -> Iterator[tuple[str, Lies]]:
        """Each item, by the name of its tensor or value, and where it lies."""
        for name, tensor in self.tensors.items():
            # chunks at the same place have the same item: all but one of them are empty
            items = dict.fromkeys((box.offsets, lies) for box, lies in tensor.chunks.items())
            yield from ((name, lies) for _, lies in items)
        yield from self.blobs.items()

    def check_apart(self) -> None:
        """Raises CorruptError if two items have a byte of a file in common."""
        end: tuple[str, int, str] = "", 0, ""  # file, end and name of the item before
        for lies, name in sorted((lies, name) for name, lies in self.items() if lies.nbytes):
            if lies.file == end[0] and lies.at < end[1]:
                raise CorruptError(f"the items of {end[2]!r} and {name!r} overlap in {lies.file!r}")
            end = lies.file, lies.at + lies.nbytes, name


def read_saved(root: Node) -> Saved:
    """Read what a `.metadata` holds, from its root node."""
    told = _fields(root, "Metadata")
    where: dict[tuple[str, tuple[int, ...] | None], Lies] = {}
    for key, info in _pairs(told.get("storage_data"), "storage_data"):
        index = _fields(key, "MetadataIndex")
        offset = index.get("offset")
        known = _text(index.get("fqn")), None if offset is None else _sizes(offset)
        if known in where:
            raise CorruptError(f".metadata says twice where {known[0]!r} lies")
        where[known] = _lies(info)
    saved = Saved()
    for key, about in _pairs(told.get("state_dict_metadata"), "state_dict_metadata"):
        name = _text(key)
        if name in saved.tensors or name in saved.blobs:
            raise CorruptError(f".metadata lists {name!r} twice")
        if _kind(about) == "BytesStorageMetadata":
            saved.blobs[name] = _found(where, name, None)
        else:
            saved.tensors[name] = _tensor(name, about, where)
    planner = told.get("planner_data")
    for key, keys in () if planner is None else _pairs(planner, "planner_data"):
        name = _text(key)
        path = saved.paths[name] = _keys(keys)
        if ".".join(map(str, path)) != name:
            raise CorruptError(f".metadata says that {name!r:.100} is at another place in the tree")
    return saved


def _tensor(
    name: str, about: Node, where: Mapping[tuple[str, tuple[int, ...] | None], Lies]
) -> SavedTensor:
    told = _fields(about, "TensorStorageMetadata")
    shape = _sizes(told.get("size"))
    if len(shape) > MOST_DIMENSIONS:
        raise UnsupportedError(f"the tensor {name!r} has {len(shape)} dimensions")
    chunks: dict[Box, Lies] = {}
    listed = told.get("chunks")
    for chunk in listed.items if isinstance(listed, List) else ():
        part = _fields(chunk, "ChunkStorageMetadata")
        box = Box(_sizes(part.get("offsets")), _sizes(part.get("sizes")))
        if box in chunks and box.numel:
            raise CorruptError(f".metadata lists a chunk of {name!r} twice")
        chunks[box] = _found(where, name, box.offsets)
    return SavedTensor(_dtype(name, told.get("properties")), shape, chunks)


def _found(
    where: Mapping[tuple[str, tuple[int, ...] | None], Lies],
    name: str,
    offsets: tuple[int, ...] | None,
) -> Lies:
    """Where an item lies; what is not divided may be known without its offsets."""
    found = where.get((name, offsets))
    if found is None and not any(offsets or ()):
        found = where.get((name, None if offsets is not None else ()))
    if found is None:
        raise CorruptError(f".metadata does not say where a chunk of {name!r} lies")
    return found


def _lies(info: Node) -> Lies:
    told = _fields(info, "_StorageInfo")
    transforms = told.get("transform_descriptors")
    by = transforms.items if isinstance(transforms, List) else [transforms]
    is_packed = len(by) == 1 and isinstance(by[0], str) and bool(_ZSTD.fullmatch(by[0]))
    if transforms is not None and by and not is_packed:
        raise UnsupportedError(
            f"its items are transformed by {by[0]!s:.40}",
            hint="save it again without stream extensions",
        )
    file = _text(told.get("relative_path"))
    fits = 0 < len(file.encode("utf-8", "replace")) <= _LONGEST_NAME
    if not fits or file in (".", "..") or not _SEPARATORS.isdisjoint(file):
        raise CorruptError(f".metadata names {file!r:.100}, which is not a file in the same folder")
    at, nbytes = told.get("offset"), told.get("length")
    if not is_size(at) or not is_size(nbytes):
        raise CorruptError(f".metadata gives an item in {file!r} no valid range")
    assert isinstance(at, int)
    assert isinstance(nbytes, int)
    return Lies(file, at, nbytes, is_packed)


# -- nodes -----------------------------------------------------------------------------------------


def _kind(node: Node) -> str:
    """The name of a class of DCP, whichever module of torch has it."""
    qualname = node.qualname if isinstance(node, Call) else None
    if qualname is None or not qualname.startswith("torch.distributed."):
        raise CorruptError(".metadata is malformed: it holds what no version of torch writes")
    return qualname.rpartition(".")[2]


def _fields(node: Node, kind: str) -> dict[str, Node]:
    """The fields of an object of this class."""
    if _kind(node) != kind:
        raise CorruptError(f".metadata is malformed: where a {kind} should be is a {_kind(node)}")
    state = node.state if isinstance(node, Call) else None
    if state is not None and not isinstance(state, Dict):
        raise CorruptError(f".metadata is malformed: a {kind} without fields")
    return {} if state is None else {_text(key): value for key, value in state.pairs}


def _pairs(node: Node, what: str) -> Sequence[tuple[Node, Node]]:
    if not isinstance(node, Dict):
        raise CorruptError(f".metadata is malformed: its {what} is not a dict")
    return node.pairs


def _text(node: Node) -> str:
    if not isinstance(node, str):
        raise CorruptError(".metadata is malformed: a name is not a string")
    return str(node)


def _sizes(node: Node) -> tuple[int, ...]:
    """What a torch.Size says; Megatron-FSDP has tuples and lists for it."""
    args = node.args if isinstance(node, Call) and node.qualname == "torch.Size" else None
    inner = args.items[0] if isinstance(args, Tuple) and len(args.items) == 1 else node
    if isinstance(inner, (Tuple, List)) and all(is_size(each) for each in inner.items):
        return tuple(each for each in inner.items if isinstance(each, int))
    raise CorruptError(".metadata is malformed: a size is none")


def _keys(node: Node) -> Keys:
    items = node.items if isinstance(node, (Tuple, List)) else ()
    keys = tuple(
        str(each) if isinstance(each, str) else each
        for each in items
        if isinstance(each, str) or is_size(each)
    )
    if not keys or len(keys) != len(items):
        raise CorruptError(".metadata is malformed: a path is not made of keys")
    return keys


def _dtype(name: str, node: Node) -> str:
    """The dtype that the properties of a tensor name, the first of them."""
    state = node.state if isinstance(node, Call) and _kind(node) == "TensorProperties" else None
    if isinstance(state, Dict):
        first = state.get("dtype")
    else:
        first = state.items[0] if isinstance(state, Tuple) and state.items else None
    if not isinstance(first, Global) or first.module != "torch":
        raise CorruptError(f".metadata is malformed: {name!r} has no dtype")
    dtype = ALIASES.get(first.name, first.name)
    if dtype not in BITS or BITS[dtype] < 8:
        raise UnsupportedError(f"the tensor {name!r} has the dtype {first.name!r:.40}")
    return dtype
