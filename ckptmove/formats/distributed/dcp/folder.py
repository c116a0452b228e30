"""dcp: a folder that torch.distributed.checkpoint wrote: FSDP, torchtitan, Lightning, `dcp.save`.

    .metadata                  what is saved, and where: see `metadata`. It is written last
    __0.metadata, …            instead, one of each rank, if the ranks saved without collectives
    __RANK_N.distcp            items one after the other: see `items`

A tensor consists of chunks, in items of any rank; it is read as one contiguous storage. Every other
value is a separate item. The tree is that of the state dict, as far as it was kept: see `tree`.
Devices, meshes and the number of ranks are not stored. Lightning (`meta.pt`) and Megatron
(`common.pt`) save undivided data in a file beside the items; its keys are added to the others.

Source: torch/distributed/checkpoint/filesystem.py (torch 2.1 to 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ....display.phrases import few, join_names, quote
from ....errors import CorruptError, InputError, UnsupportedError
from ....graph.canonical import Graph
from ....graph.draft import CheckpointGraph
from ....manifest.dtypes import BITS, nbytes_of
from ....manifest.manifest import Extent, Section, Storage, TensorEntry
from ....manifest.other_records import Chunk
from ....pickles.nodes import Dict, Node
from ....plans.plan import Plan, Proof
from ....reports.convert import Loss
from ....sources import Missing
from ....sources.joined import JoinedFiles, Strip
from ....sources.nearby import NearbyFiles
from ....sources.source import Memory, Source
from ....torch_pickle.streams import Container, LocationEdits
from ....torch_pickle.values.strided import contiguous_stride
from ....zips.archive import Archive
from ...base import WritableFormat
from ...checkpoint import Carries, Checkpoint
from ...folders.parts import ALL_RANKS, IncompleteError, PartsContainer, number_files
from ...probe import Probe
from ...torch.zip import TorchZipContainer
from ...writing import WriteOptions, WritePlan
from ..boxes import Box, check_tiling, division_of
from . import writing
from .equal_items import equal_tensors, same_files
from .flattening import flatten
from .items import Chunks, frame_of, item_faults, open_item, strip_of, value_in
from .metadata import METADATA, ReadMetadata, SavedState, SavedTensor, read_metadata
from .metadata_walk import ItemRange
from .packed import MOST_OPEN, PackedItem
from .saves import COMMON, check_common, check_ranks, check_saves, ranks_of
from .tree import tree_of

_ITEMS = ".distcp"
_LONGEST_RANK = 9  # digits
_BESIDE = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
#: Files beside the items that are parts of the state.
#: Sources: lightning/pytorch/strategies/fsdp.py; megatron/core/dist_checkpointing/strategies.
_COMMON = ("meta.pt", COMMON)
_OF_ITEMS = re.compile(r"__(\d+)_\d+\.distcp$")
_MOST_NAMED = 3


class Dcp(WritableFormat):
    """The format of torch.distributed.checkpoint."""

    name = "dcp"
    summary = "torch.distributed.checkpoint, torch 2.1 and newer: FSDP, torchtitan, Lightning, …"
    refused = (
        "to relocate it, since it carries no devices; chunks that do not tile their tensor; saves "
        "that did not finish; items that are compressed otherwise than by zstd"
    )
    carries = Carries(False, False, False, objects=True, dtypes="all of torch")
    in_parts = True
    folder_stem = ""
    shards = False
    annotates = False
    is_folder = True
    of_ranks = True
    item_nbytes = 1 << 11

    def sniff(self, probe: Probe) -> bool:
        """Whether a folder has metadata of DCP."""
        return probe.is_folder and (METADATA in probe.entries or bool(ranks_of(probe)))

    def read(self, probe: Probe) -> Checkpoint:
        """Read the metadata, and every item that is not a tensor."""
        if f"{METADATA}.tmp" in probe.entries:
            raise CorruptError(
                "a later save into it did not finish: .metadata does not describe its files",
                path=probe.path,
                hint="use another checkpoint",
            )
        names = [METADATA]
        if METADATA not in probe.entries:
            check_ranks(probe)
            names = ranks_of(probe)
        indexes = [probe.open(name).file for name in names]
        saved, metadata = SavedState(), list[ReadMetadata]()
        for index in indexes:
            metadata.append(read_metadata(index, probe.session.budget))
            saved.join(metadata[-1].saved)
        files = _open(probe, saved)
        check_common(probe)
        container = DcpContainer(probe, saved, files, metadata)
        sources = [container.joined, *files.values()]
        for name in _COMMON:
            if name in probe.entries:
                sources += container.add_beside(probe, name, len(sources))
        return Checkpoint(self.name, container, self.carries, sources, indexes)

    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        """Metadata strings, and keys that are not text."""
        losses = flatten(draft, writing.most_leaves(options)).losses
        if draft.metadata:
            named = ", ".join(map(repr, sorted(draft.metadata)))
            losses.append(Loss("<metadata>", f"has no place in a state dict ({named:.200})"))
        return losses

    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        """Plan a folder like `options.ranks` ranks would write."""
        return writing.plan_write(draft, options)


def _open(probe: Probe, saved: SavedState) -> dict[str, Source]:
    """The files with items, by name; CorruptError if one is too short, or if items overlap."""
    saved.check_apart()
    needed: dict[str, int] = {}
    for _, span in saved.items():
        needed[span.file] = max(needed.get(span.file, 0), span.at + span.nbytes)
    missing = [name for name in needed if name not in probe.entries]
    if missing:
        what = f"files {quote(missing)} are" if len(missing) > 1 else f"file {missing[0]!r} is"
        raise IncompleteError(f"its {what} missing", path=probe.path, hint=ALL_RANKS)
    files: dict[str, Source] = {}
    for name, nbytes in sorted(needed.items()):
        try:
            files[name] = probe.open(name).file
        except Missing as error:
            raise IncompleteError(f"its file {name!r} is missing", hint=ALL_RANKS) from error
        if files[name].nbytes < nbytes:
            raise IncompleteError(
                f"is truncated: it has {files[name].nbytes:,} of {nbytes:,} bytes, as after an "
                "interrupted upload",
                path=files[name].path,
                hint=ALL_RANKS,
            )
    return files


class DcpContainer(PartsContainer):
    """The items of all ranks."""

    tags_storages = False

    def __init__(
        self,
        probe: Probe,
        saved: SavedState,
        files: Mapping[str, Source],
        metadata: Sequence[ReadMetadata],
    ) -> None:
        self.saved = saved
        self.joined = JoinedFiles(probe.path)
        self._files = files
        self._number = {name: n for n, name in enumerate(files, 1)}
        self._metadata = metadata
        self._base = probe.session.folder()  # the prefix of the ids of storages
        # the chunks of each storage that are not empty
        self._chunks: dict[str, dict[Box, ItemRange]] = {}
        self._items: dict[str, Chunks] = {}
        self._nearby = NearbyFiles()
        self._strips: dict[str, Sequence[Strip]] = {}
        self._announced = False
        graph, parts = Graph(None), dict[str, Container]()
        leaves = list[tuple[tuple[str | int, ...], Node]]()
        storages: dict[str, Storage] = {}
        for name in saved.names:
            keys = saved.paths.get(name, (name,))
            tensor = saved.tensors.get(name)
            if tensor is None:
                part = self._part(probe, name, saved.blobs[name])
                parts[name] = part
                leaves.append((keys, part.roots[0][1]))
            else:
                stored = self._storage(name, tensor)
                storages[stored.id] = stored
                leaves.append((keys, self._tensor(graph, stored, tensor)))
        super().__init__(Memory(b"", probe.path), parts)
        self.storages = storages
        self.ids = graph.ids
        self.roots = [((), tree_of(leaves, graph, self.warnings))]
        self.section = Section.OTHER if parts else Section.MODEL
        self.writer = "torch.distributed.checkpoint"
        self._warn_of_others(probe)

    def add_beside(self, probe: Probe, name: str, number: int) -> Sequence[Source]:
        """Add the keys of another file to those of the items.

        If one of them exists already, all are added below the name of the file. `number` is the
        number of its first source among all; returns its sources.
        """
        probe.session.begin_file(self._base + name)
        found = probe.read(name)
        container = found.container
        number_files(container, number)
        self.parts = {**self.parts, name: container}
        trees = [node for _, node in self.roots if isinstance(node, Dict)]
        known = {str(key) for tree in trees for key, _ in tree.pairs}
        root = container.roots[0][1] if len(container.roots) == 1 else None
        pairs = root.pairs if isinstance(root, Dict) else ()
        keys = [str(key) for key, _ in pairs if isinstance(key, str)]
        if len(keys) == len(pairs) and keys and known.isdisjoint(keys):
            self.roots += [((str(key),), value) for key, value in pairs]
        else:
            stem = name.partition(".")[0]
            self.roots += [((stem, *path), each) for path, each in container.roots]
        return found.files

    def _part(self, probe: Probe, name: str, span: ItemRange) -> Container:
        """A value that is not a tensor, from its item."""
        file = self._files[span.file]
        try:
            window = value_in(file, span, probe.session.budget)
            part = TorchZipContainer(Archive(window, probe.session.budget), probe.session)
        except InputError as error:
            raise type(error)(
                f"the item of {name!r} at offset {span.at:,}: {error}",
                path=file.path,
                hint=error.hint,
            ) from error
        number_files(part, self._number[span.file])
        return part

    def _storage(self, name: str, tensor: SavedTensor) -> Storage:
        filled = check_tiling(name, tensor.shape, list(tensor.chunks))
        id = self._base + name
        self._chunks[id] = {box: tensor.chunks[box] for box in filled}
        nbytes = nbytes_of(sum(box.numel for box in filled), tensor.dtype)
        at = self.joined.add(nbytes, partial(self._strips_of, id))
        return Storage(id, "cpu", nbytes, tensor.dtype, Extent(at, nbytes))

    @staticmethod
    def _tensor(graph: Graph, stored: Storage, tensor: SavedTensor) -> Node:
        dtype, shape = tensor.dtype, tensor.shape
        node = graph.storage(stored.id, dtype, stored.nbytes, "cpu")
        return graph.tensor(node, dtype, shape, contiguous_stride(shape), 0)

    def _saved(self, storage: str) -> SavedTensor:
        return self.saved.tensors[storage.removeprefix(self._base)]

    def items_of(self, storage: str) -> Chunks:
        """The chunks of a tensor, with their items, which are opened at the first access."""
        found = self._items.get(storage)
        if found is None:
            name, files, nearby = storage.removeprefix(self._base), self._files, self._nearby
            tensor = self.saved.tensors[name]
            found = self._items[storage] = [
                (box, span, open_item(files[span.file], span, name, tensor, box, nearby))
                for box, span in self._chunks[storage].items()
            ]
        return found

    def _strips_of(self, storage: str) -> Sequence[Strip]:
        if storage in self._strips:
            return self._strips[storage]
        tensor = self._saved(storage)
        strips = [strip_of(item, tensor, box) for box, _, item in self.items_of(storage)]
        woven = [each for each in strips if isinstance(each.source, PackedItem) and each.is_woven]
        if len(woven) > MOST_OPEN:
            name = storage.removeprefix(self._base)
            raise UnsupportedError(
                f"{name:.100} is divided in {len(woven):,} columns or boxes that are compressed, "
                f"of which {MOST_OPEN} can be read at a time",
                hint="save it again without compression",
            )
        self._strips[storage] = strips
        return strips

    def proofs(self, storage: str) -> Sequence[Proof]:
        """The checksums of the chunks, from their items."""
        if not self._announced:  # the caller will ask for all of them
            self._announce()
            self._check_equal()
            self._announced = True
        found = list[Proof]()
        items, strips = self.items_of(storage), self._strips_of(storage)
        for (_, span, item), strip in zip(items, strips, strict=True):
            if item.crc32 and strip.source is item.source:
                said = f"{storage} in {span.file}"
                source = self._number[span.file]
                at = None if strip.counts else strip.at
                found.append(Proof(item.nbytes, item.crc32, said, source, item.at, at))
        return found

    def _announce(self) -> None:
        """Let remote files prefetch the bytes around the elements of all items."""
        around: dict[str, list[tuple[int, int]]] = {}
        for chunks in self._chunks.values():
            for span in chunks.values():
                if self._files[span.file].fetch_stats is not None:
                    around.setdefault(span.file, []).extend(frame_of(span))
        for name, ranges in around.items():
            self._files[name].expect(ranges)

    def _check_files(self) -> None:
        """Warn about ranks' files with the same items; CorruptError if one is surely a copy."""
        names = list(self._chunks)
        for said in same_files(self.saved, names, self.items_of, self._files, _rank):
            self._warn(said)

    def _warn(self, said: str) -> None:
        if said not in self.warnings:
            self.warnings.append(said)

    def _check_equal(self) -> None:
        """Warn about files, and about tensors, with the same bytes."""
        self._check_files()
        dtypes = {storage: self._saved(storage).dtype for storage in self._chunks}
        equal = [
            " = ".join(storage.removeprefix(self._base) for storage in storages[:_MOST_NAMED])
            for storages in equal_tensors(dtypes, self.items_of)
        ]
        if equal:
            named = join_names(equal, _MOST_NAMED)
            self._warn(f"have the same bytes, as tied weights do: {named:.300}")

    def damage(self, report: Callable[[int], object]) -> Iterator[str]:
        is_whole = True
        for storage in self._chunks:
            name, tensor = storage.removeprefix(self._base), self._saved(storage)
            most, faults = nbytes_of(Box((), tensor.shape).numel, tensor.dtype), list[str]()
            for span in dict.fromkeys(tensor.chunks.values()):
                faults += item_faults(self._files[span.file], span, name, most, report)
            try:
                if not faults:
                    self.items_of(storage)
            except (CorruptError, UnsupportedError) as error:
                faults.append(str(error))
            is_whole = is_whole and not faults
            yield from faults
        try:
            if is_whole:
                self._check_files()
        except (CorruptError, UnsupportedError) as error:
            yield str(error)

    def unknown_callables(self) -> Iterator[str]:
        for each in self._metadata:
            yield from each.unknown

    @property
    def nbytes(self) -> int:
        described = sum(each.nbytes for each in self._metadata)
        return described + sum(each.nbytes for each in self._files.values())

    @property
    def described_nbytes(self) -> int:
        """The size of the metadata, and of the pickles of values."""
        parts = sum(part.described_nbytes for part in self.parts.values())
        return parts + sum(each.nbytes for each in self._metadata)

    def inner(self) -> Iterator[tuple[str, Container]]:
        """None: the other records in the item of a value are only part of its frame."""
        return iter(())

    def divisions(self, tensors: Sequence[TensorEntry]) -> dict[str, str]:
        return {
            each.name: self._division(each.storage)
            for each in tensors
            if each.storage in self._chunks
        }

    def chunks(self, tensors: Sequence[TensorEntry]) -> Iterator[Chunk]:
        for each in tensors:
            width = BITS[each.dtype] // 8
            for box, span in self._chunks.get(each.storage or "", {}).items():
                where = span.file, _rank(span.file)
                yield Chunk(each.name, box.offsets, box.sizes, *where, box.numel * width)

    def _division(self, storage: str) -> str:
        """How a tensor is divided, or which rank saved it."""
        chunks = self._chunks[storage]
        if len(chunks) > 1:
            return division_of(self._saved(storage).shape, list(chunks))
        ranks = [_rank(span.file) for span in chunks.values()]
        return f"one copy, rank {ranks[0]}" if ranks and ranks[0] is not None else "one copy"

    def plan(self, spelling: LocationEdits) -> Plan:
        raise no_devices(self.source.path)

    def _warn_of_others(self, probe: Probe) -> None:
        """Warn about what another save may have left in the folder: files, bytes, `.metadata`."""
        stale = [
            name for name in probe.entries if name.endswith(_ITEMS) and name not in self._files
        ]
        if stale:
            more = f" and {len(stale) - 1:,} more" if len(stale) > 1 else ""
            self.warnings.append(f"{stale[0]}{more} is of another save: nothing refers to it")
        named = self.saved.paths.keys() - self.saved.tensors.keys() - self.saved.blobs.keys()
        if named:
            self.warnings.append(f"not saved, though .metadata names it: {few(sorted(named), 1)}")
        others = (name for name in probe.entries if name not in _COMMON)
        beside = sorted(name for name in others if name.endswith(_BESIDE))
        if beside:
            self.warnings.append(f"{join_names(beside, 3)} beside the items was not looked at")
            probe.leave(beside)
        sizes = {name: file.nbytes for name, file in self._files.items()}
        self.warnings += check_saves(
            self.saved, sizes, probe.entries, lambda name: self.items_of(self._base + name)
        )


def _rank(name: str) -> int | None:
    """The rank that wrote a file, according to its name."""
    found = _OF_ITEMS.match(name)
    return None if found is None or len(found[1]) > _LONGEST_RANK else int(found[1])


def no_devices(path: str) -> UnsupportedError:
    """The error that it can't be relocated."""
    return UnsupportedError(
        "is of torch.distributed.checkpoint, which stores no devices",
        path=path,
        hint="ckptmove convert --to writes a .pt file with devices",
    )
