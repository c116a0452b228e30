"""Items of a distributed checkpoint: each is a whole torch.save file, within a file of a rank.

The item of a chunk holds one tensor, whose storage has exactly its elements. These may be in any
order of dimensions; such a chunk is put in row-major order in memory, one at a time.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from ....errors import CorruptError, InputError, UnsupportedError
from ....manifest.dtypes import BITS, STORAGE_CLASSES
from ....pickles.nodes import Call, Global, Node, Persistent, Tuple
from ....pickles.walk import walk
from ....sources.budget import Budget
from ....sources.joined import FORMATS, Strip
from ....sources.nearby import NearbyFiles
from ....sources.source import Memory, Readable, Source
from ....torch_pickle.values.persistent_ids import is_size
from ....torch_pickle.values.strided import contiguous_stride, is_contiguous
from ....zips.archive import DESCRIPTOR_MAGIC, END, END_MAGIC, LOCAL, STORED, SUM_AT, Archive
from ....zips.checking import damage
from ....zips.local_headers import check_layout
from ....zips.members import Record
from ...archives.zip_container import prefix_of
from ..boxes import Box, runs_of
from .metadata import SavedTensor
from .metadata_walk import ItemRange
from .packed import PackedItem

_LARGEST_PICKLE = 1 << 16  # bytes of the pickle of one tensor
_SMALL = 1 << 14  # bytes of an item that is read as a whole
_FRAME = 1 << 11  # bytes before the elements of a usual item, and after them
_LARGEST_VALUE = 64 << 20  # bytes of a value that is not a tensor, if it is compressed
_LARGEST_AROUND = 1 << 18  # bytes around the elements of a compressed item
_MOST_RECORDS = 16  # in an item; torch writes up to seven
_SUM_NBYTES = 4
_MOST_LAYOUTS = 1 << 8  # layouts that are cached, with a few kB each
_USUAL_PICKLE = 1 << 10  # bytes of a pickle whose form is cached
_LARGEST_IN_MEMORY = 256 << 20  # bytes of a chunk that is reordered
_MOST_MOVES = 1 << 23  # copies of elements along one dimension, to reorder a chunk
_REBUILDS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")


class DcpItem(NamedTuple):
    """The elements of a chunk, in a file."""

    source: Source
    at: int
    nbytes: int
    stride: tuple[int, ...]  #: in elements
    crc32: int  #: of all elements; 0 if the writer left it out


#: The chunks of a tensor, each with the place of its item, and the item.
Chunks = Sequence[tuple[Box, ItemRange, DcpItem]]
ReadChunks = Callable[[str], Chunks]  #: … of a tensor with this name


class _Layout(NamedTuple):
    """The common data of items of a shape: everything except elements, checksum and identity."""

    alike: tuple[tuple[int, bytes], ...]  #: offsets and contents of the equal parts
    at: int  #: the offset of the elements
    nbytes: int  #: the size of the elements
    stride: tuple[int, ...]
    sum_at: int  #: the offset of their checksum in the directory
    directory_at: int

    def fits(self, content: bytes) -> bool:
        """Whether the zip in an item has the same parts at the same offsets."""
        for at, part in self.alike:
            if not content.startswith(part, at):
                return False
        descriptor = self.at + self.nbytes + len(DESCRIPTOR_MAGIC)
        crc32 = content[self.sum_at : self.sum_at + _SUM_NBYTES]
        if content[descriptor : descriptor + _SUM_NBYTES] != crc32:
            return False
        return content.find(END_MAGIC, self.directory_at) == len(content) - END.size


class _Form(NamedTuple):
    """The layout of a chunk's elements in its storage."""

    dtype: str | None
    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    offset: Node
    key: str  #: of the storage


def open_item(
    source: Source,
    span: ItemRange,
    name: str,
    tensor: SavedTensor,
    box: Box,
    nearby: NearbyFiles,
) -> DcpItem:
    """Find the elements of a chunk; CorruptError unless the item is as `.metadata` describes it.

    `nearby` reads small items of the source together.
    """
    try:
        return _opened(source, span, tensor.dtype, box, nearby)
    except InputError as error:
        error.about(source.path)
        message = f"the item of {name!r} at offset {span.at:,}: {error}"
        raise type(error)(message, hint=error.hint, path=error.path) from error


