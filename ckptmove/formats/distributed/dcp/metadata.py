"""`.metadata` of torch.distributed.checkpoint: the saved names, their chunks and their places.

    Metadata
        state_dict_metadata   name → TensorStorageMetadata or BytesStorageMetadata
            properties, size, chunks: [ChunkStorageMetadata: offsets, sizes]
        planner_data          name → path of keys; missing if the state dict was not flattened
        storage_data          MetadataIndex: fqn, offset
                              → _StorageInfo: relative_path, offset, length
        storage_meta, version since torch 2.4, 2.13

It is a pickle; torch's loader runs everything that it names, but here it is only walked. A name is
that of a tensor, or of any other value, which is saved as bytes. Ranks that saved without
collectives each wrote a `__R.metadata` with the items that they saved.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py (torch 2.1 to 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....errors import CorruptError, UnsupportedError
from ....manifest.dtypes import ALIASES, BITS
from ....pickles.fetch import fetch
from ....pickles.nodes import Call, Dict, Global, List, Node, Tuple
from ....sources.budget import Budget
from ....sources.source import MAX_NBYTES, Readable
from ....torch_pickle.callables.allowlist import KNOWN
from ....torch_pickle.callables.uses import Uses
from ....torch_pickle.values.persistent_ids import is_size
from ....torch_pickle.values.strided import MOST_DIMENSIONS
from ..boxes import Box
from .item_machine import walk_metadata
from .metadata_walk import (
    Description,
    ItemKey,
    ItemRange,
    class_of,
    content_of,
    fields_of,
    malformed_error,
    text_of,
)

METADATA = ".metadata"
_MOST_KEYS = 1_000  # keys of a path in the tree
_KNOWN = re.compile(r"torch\.distributed\.(checkpoint|_shard)\.[\w.]*[A-Z_]\w+|pathlib\.\w*Path")
Keys = tuple[str | int, ...]


class SavedTensor(NamedTuple):
    """A tensor with its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: dict[Box, ItemRange]


@dataclass
class SavedState:
    """The state dict that `.metadata` describes: its tensors and other values, and their places."""

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    blobs: dict[str, ItemRange] = field(default_factory=dict)
    #: name → the keys that lead to it in the tree
    paths: dict[str, Keys] = field(default_factory=dict)
    #: items that another rank saved too
    copies: list[ItemRange] = field(default_factory=list)

    def join(self, other: SavedState) -> None:
        """Add the items that another rank saved; items that all ranks saved are taken once."""
        for name, tensor in other.tensors.items():
            mine = self.tensors.setdefault(name, tensor)
            if mine[:2] != tensor[:2]:
                raise CorruptError(f"ranks differ in the shape or dtype of {name!r}")
            for box, span in tensor.chunks.items():
                if mine.chunks.setdefault(box, span) != span:
                    self.copies.append(span)
        for name, span in other.blobs.items():
            if self.blobs.setdefault(name, span) != span:
                self.copies.append(span)
        self.paths |= {name: keys for name, keys in other.paths.items() if name not in self.paths}

    @property
    def names(self) -> list[str]:
        """All names, in the order of the state dict as far as it is known."""
        known = [name for name in self.paths if name in self.tensors or name in self.blobs]
        return list(dict.fromkeys((*known, *self.tensors, *self.blobs)))

    def items(self) -> Iterator[tuple[str, ItemRange]]:
        """Each item: the name of its tensor or value, and its place."""
        for name, tensor in self.tensors.items():
            # chunks at the same offsets have the same item: all but one of them are empty
            if len(tensor.chunks) == 1:
                yield from ((name, span) for span in tensor.chunks.values())
                continue
            items = dict.fromkeys((box.offsets, span) for box, span in tensor.chunks.items())
            yield from ((name, span) for _, span in items)
        yield from self.blobs.items()

    def check_apart(self) -> None:
        """Raises CorruptError if two items have a byte of a file in common."""
        end: tuple[str, int, str] = "", 0, ""  # file, end and name of the item before
        for span, name in sorted((span, name) for name, span in self.items() if span.nbytes):
            if span.file == end[0] and span.at < end[1]:
                raise CorruptError(f"the items of {end[2]!r} and {name!r} overlap in {span.file!r}")
            end = span.file, span.at + span.nbytes, name


class ReadMetadata(NamedTuple):
    """The contents of a `.metadata` file."""

    saved: SavedState
    unknown: tuple[str, ...]  #: names that it would import and that are not known to be harmless
    nbytes: int


