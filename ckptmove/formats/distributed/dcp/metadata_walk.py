"""Walk `.metadata`: the objects of items, of which there may be very many, are parsed at once.

    ChunkStorageMetadata{offsets, sizes}                    a `Box`
    TensorProperties(dtype, …)                              the `Global` of a dtype
    TensorStorageMetadata{properties, size, chunks}         a `Description`
    MetadataIndex{fqn, offset}                              an `ItemKey`
    _StorageInfo{relative_path, offset, length, …}          a `ItemRange`

As nodes, an item would take several kB. When the state of one of these objects is set, the object
is complete: it keeps its parsed content, and the state is emptied; recalling the state afterwards
is an error. Everything else becomes the same nodes as in any pickle; see `metadata` for the
contents, and `item_machine` for how most of them are parsed at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from sys import intern
from typing import NamedTuple, TypeAlias, TypeVar

from ....errors import CorruptError, UnsupportedError
from ....pickles.nodes import NOTHING, Call, Dict, Global, List, Node, Tuple
from ....pickles.opcodes.machine import Machine
from ....sources.budget import CONTAINER, TUPLE_ITEM, Budget
from ....torch_pickle.values.persistent_ids import is_size
from ....torch_pickle.values.strided import MOST_DIMENSIONS
from ..boxes import Box

_LONGEST_NAME = 255  # bytes of a file's name
_ZSTD = re.compile(r"stream\.zstd/1(\..*)?")
_SEPARATORS = frozenset("/\\\0")
_SIZE = "torch.Size"
_Kind = TypeVar("_Kind")


class ItemRange(NamedTuple):
    """The place of an item: a file, and a range of it."""

    file: str
    at: int
    nbytes: int
    is_packed: bool = False  #: whether it is compressed: see `packed`


class ItemKey(NamedTuple):
    """An item's key: its name and its chunk's offsets (None for a value that is not a tensor)."""

    name: str
    offsets: tuple[int, ...] | None


class Description(NamedTuple):
    """The description of a tensor: dtype, shape and chunks."""

    dtype: Global
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


Content: TypeAlias = Box | Global | Description | ItemKey | ItemRange


class FrequentObject:
    """A frequent object: `content` is its parsed content, once that is known."""

    __slots__ = ("content", "kind")

    def __init__(self, kind: str, content: Content | None = None) -> None:
        self.kind = kind  #: the name of its class
        self.content = content


class Sizes(Call):
    """A torch.Size; equal ones are one object."""

    __slots__ = ("row", "sizes")

    def __init__(self, function: Node, args: Tuple, sizes: tuple[int, ...], at: int) -> None:
        super().__init__(function, args, "REDUCE", at)
        self.row = args.items  #: the items of its arguments, which equal ones share
        self.sizes = sizes


class MetadataMachine(Machine):
    """A machine that parses the objects of items as soon as they are complete."""

    def __init__(
        self,
        data: bytes,
        base: int = 0,
        gaps: Mapping[int, int] | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(data, base, gaps, budget)
        self.kinds: dict[int, str] = {}  #: `id()` of the name of a class → its kind
        self.sizes: dict[tuple[int, ...], Sizes] = {}  #: the sizes found so far

    def push_global(self, module: str, name: str) -> None:
        """Like `Machine.push_global`; remembers the classes of items."""
        super().push_global(module, name)
        kind = class_of(self.globals[-1])
        if kind in _CONTENTS:
            self.kinds[id(self.globals[-1])] = kind

    def recall(self, slot: int) -> None:
        """Like `Machine.recall`; CorruptError if an emptied state is used again."""
        super().recall(slot)
        top = self.stack[-1]
        if (type(top) is Dict and top.pairs is NOTHING) or (
            type(top) is Tuple and top.items is NOTHING
        ):
            raise malformed_error("the state of an object is used again")

    def op_newobj(self) -> None:
        """Like `Machine.op_newobj`, but an object of an item becomes a record."""
        stack = self.stack
        kind = self.kinds.get(id(stack[-2]))
        if kind is None or stack[-1] is not self.empty_tuple:
            return super().op_newobj()
        self.charge(CONTAINER)
        stack.pop()
        # Only `metadata` sees it: as a node it would be ten times as large.
        stack[-1] = FrequentObject(kind)  # type: ignore[call-overload]
        return None

    def op_build(self) -> None:
        """Like `Machine.op_build`, but a record keeps the parsed content of its state."""
        target: object = self.stack[-2]
        if not isinstance(target, FrequentObject):
            return super().op_build()
        state = self.stack.pop()
        if target.content is not None:
            raise malformed_error(f"a {target.kind} has two states")
        # The memo keeps the state until the end, though nothing recalls it.
        if isinstance(state, Dict):
            for _, value in state.pairs:
                if isinstance(value, (List, Tuple)) and len(value.items) > MOST_DIMENSIONS:
                    self._count_row(value)
        target.content = _CONTENTS[target.kind](state)
        if isinstance(state, Dict):
            state.pairs = NOTHING
        elif isinstance(state, Tuple):
            state.items = NOTHING
        return None

    def op_reduce(self) -> None:
        """Like `Machine.op_reduce`, but equal torch.Size objects become one."""
        stack = self.stack
        function, args = stack[-2], stack[-1]
        if not isinstance(function, Global) or function.qualname != _SIZE:
            return super().op_reduce()
        inner = args.items[0] if isinstance(args, Tuple) and len(args.items) == 1 else None
        if not isinstance(inner, Tuple) or not isinstance(args, Tuple):
            return super().op_reduce()
        self.charge(CONTAINER)
        self._count_row(inner)
        sizes = sizes_of(inner)
        known = self.sizes.get(sizes)
        if known is None:
            known = self.sizes[sizes] = Sizes(function, args, sizes, self.at)
        stack.pop()
        stack[-1] = known
        args.items = known.row  # shared, too
        return None

    def _count_row(self, node: Node) -> None:
        """Count a long row that is copied: very many objects may share one."""
        if isinstance(node, (List, Tuple)) and len(node.items) > MOST_DIMENSIONS:
            self.charge(TUPLE_ITEM * len(node.items))


# -- nodes -----------------------------------------------------------------------------------------


def malformed_error(what: str) -> CorruptError:
    """The error that `.metadata` is not as torch writes it."""
    return CorruptError(f".metadata is malformed: {what}")


def class_of(name: Global) -> str | None:
    """The name of a DCP class, in any module of torch; None if it is not of DCP."""
    is_known = name.qualname.startswith("torch.distributed.")
    return name.qualname.rpartition(".")[2] if is_known else None


def text_of(node: Node) -> str:
    """A string; equal ones are one object."""
    if not isinstance(node, str):
        raise malformed_error("a name is not a string")
    return intern(str(node))


def sizes_of(node: Node) -> tuple[int, ...]:
    """The sizes in a torch.Size; Megatron-FSDP uses tuples and lists instead."""
    if isinstance(node, Sizes):
        return node.sizes
    if isinstance(node, (Tuple, List)) and all(map(is_size, node.items)):
        return tuple(node.items)  # type: ignore[arg-type] # they are numbers
    raise malformed_error("a size or offset is not made of numbers from 0 up")


def fields_of(node: Node) -> dict[str, Node]:
    """The fields of an object, by name, from its state."""
    if not isinstance(node, Dict):
        raise malformed_error("an object has no fields")
    for key, _ in node.pairs:
        if not isinstance(key, str):
            raise malformed_error("a name is not a string")
    return dict(iter(node.pairs))  # type: ignore[arg-type] # its keys are strings


def file_of(node: Node) -> str:
    """The name of a file in the same folder."""
    return _file_of(text_of(node))


@lru_cache(1024)
def _file_of(file: str) -> str:
    try:
        fits = 0 < len(file.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:
        fits = False
    if not fits or file in (".", "..") or not _SEPARATORS.isdisjoint(file):
        raise CorruptError(f".metadata names {file!r:.100}, which is not a file in the same folder")
    return file


def content_of(node: object, kind: type[_Kind]) -> _Kind:
    """The parsed content of an object, of this type; CorruptError if it has another type."""
    content = node.content if isinstance(node, FrequentObject) else None
    if not isinstance(content, kind):
        raise malformed_error(f"something else is where {kind.__name__.lower()} should be")
    return content


# -- what objects say ------------------------------------------------------------------------------


def _box(state: Node) -> Box:
    told = fields_of(state)
    return Box(sizes_of(told.get("offsets")), sizes_of(told.get("sizes")))


def _dtype(state: Node) -> Global:
    """The dtype, the first of the properties of a tensor."""
    if isinstance(state, Dict):
        first = state.get("dtype")
    else:
        first = state.items[0] if isinstance(state, Tuple) and state.items else None
    if not isinstance(first, Global) or first.module != "torch":
        raise malformed_error("a tensor has no dtype")
    return first


def _description(state: Node) -> Description:
    told = fields_of(state)
    listed = told.get("chunks")
    chunks = listed.items if isinstance(listed, List) else ()
    boxes = tuple(content_of(each, Box) for each in chunks)
    dtype = content_of(told.get("properties"), Global)
    return Description(dtype, sizes_of(told.get("size")), boxes)


def _index(state: Node) -> ItemKey:
    told = fields_of(state)
    offset = told.get("offset")
    return ItemKey(text_of(told.get("fqn")), None if offset is None else sizes_of(offset))


def _item_range(state: Node) -> ItemRange:
    told = fields_of(state)
    transforms = told.get("transform_descriptors")
    by = transforms.items if isinstance(transforms, List) else [transforms]
    is_packed = len(by) == 1 and isinstance(by[0], str) and bool(_ZSTD.fullmatch(by[0]))
    if transforms is not None and by and not is_packed:
        raise UnsupportedError(
            f"its items are transformed by {by[0]!s:.40}",
            hint="save it again without stream extensions",
        )
    file = file_of(told.get("relative_path"))
    at, nbytes = told.get("offset"), told.get("length")
    if not is_size(at) or not is_size(nbytes):
        raise CorruptError(f".metadata gives an item in {file!r} no valid range")
    assert isinstance(at, int)
    assert isinstance(nbytes, int)
    return ItemRange(file, at, nbytes, is_packed)


_CONTENTS: dict[str, Callable[[Node], Content]] = {
    "ChunkStorageMetadata": _box,
    "MetadataIndex": _index,
    "TensorProperties": _dtype,
    "TensorStorageMetadata": _description,
    "_StorageInfo": _item_range,
}
