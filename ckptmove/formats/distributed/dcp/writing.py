"""Write a folder of torch.distributed.checkpoint, like a number of ranks would have saved it.

The rows of a tensor (the indexes of its first dimension) are divided like by `torch.chunk`, which
FSDP uses to shard; a tensor with fewer rows than ranks goes to as many ranks as it has rows.
Undivided data (scalars, empty tensors, values) goes to the rank with the smallest file so far. Each
rank has one file; a rank without data has none. `.metadata` is written last.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....errors import RefusedError, WriteError
from ....graph.draft import CheckpointGraph, Pieces
from ....graph.fill import fill
from ....graph.parts import check_expanded
from ....graph.traversal import nodes_of
from ....manifest.dtypes import nbytes_of
from ....pickles.emit import emit
from ....pickles.nodes import List, Persistent
from ....pickles.terms import TooLong
from ....sources.budget import Boundless
from ....sources.nearby import NearbyFiles
from ....sources.source import Readable, Source
from ....torch_pickle.values.strided import reach_of
from ...torch.zip import TorchZip
from ...writing import WriteOptions, WritePlan, assemble
from ..boxes import Box
from .flattening import Leaf, flatten
from .item_frame import STEM, tensor_frame, value_item
from .item_machine import walk_metadata
from .items import open_item
from .metadata import METADATA, SavedState, SavedTensor, read_saved
from .metadata_walk import ItemRange
from .metadata_writing import metadata_of
from .rank_file import ChunkBytes, RankFile, Sums

_LEAST_ITEM = 1000  # bytes of the smallest item
_MOST_LEAVES = 20_000_000


def plan_write(draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
    """Plan to write a draft, which must be a dict."""
    fill(draft)
    found = flatten(draft, most_leaves(options))
    duplicates = _duplicates(found.leaves)
    if duplicates and options.shared == "error":
        raise RefusedError(
            f"{duplicates[0]!r} shares its bytes with another tensor, and they would be written "
            "under each name"
        )
    layout = _Layout(draft, options.ranks)
    for leaf in found.leaves:
        layout.add(leaf)
        if options.most_nbytes is not None and layout.values_nbytes > options.most_nbytes:
            raise TooLong
    saved, sums = layout.saved, layout.sums
    metadata = metadata_of(saved, layout.requires_grad)
    plans = {each.name: each.plan() for each in layout.files if each.end}
    checksums = tuple(sums.of_sources())
    if checksums:
        name, last = next(reversed(plans.items()))  # by then everything was read, usually in order
        plans[name] = last._replace(source_checksums=(*last.source_checksums, *checksums))
    pieces = Pieces()
    pieces.write(0, metadata)
    plans[METADATA] = assemble(len(metadata), pieces)
    values, inner = layout.values, dict(layout.inner)

    def check(files: Mapping[str, Readable]) -> None:
        _check(files, metadata, saved, values, inner)

    sources = draft.sources
    return WritePlan(
        plans,
        len(saved.tensors),
        {},
        tuple(duplicates),
        check,
        emit(List([leaf.node for leaf in found.leaves if leaf.stored is None])),
        warnings=found.warnings(),
        prove=lambda: sums.prove(sources),
    )


def most_leaves(options: WriteOptions) -> int:
    """The most tensors and values that the folder may have."""
    return _MOST_LEAVES if options.most_nbytes is None else options.most_nbytes // _LEAST_ITEM


class _Layout:
    """The items at their offsets, in the files of the ranks."""

    def __init__(self, draft: CheckpointGraph, ranks: int) -> None:
        self.draft = draft
        self.sums = Sums()
        self.files = [RankFile(f"__{n}_0.distcp", self.sums) for n in range(ranks)]
        self.saved = SavedState()
        self.requires_grad: dict[str, bool] = {}
        self.values: dict[str, bytes] = {}  # the items of values without tensors
        self.values_nbytes = 0  # bytes of all values, which are held in memory
        self.inner: dict[str, WritePlan] = {}  # the plans of values with tensors
        self._least = [(0, n) for n in range(ranks)]

    def add(self, leaf: Leaf) -> None:
        """Add a tensor or value to the file where it belongs."""
        self.saved.paths[leaf.name] = leaf.keys
        if leaf.view is None or leaf.stored is None:
            self.saved.blobs[leaf.name] = self.value(leaf)
            return
        view = leaf.view
        nbytes = nbytes_of(Box((), view.shape).numel, view.dtype)
        check_expanded(leaf.name, nbytes, leaf.stored)
        boxes = divide_rows(view.shape, len(self.files))
        chunks: dict[Box, ItemRange] = {}
        for n, box in enumerate(boxes):
            file = self.files[n] if len(boxes) > 1 else self.files[self.emptiest()]
            at = file.end
            rows = box.offsets[0] * view.stride[0] if view.shape else 0
            part = view._replace(shape=box.sizes, offset=view.offset + rows)
            frame = tensor_frame(view.dtype, box.sizes, nbytes_of(box.numel, view.dtype))
            file.add_tensor(frame, ChunkBytes(leaf.stored, part))
            chunks[box] = ItemRange(file.name, at, frame.nbytes)
        self.saved.tensors[leaf.name] = SavedTensor(view.dtype, view.shape, chunks)
        if leaf.requires_grad:
            self.requires_grad[leaf.name] = True

    def value(self, leaf: Leaf) -> ItemRange:
        file = self.files[self.emptiest()]
        at = file.end
        if any(isinstance(each, Persistent) for each in nodes_of(leaf.node)):
            graph = copy.copy(self.draft.graph)
            graph.root = leaf.node
            within = replace(self.draft, graph=graph, metadata={})
            writing = self.inner[leaf.name] = TorchZip().plan_write(within, WriteOptions(STEM))
            file.add_plan(writing.files[""])
        else:
            item = self.values[leaf.name] = value_item(emit(leaf.node))
            file.add_bytes(item)
        self.values_nbytes += file.end - at
        return ItemRange(file.name, at, file.end - at)

    def emptiest(self) -> int:
        """The number of the smallest file; the first of several."""
        while True:
            end, n = self._least[0]
            if end == self.files[n].end:
                return n
            heapq.heapreplace(self._least, (self.files[n].end, n))


def divide_rows(shape: tuple[int, ...], ranks: int) -> list[Box]:
    """The boxes of the ranks that get rows of a tensor; one box if it can't be divided."""
    count = shape[0] if shape and 0 not in shape else 0
    step = -(-count // ranks) or 1
    rest = (0,) * (len(shape) - 1)
    return [
        Box((at, *rest), (min(step, count - at), *shape[1:])) for at in range(0, count, step)
    ] or [Box((0,) * len(shape), shape)]


def _duplicates(leaves: Sequence[Leaf]) -> list[str]:
    """The names of tensors that share bytes with another tensor whose name comes first."""
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for n, (_, _, _, stored, view, _) in enumerate(leaves):
        if stored is not None and view is not None and 0 not in view.shape:
            end = reach_of(view.shape, view.stride, view.offset, view.dtype)
            start = view.offset * nbytes_of(1, view.dtype)
            spans.setdefault(stored.id, []).append((start, end, n))
    found = set[int]()
    for span in spans.values():
        span.sort()
        reached, owner = -1, -1
        for start, end, n in span:
            if start < reached:
                found.add(max(n, owner))
                owner = min(n, owner)
            else:
                owner = n
            reached = max(reached, end)
    return [leaves[n].name for n in sorted(found)]


def _check(
    files: Mapping[str, Readable],
    metadata: bytes,
    saved: SavedState,
    values: Mapping[str, bytes],
    inner: Mapping[str, WritePlan],
) -> None:
    """Raises WriteError unless a written folder can be read and has the planned contents."""
    index = files[METADATA]
    if index.read(0, index.nbytes) != metadata:
        raise WriteError("the written folder has another .metadata than planned")
    told = read_saved(walk_metadata(metadata, Boundless()).root)
    if (told.tensors, told.blobs, told.paths) != (saved.tensors, saved.blobs, saved.paths):
        raise WriteError("the written .metadata says something else than planned")
    nearby = NearbyFiles()
    for name, tensor in saved.tensors.items():
        for box, span in tensor.chunks.items():
            source = files[span.file]
            assert isinstance(source, Source)
            open_item(source, span, name, tensor, box, nearby)
    for name, span in saved.blobs.items():
        window = files[span.file].window(span.at, span.nbytes)
        if name in inner:
            inner[name].check({"": window})
        elif window.read(0, window.nbytes) != values[name]:
            raise WriteError(f"the written folder has another {name!r:.100} than planned")