def read_metadata(source: Readable, budget: Budget) -> ReadMetadata:
    """Read a `.metadata`, or the metadata file of a rank."""
    if source.nbytes > MAX_NBYTES:
        raise UnsupportedError("is too large", path=source.path)
    budget.allow_small_objects(source.nbytes)
    pickle = walk_metadata(fetch(source, 0).data, budget)
    unknown = tuple(dict.fromkeys(Uses(()).unknown(pickle, _is_known)))
    return ReadMetadata(read_saved(pickle.root), unknown, source.nbytes)


def _is_known(name: Global) -> bool:
    """Whether an imported name is known to be harmless when it is used correctly."""
    is_harmless = name.qualname in KNOWN and "." not in name.name
    return is_harmless or bool(_KNOWN.fullmatch(name.qualname))


def read_saved(root: Node) -> SavedState:
    """Read the contents of a `.metadata` from its root node."""
    if not isinstance(root, Call) or not isinstance(root.function, Global):
        raise malformed_error("it holds what no version of torch writes")
    if class_of(root.function) != "Metadata":
        raise malformed_error("it holds what no version of torch writes")
    told = fields_of(root.state)
    where: dict[ItemKey, ItemRange] = {}
    for key, info in _pairs(told.get("storage_data"), "storage_data"):
        index = content_of(key, ItemKey)
        if index in where:
            raise CorruptError(f".metadata says twice where {index.name!r} lies")
        where[index] = content_of(info, ItemRange)
    saved = SavedState()
    for key, about in _pairs(told.get("state_dict_metadata"), "state_dict_metadata"):
        name = text_of(key)
        if name in saved.tensors or name in saved.blobs:
            raise CorruptError(f".metadata lists {name!r} twice")
        if _is_value(about):
            saved.blobs[name] = _found(where, ItemKey(name, None))
        else:
            saved.tensors[name] = _tensor(name, content_of(about, Description), where)
    planner = told.get("planner_data")
    for key, keys in () if planner is None else _pairs(planner, "planner_data"):
        name = text_of(key)
        path = saved.paths[name] = _keys(keys)
        if ".".join(map(str, path)) != name:
            raise CorruptError(f".metadata says that {name!r:.100} is at another place in the tree")
    return saved


def _is_value(about: Node) -> bool:
    """Whether the entry is for a value that is not a tensor."""
    function = about.function if isinstance(about, Call) else None
    return isinstance(function, Global) and class_of(function) == "BytesStorageMetadata"


def _tensor(name: str, about: Description, where: Mapping[ItemKey, ItemRange]) -> SavedTensor:
    if len(about.shape) > MOST_DIMENSIONS:
        count = f"{len(about.shape):,} dimensions; {MOST_DIMENSIONS} are read"
        raise UnsupportedError(f"the tensor {name!r:.100} has {count}")
    chunks: dict[Box, ItemRange] = {}
    for box in about.boxes:
        if box in chunks and box.numel:
            raise CorruptError(f".metadata lists a chunk of {name!r} twice")
        chunks[box] = _found(where, ItemKey(name, box.offsets))
    dtype = ALIASES.get(about.dtype.name, about.dtype.name)
    if dtype not in BITS or BITS[dtype] < 8:
        raise UnsupportedError(f"the tensor {name!r} has the dtype {about.dtype.name!r:.40}")
    return SavedTensor(dtype, about.shape, chunks)


def _found(where: Mapping[ItemKey, ItemRange], index: ItemKey) -> ItemRange:
    """The place of an item; an undivided one may be stored without offsets."""
    found = where.get(index)
    name, offsets = index
    if found is None and not any(offsets or ()):
        found = where.get(ItemKey(name, None if offsets is not None else ()))
    if found is None:
        raise CorruptError(f".metadata does not say where a chunk of {name!r} lies")
    return found


def _pairs(node: Node, what: str) -> Sequence[tuple[Node, Node]]:
    if not isinstance(node, Dict):
        raise malformed_error(f"its {what} is not a dict")
    return node.pairs


def _keys(node: Node) -> Keys:
    items = node.items if isinstance(node, (Tuple, List)) else ()
    if len(items) > _MOST_KEYS:
        raise UnsupportedError(
            f".metadata has a path of {len(items):,} keys in the tree; {_MOST_KEYS:,} are read"
        )
    keys = tuple(
        text_of(each) if isinstance(each, str) else each
        for each in items
        if isinstance(each, str) or is_size(each)
    )
    if not keys or len(keys) != len(items):
        raise malformed_error("a path is not made of keys")
    return keys