def frame_of(span: ItemRange) -> list[tuple[int, int]]:
    """The ranges of the file around the elements of an item; the whole item if it is small."""
    if span.nbytes <= _SMALL or span.is_packed:
        return [(span.at, span.nbytes)]
    return [(span.at, _FRAME), (span.at + span.nbytes - _FRAME, _FRAME)]


def unpacked_item(source: Source, span: ItemRange, nbytes: int) -> Readable:
    """An item as torch saved it, decompressed if needed; `nbytes`: the size of its elements."""
    if span.is_packed:
        return PackedItem(source, span, nbytes + _LARGEST_AROUND)
    return source.window(span.at, span.nbytes)


def archive_of(window: Readable) -> Archive:
    """The zip in an item of a tensor; CorruptError if it has far too many records.

    A compressed item may be read again from its start for each record.
    """
    archive = Archive(window, tail=_FRAME)
    if len(archive.records) > _MOST_RECORDS:
        raise CorruptError("it is not a tensor that torch.save wrote")
    return archive


def item_faults(
    source: Source, span: ItemRange, name: str, nbytes: int, report: Callable[[int], object]
) -> list[str]:
    """The damage of an item of a tensor, a sentence each; `nbytes`: the size of its elements."""
    try:
        faults = list(damage(archive_of(unpacked_item(source, span, nbytes)), report))
    except (CorruptError, UnsupportedError) as error:
        faults = [str(error)]
    return [f"{span.file}: the item of {name!r} at offset {span.at:,}: {each}" for each in faults]


def value_in(source: Source, span: ItemRange, budget: Budget) -> Readable:
    """An item that is not a tensor."""
    window = unpacked_item(source, span, _LARGEST_VALUE)
    if isinstance(window, PackedItem):
        if not budget.inflate(span.nbytes, window.nbytes):
            raise UnsupportedError("what is compressed in it would take too much memory")
        return Memory(window.read(0, window.nbytes), source.path)
    return window


