"""fsdp-ranks: a folder in which each rank saved its own part with torch.save: verl, FSDP1, FSDP2.

    model_world_size_4_rank_0.pt, …            see `rank_groups`
    optim_world_size_4_rank_0.pt, …
    extra_state_world_size_4_rank_0.pt, …      scheduler and RNG states: those of each rank stay

Tensors whose place is given in each file (`placement`) are assembled; the parts must tile them
exactly. Values that all ranks have in common are taken once. If a whole tensor, such as a buffer,
or a value differs, that of the first rank is used, with a warning. If nothing is divided but
tensors differ, they can't be merged, and the folder is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...display.phrases import join_names, plural
from ...errors import CorruptError, InputError, UnsupportedError
from ...graph.canonical import Graph
from ...graph.traversal import replace_nodes
from ...manifest.dtypes import BITS, nbytes_of
from ...manifest.manifest import Extent, Section, Storage, TensorEntry
from ...manifest.other_records import Chunk
from ...pickles.nodes import Node, Persistent
from ...plans.plan import Proof
from ...sources.joined import JoinedFiles, Strip
from ...sources.source import Memory, Source
from ...torch_pickle.values.strided import contiguous_stride, is_contiguous
from ..base import Format
from ..checkpoint import Carries, Checkpoint
from ..folders.layouts import NameMeaning, layout_of, says
from ..folders.parts import ALL_RANKS, number_files
from ..folders.run_folders import LIKE_CHECKPOINTS
from ..probe import Probe
from .alike import Alike
from .boxes import Box, check_tiling, division_of
from .dcp.items import strip_of
from .dcp.metadata import SavedTensor
from .deepspeed.folder import open_file, tell_devices, tell_others
from .divided_tensor import RankPart
from .part_of_rank import check_has_all_parts
from .rank_groups import CONFIGURED, RankGroup, files_beside, is_of_ranks, rank_groups, serves
from .saved_file import MergedContainer, SavedFile, TensorPiece, check_names, keep_what_is_used

_MOST_NAMED = 5
_FLAT = re.compile(r"(?:.*\.)?_?flat_param(?:_\d+)?")
_OF_EACH = "extra_state"


class FsdpRanks(Format):
    """The format of ranks' files that themselves give the place of their parts."""

    name = "fsdp-ranks"
    summary = "`torch.save` on each rank: verl and others with FSDP1, FSDP2 or DTensor"
    refused = (
        "folders that lack files of ranks; parts that do not tile their tensor; tensors that "
        "differ and do not say how they are divided; flat parameters (`LOCAL_STATE_DICT`)"
    )
    carries = Carries(False, True, False, objects=True, dtypes="all of torch")
    in_parts = True

    def sniff(self, probe: Probe) -> bool:
        """Whether the only files in the folder that may hold tensors are files of ranks."""
        return probe.is_folder and is_of_ranks(probe.entries.keys())

    def read(self, probe: Probe) -> Checkpoint:
        """Read the files of all ranks."""
        groups = checked_groups(probe)
        names = [name for group in groups for name in group.files.values()]
        beside = files_beside(probe.entries)
        tell_others(probe, [*names, *beside, *_configuration(probe)])
        files, base = dict[str, SavedFile](), probe.session.folder()
        for n, name in enumerate(names, 1):
            files[name] = open_file(probe, name, n, base)
        check_names(files.values())
        tell_devices(probe, files.values())
        container = RanksContainer(probe.path, groups, files, base)
        sources = [container.joined, *(each.source for each in files.values())]
        layout = layout_of(probe.entries)
        for name in beside:
            sources += container.add_beside(probe, name, says(name, layout), len(sources))
        return Checkpoint(self.name, container, self.carries, sources)


def _configuration(probe: Probe) -> list[str]:
    """The configuration files of verl, unless there are weights among them."""
    start = f"{CONFIGURED}/"
    if CONFIGURED in probe.entries:
        below = (name for name in probe.names_below() if name.startswith(start))
        if any(name.endswith(LIKE_CHECKPOINTS) for name in below):
            return ["fsdp_config.json"]
    return [CONFIGURED, "fsdp_config.json"]


def checked_groups(probe: Probe) -> list[RankGroup]:
    """The groups of a folder; InputError if files of ranks are known to be missing."""
    groups = rank_groups(probe.entries)
    for group in groups:
        beyond = [rank for rank in group.files if group.world is not None and rank >= group.world]
        if beyond:
            name = group.files[beyond[0]]
            raise CorruptError(f"has {name}, of more ranks than it says", path=probe.path)
        if group.absent:
            missing = join_names([group.name_of(rank) for rank in group.absent], _MOST_NAMED)
            raise InputError(
                f"files of ranks are missing: {missing:.120}", path=probe.path, hint=ALL_RANKS
            )
    worlds = {group.stem: len(group.files) for group in groups}
    if len(worlds) < len(groups):
        raise CorruptError(
            "has files of ranks that differ in suffix: of two saves", path=probe.path
        )
    if len(set(worlds.values())) > 1:
        told = join_names([f"{stem}: {n:,}" for stem, n in worlds.items()], _MOST_NAMED)
        raise CorruptError(f"has files of different numbers of ranks ({told})", path=probe.path)
    return groups


