"""Write `.metadata` of torch.distributed.checkpoint: see `metadata` for its contents.

Every version of torch since 2.3 reads it; fields that newer versions add, such as `version`, may be
missing. There may be hundreds of thousands of chunks, so it is written without a node for each, and
only recalled values are memoized: names, and the properties of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from ....pickles.emit import BATCH, Emitter
from .metadata import Keys, SavedState, SavedTensor
from .metadata_walk import ItemRange

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_CONTIGUOUS = 0  # of _MEM_FORMAT_ENCODING
_BUILD = b"ub"  # sets the fields of an object
_T = TypeVar("_T")


def metadata_of(saved: SavedState, requires_grad: Mapping[str, bool]) -> bytes:
    """The content of `.metadata`; tensors that are not in `requires_grad` have False."""
    return _Writer().write(saved, requires_grad)


class _Writer(Emitter):
    """The pickle of a `Metadata`."""

    def __init__(self) -> None:
        super().__init__()
        # dtype and requires_grad → the slot of these properties
        self.properties: dict[tuple[str, bool], int] = {}

    def write(self, saved: SavedState, requires_grad: Mapping[str, bool]) -> bytes:
        """Write the whole pickle."""
        names = saved.names
        self.begin(_METADATA, "Metadata")
        self.spell_text("state_dict_metadata")
        for name in self.items(names):
            self.spell_text(name)
            if name in saved.tensors:
                self.tensor(saved.tensors[name], requires_grad.get(name, False))
            else:
                self.made(_METADATA, "BytesStorageMetadata")
        self.spell_text("planner_data")
        for name in self.items(names):
            self.spell_text(name)
            self.path(saved.paths[name])
        self.spell_text("storage_data")
        for name, offset, n, span in self.items(_places(saved, names)):
            self.place(name, offset, n, span)
        self.out += _BUILD + b"."
        return self.with_late_puts()

    def items(self, each: Iterable[_T]) -> Iterator[_T]:
        """Write a dict; the caller writes key and value of each item that is yielded."""
        self.out += b"}("
        for n, item in enumerate(each, 1):
            yield item
            if not n % BATCH:
                self.out += b"u("
        self.out += b"u"

    def begin(self, module: str, name: str) -> None:
        """Start an object of a class; its fields follow, up to `_BUILD`."""
        self.made(module, name)
        self.out += b"}("

    def made(self, module: str, name: str) -> None:
        self.spell_name(module, name)
        self.out += b")\x81"

    def tensor(self, tensor: SavedTensor, requires_grad: bool) -> None:
        self.begin(_METADATA, "TensorStorageMetadata")
        self.spell_text("properties")
        self.describe(tensor.dtype, requires_grad)
        self.spell_text("size")
        self.size(tensor.shape)
        self.spell_text("chunks")
        self.out += b"]("
        for box in tensor.chunks:
            self.begin(_METADATA, "ChunkStorageMetadata")
            self.spell_text("offsets")
            self.size(box.offsets)
            self.spell_text("sizes")
            self.size(box.sizes)
            self.out += _BUILD
        self.out += b"e" + _BUILD

    def describe(self, dtype: str, requires_grad: bool) -> None:
        """Write the TensorProperties of a tensor, whose state is a tuple."""
        slot = self.properties.get((dtype, requires_grad))
        if slot is not None:
            return self.get(slot)
        self.made(_METADATA, "TensorProperties")
        self.properties[dtype, requires_grad] = self.put()
        self.out += b"("
        self.spell_name("torch", dtype)
        self.spell_name("torch.serialization", "_get_layout")
        self.spell_text("torch.strided")
        self.out += b"\x85R"
        self.spell_constant(requires_grad)
        self.spell_name(_METADATA, "_MEM_FORMAT_ENCODING")
        self.push_int(_CONTIGUOUS)
        self.out += b"\x85R"
        self.spell_constant(False)  # whether its memory is pinned
        self.out += b"tb"
        return None

    def place(
        self, name: str, offset: tuple[int, ...] | None, n: int | None, span: ItemRange
    ) -> None:
        """Write the place of an item; items that are not tensors have no offset."""
        self.begin(_METADATA, "MetadataIndex")
        self.spell_text("fqn")
        self.spell_text(name)
        self.spell_text("index")
        if n is None:
            self.spell_constant(None)
        else:
            self.push_int(n)
        if offset is not None:
            self.spell_text("offset")
            self.size(offset)
        self.out += _BUILD
        self.begin(_FILES, "_StorageInfo")
        self.spell_text("relative_path")
        self.spell_text(span.file)
        self.spell_text("offset")
        self.push_int(span.at)
        self.spell_text("length")
        self.push_int(span.nbytes)
        self.out += _BUILD

    def size(self, sizes: tuple[int, ...]) -> None:
        """Write a torch.Size."""
        self.spell_name("torch", "Size")
        self.out += b"("
        for each in sizes:
            self.push_int(each)
        self.out += b"t\x85R"

    def path(self, keys: Keys) -> None:
        """Write a tuple of keys."""
        self.out += b"("
        for key in keys:
            if isinstance(key, str):
                self.spell_text(key)
            else:
                self.push_int(key)
        self.out += b"t"


def _places(
    saved: SavedState, names: Iterable[str]
) -> Iterator[tuple[str, tuple[int, ...] | None, int | None, ItemRange]]:
    """Each item: its name, its offset in the tensor, the number of the chunk, and its place."""
    for name in names:
        tensor = saved.tensors.get(name)
        if tensor is None:
            yield name, None, None, saved.blobs[name]
        else:
            for n, (box, span) in enumerate(tensor.chunks.items()):
                yield name, box.offsets, n, span