def _opened(source: Source, span: ItemRange, dtype: str, box: Box, nearby: NearbyFiles) -> DcpItem:
    if span.is_packed or span.nbytes > _SMALL:
        window = unpacked_item(source, span, box.numel * BITS[dtype] // 8)
        return _parsed(window, source, span, dtype, box)[0]
    # Reading it in pieces would take many reads; and most items look like an earlier one.
    content = nearby.read(source, span.at, span.nbytes)
    key = dtype, box.sizes, span.nbytes
    usual = _layouts.get(key)
    if usual is not None and usual.fits(content):
        crc32 = int.from_bytes(content[usual.sum_at : usual.sum_at + _SUM_NBYTES], "little")
        return DcpItem(source, span.at + usual.at, usual.nbytes, usual.stride, crc32)
    item, archive, stored = _parsed(Memory(content, source.path), source, span, dtype, box)
    layout = _layout_of(content, archive, stored, item)
    if layout is not None and len(_layouts) < _MOST_LAYOUTS:
        _layouts[key] = layout
    return item


def _parsed(
    window: Readable, source: Source, span: ItemRange, dtype: str, box: Box
) -> tuple[DcpItem, Archive, Record]:
    """An item, its zip, and the record of its elements."""
    archive = archive_of(window)
    prefix = prefix_of(archive)
    record = archive.records.get(f"{prefix}data.pkl")
    if record is None or record.method != STORED or record.nbytes > _LARGEST_PICKLE:
        raise CorruptError("it is not a tensor that torch.save wrote")
    order = archive.records.get(f"{prefix}byteorder")
    if order is not None and archive.read(order, at_most=64) != b"little":
        raise UnsupportedError("its tensors are big-endian")
    pickle = archive.read(record, at_most=_LARGEST_PICKLE)
    form = _usual_form(pickle) if len(pickle) <= _USUAL_PICKLE else _form_of(pickle)
    if form.dtype != dtype:
        raise CorruptError("its dtype is not the one that .metadata says: of another save?")
    if form.sizes != box.sizes:
        raise CorruptError("its shape is not the one that .metadata says: of another save?")
    stored = archive.records.get(f"{prefix}data/{form.key}")
    nbytes, stride = box.numel * BITS[dtype] // 8, form.stride
    if stored is None or stored.method != STORED or form.offset != 0 or stored.nbytes != nbytes:
        raise CorruptError(f"its storage is not just the {nbytes:,} bytes of the chunk")
    if not is_dense(box.sizes, stride):
        raise CorruptError("its elements do not fill its storage")
    at = archive.data_at(stored)
    if not isinstance(window, PackedItem):
        return DcpItem(source, span.at + at, nbytes, stride, stored.crc32), archive, stored
    if window.crc32(at, nbytes) != stored.crc32 != 0:
        raise CorruptError("the checksum of its elements is wrong")
    window.settle()
    return DcpItem(window, at, nbytes, stride, 0), archive, stored


def _layout_of(content: bytes, archive: Archive, stored: Record, item: DcpItem) -> _Layout | None:
    """The parts that other items may share with this one; None if torch does not write them so."""
    try:
        check_layout(archive)
    except InputError:
        return None
    starts = sorted([archive.directory_at, *archive.records.column("header_at")])
    ranges = list[tuple[int, int]]()  # ranges that may differ between items
    for record in (stored, archive.records.get(f"{prefix_of(archive)}.data/serialization_id")):
        if record is None:
            continue
        at, sum_at = archive.data_at(record), record.entry_at + SUM_AT
        end = at + record.stored_nbytes
        after = DESCRIPTOR_MAGIC + record.crc32.to_bytes(_SUM_NBYTES, "little")
        is_summed_before = any(LOCAL.unpack_from(content, record.header_at)[6:9])
        next_at = starts[bisect_right(starts, record.header_at)]
        if is_summed_before or not content.startswith(after, end) or next_at < end + len(after):
            return None
        ranges += [(at, end), (end + len(DESCRIPTOR_MAGIC), end + len(after))]
        ranges.append((sum_at, sum_at + _SUM_NBYTES))
    alike, before = list[tuple[int, bytes]](), 0
    for start, stop in (*sorted(ranges), (len(content), len(content))):
        alike.append((before, content[before:start]))
        before = stop
    at, sum_at = archive.data_at(stored), stored.entry_at + SUM_AT
    return _Layout(tuple(alike), at, item.nbytes, item.stride, sum_at, archive.directory_at)


def _form_of(pickle: bytes) -> _Form:
    """The form in the pickle of an item; CorruptError if it is not that of a tensor."""
    node = walk(pickle).root
    if isinstance(node, Call) and node.qualname == "torch._utils._rebuild_parameter":
        node = node.args.items[0] if isinstance(node.args, Tuple) and node.args.items else None
    args = node.args.items if isinstance(node, Call) and isinstance(node.args, Tuple) else []
    if not isinstance(node, Call) or node.qualname not in _REBUILDS or len(args) < 6:
        raise CorruptError("it holds something else than a tensor")
    dtype, pid = _dtype(node.qualname, args), getattr(args[0], "pid", None)
    key = pid.items[2] if isinstance(pid, Tuple) and len(pid.items) > 2 else None
    return _Form(dtype, _numbers(args[2]), _numbers(args[3]), args[1], str(key))


#: Chunks of the same shape have the same pickle, and there may be very many.
_usual_form = lru_cache(1024)(_form_of)


def _dtype(qualname: str, args: Sequence[Node]) -> str | None:
    """The dtype with which a tensor is rebuilt."""
    if qualname == _REBUILDS[1]:
        told = args[6] if len(args) > 6 else None
        return told.name if isinstance(told, Global) and told.module == "torch" else None
    pid = args[0].pid if isinstance(args[0], Persistent) else None
    items = pid.items if isinstance(pid, Tuple) and len(pid.items) == 5 else [None] * 5
    return STORAGE_CLASSES.get(items[1].name) if isinstance(items[1], Global) else None


#: The layouts of small items, by dtype, shape and size.
_layouts: dict[tuple[str, tuple[int, ...], int], _Layout] = {}


def _numbers(node: Node) -> tuple[int, ...]:
    items = node.items if isinstance(node, Tuple) else [None]
    if not all(map(is_size, items)):
        raise CorruptError("its shape or stride is malformed")
    return tuple(each for each in items if isinstance(each, int))


def is_uniform(item: DcpItem, numel: int) -> bool:
    """Whether the first elements of the item are all equal; `numel` is the number of elements."""
    width = item.nbytes // numel
    data = item.source.read(item.at, min(item.nbytes, _FRAME * width))
    return data == data[:width] * (len(data) // width)


def is_dense(sizes: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements with these strides are contiguous in some order of the dimensions."""
    if len(sizes) != len(stride):
        return False
    step = 1
    for each, n in sorted((each, n) for each, n in zip(stride, sizes, strict=True) if n != 1):
        if each != step and 0 not in sizes:
            return False
        step *= n
    return True


def strip_of(item: DcpItem, tensor: SavedTensor, box: Box) -> Strip:
    """The place of an item's elements in their tensor."""
    width = BITS[tensor.dtype] // 8
    runs = runs_of(tensor.shape, box)
    run, pitches = runs.length * width, tuple(pitch * width for pitch in runs.pitches)
    counts = runs.counts
    if isinstance(item.source, PackedItem) and not counts:  # the kernel can't copy these
        counts, pitches = (1,), (run,)
    if is_contiguous(box.sizes, item.stride):
        return Strip(item.source, item.at, runs.at * width, run, counts, pitches)
    if item.nbytes > _LARGEST_IN_MEMORY:
        raise UnsupportedError(
            f"has a transposed chunk of {item.nbytes:,} bytes, which is too large to be put in "
            "order in memory",
            path=item.source.path,
        )
    sizes, _ = _joined(box.sizes, item.stride)
    if box.numel // max(sizes) > _MOST_MOVES:
        raise UnsupportedError(
            f"has a transposed chunk of {len(sizes)} dimensions, which are too many to be put in "
            "order",
            path=item.source.path,
        )
    counts, pitches = (counts, pitches) if counts else ((1,), (run,))
    return Strip(_TransposedElements(item, box, width), 0, runs.at * width, run, counts, pitches)


class _TransposedElements:
    """The elements of an item in row-major order, computed and checked when they are read."""

    latest: tuple[_TransposedElements, memoryview] | None = (
        None  # the only one that is held in memory
    )

    def __init__(self, item: DcpItem, box: Box, width: int) -> None:
        self.item = item
        self.box = box
        self.width = width

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        """As `Source.read_into`."""
        held = _TransposedElements.latest
        if held is None or held[0] is not self:
            data = self.item.source.read(self.item.at, self.item.nbytes)
            if self.item.crc32 not in (0, zlib.crc32(data)):
                path = self.item.source.path
                raise CorruptError("is damaged: the checksum of a chunk is wrong", path=path)
            content = in_order(data, self.box.sizes, self.item.stride, self.width)
            held = _TransposedElements.latest = self, memoryview(content)
        buffer[:] = held[1][start : start + len(buffer)]
        if start + len(buffer) == self.item.nbytes:
            _TransposedElements.latest = None


def _joined(
    sizes: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in as few dimensions as possible; at least one."""
    joined: list[tuple[int, int]] = []
    for n, step in zip(sizes, stride, strict=True):
        if joined and joined[-1][1] == n * step:
            joined[-1] = joined[-1][0] * n, step
        elif n != 1:
            joined.append((n, step))
    made = joined or [(1, 1)]
    return tuple(n for n, _ in made), tuple(step for _, step in made)


def in_order(data: bytes, sizes: tuple[int, ...], stride: tuple[int, ...], width: int) -> bytearray:
    """Elements of `width` bytes with this stride, in row-major order."""
    unit = gcd(width, 8)
    sizes, stride = _joined(sizes, stride)
    made = bytearray(len(data))
    source, to = memoryview(data).cast(FORMATS[unit]), memoryview(made).cast(FORMATS[unit])
    shape, steps = (
        (*sizes, width // unit),
        (*(each * (width // unit) for each in stride), 1),
    )
    belongs = contiguous_stride(shape)
    inner = max(range(len(shape)), key=shape.__getitem__)  # one call copies so many elements
    count, step, pitch = shape[inner], steps[inner], belongs[inner]
    outer = [n for n in range(len(shape)) if n != inner]
    for index in product(*(range(shape[n]) for n in outer)):
        at = sum(i * steps[n] for i, n in zip(index, outer, strict=True))
        where = sum(i * belongs[n] for i, n in zip(index, outer, strict=True))
        to[where : where + (count - 1) * pitch + 1 : pitch] = source[
            at : at + (count - 1) * step + 1 : step
        ]
    return made