class _Whole(NamedTuple):
    """A tensor with the pieces that ranks have of it."""

    tensor: SavedTensor
    #: the pieces with elements, each with its rank and file
    pieces: Mapping[Box, tuple[int, SavedFile, TensorPiece]]

    def strips(self) -> Sequence[Strip]:
        """The strips that fill its bytes."""
        return [strip_of(each.item, self.tensor, box) for box, (_, _, each) in self.pieces.items()]

    def tags(self) -> tuple[str, ...]:
        """The device tags of the files that hold parts of it."""
        return tuple(dict.fromkeys(each.tag for _, _, each in self.pieces.values()))


class RanksContainer(MergedContainer):
    """The files of all ranks."""

    def __init__(
        self, path: str, groups: Sequence[RankGroup], files: Mapping[str, SavedFile], base: str
    ) -> None:
        """`base`: the prefix of storage ids."""
        super().__init__(Memory(b"", path), {name: each.container for name, each in files.items()})
        self.joined, self._base = JoinedFiles(path), base
        self._graph = Graph(None)
        self._wholes: dict[str, _Whole] = {}
        self._known: dict[tuple[object, ...], Node] = {}
        self._stored: dict[tuple[object, ...], Persistent] = {}
        merged = [
            (group, Alike({rank: files[name] for rank, name in group.files.items()}))
            for group in groups
        ]
        is_placed = any(each.placed for _, each in merged)
        for group, alike in merged:
            self._add(group, alike, is_only=len(groups) == 1, is_placed=is_placed)
        self.mesh_shapes += dict.fromkeys(
            shape for _, each in merged for shape in each.mesh_shapes()
        )
        self.ids = self._graph.ids
        self.section = Section.OTHER
        self.writer = "torch"
        keep_what_is_used([root for _, root in self.roots], files.values())
        for each in files.values():
            number_files(each.container, each.number)

    # -- the tree ------------------------------------------------------------------------------

    def add_beside(
        self, probe: Probe, name: str, said: NameMeaning, number: int
    ) -> Sequence[Source]:
        """Add the contents of another file.

        `number` is that of its first source. Returns its sources.
        """
        probe.session.begin_file(self._base + name)
        found = probe.read(name)
        number_files(found.container, number)
        self.parts = {**self.parts, name: found.container}
        for path, root in found.container.roots:
            full = (*said.keys, *path)
            self.roots.append((full, root))
            if said.section is not Section.OTHER:
                self.sections[full] = said.section
        return found.files

    def _add(self, group: RankGroup, alike: Alike, *, is_only: bool, is_placed: bool) -> None:
        """Add the contents of the files of a group."""
        key, section = serves(group.stem) or (group.stem, Section.OTHER)
        path = () if is_only and section is Section.OTHER else (key or "rank",)
        differ = alike.tensors_that_differ
        if group.stem == _OF_EACH or (differ and not alike.placed and is_placed):
            for rank, file in alike.files.items():
                self.roots.append(((*path, rank), file.top))
            return
        if differ and not alike.placed:
            raise UnsupportedError(
                f"its ranks differ in {differ[0]!r:.80}, and no file says how ranks divide it, so "
                "they can't be merged",
                hint="convert or inspect each file by itself",
            )
        if alike.differ:
            self.warnings.append(
                f"ranks differ in {plural(len(alike.differ), 'value')} that are not divided; those "
                f"of rank {min(alike.files)} are read: {join_names(alike.differ, 3):.200}"
            )
        new = {id(node): self._whole(name, parts) for name, node, parts in alike.placed}
        for name, node, piece in alike.plain:
            new[id(node)] = self._of_pieces(
                name, SavedTensor(piece.dtype, piece.shape, {}), self._one(alike, piece)
            )
        self.roots.append((path, replace_nodes(next(iter(alike.files.values())).top, new)))
        self.sections[path] = section

    @staticmethod
    def _one(alike: Alike, piece: TensorPiece) -> dict[Box, tuple[int, SavedFile, TensorPiece]]:
        """The only piece of a tensor, from the first rank."""
        rank, file = next(iter(alike.files.items()))
        return {Box((0,) * len(piece.shape), piece.shape): (rank, file, piece)}

    def _whole(self, name: str, parts: Mapping[int, tuple[SavedFile, Sequence[RankPart]]]) -> Node:
        """A tensor that is divided among ranks."""
        if _FLAT.fullmatch(name):
            raise UnsupportedError(
                f"holds the flat parameter {name!r:.80} (LOCAL_STATE_DICT): only the model's code "
                "knows which parameters lie in it",
                hint="save with SHARDED_STATE_DICT or FULL_STATE_DICT",
            )
        shapes = {part.shape for _, found in parts.values() for part in found}
        if len(shapes) != 1:
            raise CorruptError(f"ranks differ in the shape of {name!r:.100}: of two saves")
        (shape,) = shapes
        pieces: dict[Box, tuple[int, SavedFile, TensorPiece]] = {}
        dtypes = set[str]()
        for rank, (file, found) in parts.items():
            for part in found:
                piece = file.piece(part.local)
                if piece is None:
                    raise UnsupportedError(
                        f"the part of {name!r:.100} is not a plain tensor", path=file.source.path
                    )
                dtypes.add(piece.dtype)
                if piece.shape != part.box.sizes and part.by_strides:
                    raise UnsupportedError(
                        f"{name:.100} is divided in strides, unevenly, and not as FSDP2 does: "
                        "no file says where its parts are",
                        path=file.source.path,
                    )
                if piece.shape != part.box.sizes:
                    raise CorruptError(
                        f"the part of {name!r:.100} has another shape than its placement says",
                        path=file.source.path,
                    )
                known = pieces.setdefault(part.box, (rank, file, piece))
                if known[2] is not piece and file.differs(piece, known[2]):
                    self.warnings.append(
                        f"ranks {known[0]} and {rank} should have the same part of {name:.100}, "
                        "and differ: that of the former is read"
                    )
        if len(dtypes) > 1:
            raise CorruptError(f"ranks differ in the dtype of {name!r:.100}: of two saves")
        try:
            filled = check_tiling(name, shape, list(pieces))
        except CorruptError:
            check_has_all_parts(file.container for file, _ in parts.values())
            raise
        tensor = SavedTensor(dtypes.pop(), shape, {})
        return self._of_pieces(name, tensor, {box: pieces[box] for box in filled})

    def _of_pieces(
        self,
        name: str,
        tensor: SavedTensor,
        pieces: Mapping[Box, tuple[int, SavedFile, TensorPiece]],
    ) -> Node:
        """The tensor made of these pieces; two names of the same pieces stay one tensor."""
        held = ((each.number, piece.item.at, box) for box, (_, each, piece) in pieces.items())
        key = (tensor.dtype, tensor.shape, places := tuple(held))
        if not places or key not in self._known:
            dtype, shape, stride = tensor.dtype, tensor.shape, contiguous_stride(tensor.shape)
            node = self._storage(name, _Whole(tensor, pieces))
            self._known[key] = self._graph.tensor(node, dtype, shape, stride, 0)
        return self._known[key]

    def _storage(self, name: str, whole: _Whole) -> Persistent:
        """The storage of a tensor; tensors that view one piece in several shapes share it."""
        dtype, numel = whole.tensor.dtype, sum(box.numel for box in whole.pieces)
        key: tuple[object, ...] = (len(self._wholes),)
        if numel and len(whole.pieces) == 1:
            [(_, file, piece)] = whole.pieces.values()
            if is_contiguous(piece.shape, piece.item.stride):
                key = (dtype, file.number, piece.item.at, numel)
        if key not in self._stored:
            nbytes = nbytes_of(numel, dtype)
            at = self.joined.add(nbytes, whole.strips)
            id = f"{self._base}{len(self._wholes)}/{name}"
            self._wholes[id] = whole
            self.storages[id] = Storage(id, "cpu", nbytes, dtype, Extent(at, nbytes))
            self._stored[key] = self._graph.storage(id, dtype, nbytes, "cpu")
        return self._stored[key]

    # -- the bytes -----------------------------------------------------------------------------

    def proofs(self, storage: str) -> Sequence[Proof]:
        """The checksums of the records that contain its pieces."""
        whole, found = self._wholes[storage], list[Proof]()
        pairs = zip(whole.pieces.values(), whole.strips(), strict=True)
        for (_, _, piece), strip in pairs:
            if piece.proof is not None and strip.source is piece.item.source:
                is_all = piece.item.nbytes == piece.proof.nbytes and not strip.counts
                found.append(piece.proof._replace(at=strip.at if is_all else None))
        return found

    def divisions(self, tensors: Sequence[TensorEntry]) -> dict[str, str]:
        return {
            each.name: self._division(self._wholes[each.storage])
            for each in tensors
            if each.storage in self._wholes
        }

    @staticmethod
    def _division(whole: _Whole) -> str:
        if len(whole.pieces) > 1:
            return division_of(whole.tensor.shape, list(whole.pieces))
        return next((f"one copy, rank {rank}" for rank, _, _ in whole.pieces.values()), "one copy")

    def chunks(self, tensors: Sequence[TensorEntry]) -> Iterator[Chunk]:
        for each in tensors:
            whole = self._wholes.get(each.storage or "")
            width = BITS[each.dtype] // 8
            for box, (rank, file, _) in whole.pieces.items() if whole is not None else ():
                yield Chunk(each.name, *box, file.name, rank, box.numel * width)
