"""A checkpoint that was read: what it holds, and how its devices change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UnsupportedError, WriteError
from ..manifest.folder_files import NO_PART, FolderFile
from ..manifest.manifest import Manifest, Storage, TensorEntry
from ..manifest.other_records import HeldRecord, RecordKind
from ..manifest.paths import Path
from ..sources.budget import Budget
from ..sources.source import MAX_NBYTES, FetchStats, Memory, Readable, Source
from ..torch_pickle.listed_tensors import PickleContents
from ..torch_pickle.listing import contents_of
from ..torch_pickle.merged_contents import MergedContents, merge_contents
from ..torch_pickle.streams import Container, LocationEdits, PickleStream
from ..torch_pickle.tree import join_roots
from ..torch_pickle.unknown import unknown_callables_in, unknown_makers_in
from ..torch_pickle.values.tensors import device_text
from .file_shares import shares_of

if TYPE_CHECKING:
    from ..graph.canonical import Graph
    from ..graph.draft import CheckpointGraph
    from ..pickles.nodes import Call, Node
    from ..placement.place import Moves
    from ..plans.plan import Plan

_DIVIDED = ("DTensor", "ShardedTensor")  # the classes that hold one rank's part of a tensor


class Carries(NamedTuple):
    """What a format can store. Everything else is a loss, listed before anything is written."""

    #: The device of each tensor.
    devices: bool
    #: Tensors that share storages, and objects that are one and the same.
    aliases: bool
    #: Tensors that are not contiguous.
    strides: bool
    #: Objects other than tensors.
    objects: bool
    #: The dtypes it can store, in words.
    dtypes: str


class Folder(NamedTuple):
    """The folder that a user named, when the checkpoint is only a part of it."""

    path: str
    #: The name of the weights, without the part that states the format.
    stem: str
    #: Names of files that hold the same weights in another format.
    copies: tuple[str, ...] = ()
    #: Whether the folder has no other file named like a checkpoint, and none is missing.
    is_all: bool = False


class Checkpoint:
    """What a container holds, for any format; it can be read as long as its files are open."""

    #: Whether it is everything in a folder, a `FolderCheckpoint`.
    spans_folder = False
    #: The folder that holds it, if the user named the folder.
    folder: Folder | None = None
    #: What the user should know about how it was found.
    notes: Sequence[str] = ()
    #: Files in its folder that are named like checkpoints but are not part of it.
    left: Sequence[str] = ()

    def __init__(
        self,
        format: str,
        container: Container,
        carries: Carries,
        files: Sequence[Source] | None = None,
        indexes: Sequence[Source] = (),
    ) -> None:
        """`files` have the numbers that extents use; `indexes` only describe these files."""
        self.format = format
        self.container = container
        self.carries = carries
        if files is None:
            files = [container.source] if isinstance(container.source, Source) else []
        self.files = files
        self.sources = (*files, *indexes)
        self._spelled: tuple[Moves, LocationEdits] | None = None
        if container.streams:
            self.whole  # noqa: B018 (it may be refused)

    @property
    def is_from_folder(self) -> bool:
        """Whether the user named a folder, which may hold more than this checkpoint."""
        return bool(self.spans_folder or self.folder or self.left)

    @property
    def fetch_stats(self) -> FetchStats | None:
        """What was fetched from its files so far; None if all files are local."""
        parts = [source.fetch_stats for source in self.sources]
        away = [part for part in parts if part is not None]
        return FetchStats(*map(sum, zip(*away, strict=True))) if away else None

    def check_unchanged(self) -> None:
        """Raises CorruptError if one of its files was written to since it was opened."""
        for source in self.sources:
            source.check_unchanged()

    @cached_property
    def whole(self) -> MergedContents:
        """The pickles and storages of all its containers together."""
        return merge_contents(self.container)

    @cached_property
    def contents(self) -> PickleContents:
        """The contents of the pickles, and the nodes that spell devices."""
        return contents_of(self.container, self.whole)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint."""
        contents, container, whole = self.contents, self.container, self.whole
        names = [name.qualname for stream in whole.streams for name in stream.pickle.globals]
        names, tags = list(dict.fromkeys(names)), self._tags()
        storages = {**whole.storages, **contents.storages} if contents.storages else whole.storages
        unknown = unknown_callables_in(container)
        chunks = container.chunks(contents.tensors)
        shares, lies_in = shares_of(contents.tensors, storages, chunks, self.files)
        return Manifest(
            path=container.source.path,
            format=self.format,
            nbytes=container.nbytes,
            tensors=tuple(contents.tensors),
            storages=storages,
            file_shares=shares,
            lies_in=lies_in,
            values_naming_devices=tuple(contents.values),
            objects=dict(contents.objects),
            globals=tuple(names),
            unknown_callables=unknown,
            unknown_makers=unknown_makers_in(container, unknown),
            aliases=tuple(contents.aliases),
            capturable=tuple(contents.capturable),
            meshes=tuple(map(str, contents.meshes)),
            remotes=tuple(device_text(each) or "" for each in contents.remotes),
            records=tuple(held.record for held in self._records()),
            metadata=container.metadata,
            divisions=container.divisions(contents.tensors),
            mesh_shapes=tuple(
                dict.fromkeys(n for each in container.everything() for n in each.mesh_shapes)
            ),
            tags={
                each.name: tags[each.storage] for each in contents.tensors if each.storage in tags
            },
            warnings=(
                *self.notes,
                *dict.fromkeys((*self._warnings(), *contents.doubts.sentences())),
            ),
            writer=container.writer,
            tree=join_roots(container.roots),
            nested=self._nested(),
            files=self.files_left(),
        )

    def _tags(self) -> dict[str, tuple[str, ...]]:
        """Storage id → devices named in the rank files that the storage was assembled from."""
        found = (each.tags() for each in self.container.everything())
        return {key: said for tags in found for key, said in tags.items()}

    def _warnings(self) -> Iterator[str]:
        yield from (warning for each in self.container.everything() for warning in each.warnings)
        if self.class_of_parts is not None:
            yield (
                f"ranks divided its tensors ({self.class_of_parts}), and it may hold only the part "
                "of one rank: put the files of all ranks into one folder"
            )
        unread = sum(stream.unread for stream in self.container.streams)
        if unread:
            yield (
                f"{unread:,} of its byte strings look like checkpoints but can't be "
                "read; they stay as they are"
            )

    def _nested(self) -> dict[int, list[tuple[Path, Node]]]:
        """The contents of the nested checkpoints, each as one tree."""
        grafts = self.whole.grafts
        trees = {id(roots): join_roots(roots) for roots in grafts.values()}
        return {node: [((), trees[id(roots)])] for node, roots in grafts.items()}

    @cached_property
    def class_of_parts(self) -> str | None:
        """The class of its tensors that ranks divided, unless their parts were put together."""
        names = (each for stream in self.whole.streams for each in stream.pickle.globals)
        found = {each.name for each in names if each.module.startswith("torch.distributed.")}
        apart = all(each.tags_storages for each in self.container.everything())
        return min(found.intersection(_DIVIDED), default=None) if apart else None

    def plan_relocate(self, moves: Moves) -> Plan:
        """How to write it with other devices."""
        return self.container.plan(self.spelling(moves))

    def spelling(self, moves: Moves) -> LocationEdits:
        """The new spelling of the nodes that change with these moves; computed once per `moves`."""
        if self._spelled is None or self._spelled[0] is not moves:
            self._spelled = moves, self._spelling(moves)
        return self._spelled[1]

    def _spelling(self, moves: Moves) -> LocationEdits:
        spelling, contents = LocationEdits(), self.contents
        for container in self.container.everything():
            for each in container.ids.values():
                moved = moves.storages.get(each.id)
                if moved is not None:
                    spelling.spell(each.location, moved)
        for n, device in moves.tensors.items():
            for node in contents.spelled[n]:
                spelling.spell(node, device)
        for n, kind in moves.meshes.items():
            spelling.spell(contents.meshes[n], kind)
        for n, device in moves.remotes.items():
            spelling.spell(contents.remotes[n], device)
        for n, device in moves.values.items():
            spelling.spell(contents.value_nodes[n], device)
        return spelling

    def _within(self) -> Iterator[tuple[str, Container]]:
        """Each of its containers, with the prefix of the names of its records."""
        todo, met = [("", self.container)], set[int]()
        while todo:
            prefix, container = todo.pop()
            if id(container) not in met:
                met.add(id(container))
                yield prefix, container
                inner = [(f"{prefix}{name}/", each) for name, each in container.inner()]
                todo += reversed(inner)

    def _records(self) -> Iterator[HeldRecord]:
        for prefix, container in self._within():
            for held in container.records():
                name = f"{prefix}{held.record.name}"
                yield held._replace(record=held.record._replace(name=name))

    def draft(self, *, nested: bool = False, program: bool = False) -> CheckpointGraph:
        """The contents, to be written in another format; the checkpoint can't be used afterwards.

        `nested` also opens bytes that hold checkpoints, to compare them. `program` keeps everything
        that is saved of a program, not only a state dict of its tensors.
        """
        from ..graph.draft import CheckpointGraph
        from ..reports.convert import Loss
        from .storage_bytes import bytes_of_part, stored_bytes

        container = self.container
        storages, origins = self.whole.storages, self._origins()
        graph = self.graph(nested=nested, program=program)
        records = [held for held in self._records() if not held.in_tree]
        tags = self._tags()
        beside = list(dict.fromkeys(each.beside for each in container.everything() if each.beside))
        stored = {
            key: bytes_of_part(key, graph.cut[key], origins, storages)
            if key in graph.cut
            else stored_bytes(origins[key], storages[key])
            for key in graph.storages
        }
        packed = sum(len(each.content or b"") for each in stored.values())
        if packed > MAX_NBYTES:
            raise UnsupportedError(
                f"{packed:,} bytes of its storages are compressed: too many to hold in memory",
                hint="unpack it and save it again",
            )
        blobs = self._blobs()
        warnings = [*self.notes, *dict.fromkeys(self._warnings()), *_parts_cut(graph)]
        untagged = {
            key: ", ".join(tags.get(key, ()))
            for each in container.everything()
            if not each.tags_storages
            for key in each.storages
        }
        runs = self._runs()
        self._forget()
        return CheckpointGraph(
            path=container.source.path,
            format=self.format,
            origin=self,
            graph=graph,
            stored=stored,
            untagged=untagged,
            sources=self.sources,
            section=container.section,
            blobs=blobs,
            metadata=container.metadata,
            losses=[Loss(f"<{each}>", "cannot be stored in other formats") for each in beside]
            + [
                Loss(f"<record {held.record.name}>", "cannot be stored in other formats")
                for held in records
                if held.record.kind is RecordKind.DATA
            ],
            records=records,
            beside=beside,
            warnings=warnings,
            runs=runs,
            bytecode=container.bytecode,
        )

    def files_left(self) -> tuple[FolderFile, ...]:
        """The files in its folder that are named like checkpoints but were not read."""
        return tuple(FolderFile(name, not_read=NO_PART) for name in self.left)

    def _forget(self) -> None:
        """Release what the draft holds in its own form: there may be very many tensors."""
        for each in list(self.container.everything()):
            each.streams, each.ids, each.storages = [], {}, {}
        for name in ("whole", "contents", "manifest"):
            vars(self).pop(name, None)

    def _runs(self) -> frozenset[str] | None:
        """The unknown callables that loading would run; None if it may run any callable it names.

        If loaders run nothing in some of the files (`inert`), these are only the callables of the
        other files and of the checkpoints nested in those.
        """
        if self.container.inert:
            return frozenset()
        every = list(self.container.everything())
        within = {
            id(nested.container)
            for each in every
            for stream in each.streams
            for nested in stream.nested
        }
        files = [each for each in every if id(each) not in within]
        if not any(each.inert for each in files):
            return None
        run = (each for file in files if not file.inert for each in Container.everything(file))
        return frozenset(name for each in run for name in each.unknown_callables())

    def graph(self, *, nested: bool = False, program: bool = False) -> Graph:
        """The contents in canonical form; the arguments are those of `draft`."""
        _, ids, storages, _, tensors = self.whole
        if self.container.program and not program:
            from ..graph.program_tensors import state_dict

            return state_dict(self.manifest, self.contents.nodes, ids, tensors)
        from ..graph.canonical import canonical

        within = self._nested_trees() if nested else {}
        raw = self.raw() if program else ()
        tree = join_roots(self.container.roots)
        graph = canonical(tree, ids, tensors, storages, self._blobs(), within)
        if raw:
            nodes = [(each.path, _raw_tensor(graph, each, storages)) for each in raw]
            graph.root = join_roots([((), graph.root), *nodes])
        return graph

    def _nested_trees(self) -> dict[int, Node]:
        """Each nested checkpoint as one tree, except where the bytes only hold a storage."""
        all_nested = [nested for stream in self.whole.streams for nested in stream.nested]
        containers = {id(nested.container): nested.container for nested in all_nested}
        trees = {known: join_roots(each.roots) for known, each in containers.items()}
        return {id(nested.maker): trees[id(nested.container)] for nested in all_nested}

    def raw(self) -> Sequence[TensorEntry]:
        """The tensors of a program that no pickle names, those with bytes."""
        return ()

    def _blobs(self) -> dict[int, Readable]:
        """The byte strings that are not held in memory."""
        found: dict[int, Readable] = {}
        for each in self.container.everything():
            found.update(each.blobs)
        for stream in self.whole.streams:
            found.update((id(blob), window) for blob, window in stream.passed_over())
        return found

    def _origins(self) -> dict[str, Container]:
        """Storage id → the container that holds it."""
        return {key: each for each in self.container.everything() for key in each.storages}

    def damage(self, report: Callable[[int], object]) -> Iterator[str]:
        """The damage that the checkpoint's own checksums show, one sentence each.

        `report` is called with how many bytes were read since its last call.
        """
        for each in self.container.everything():
            yield from each.damage(report)

    def check_relocated(self, other: Checkpoint, moves: Moves) -> None:
        """Compare with the written file: WriteError if they differ in more than the moves."""
        from .relocation_check import check_container

        if other.format != self.format:
            raise WriteError("the written file has another format than the source")
        check_container(self.container, other.container, self.spelling(moves), moves)

    def check_patched(self, written: Source, moves: Moves) -> bool:
        """Like `check_relocated`, but reads only the pickles.

        False if the file can't be checked so. For a copy that differs from the source only in its
        pickles. The copy is not opened as a checkpoint: all its other bytes are unchanged, so its
        records are at the same offsets.
        """
        pickles = None if len(self.whole.streams) != 1 else self.container.patched_pickles(written)
        if pickles is None:
            return False
        (old,), (new,), spelling = self.whole.streams, pickles, self.spelling(moves)
        if old.is_respelled(new, spelling):
            return True
        from .relocation_check import difference_in

        walked = PickleStream(Memory(new.read(0, new.nbytes), written.path), 0, 0, Budget())
        found = difference_in(old, walked, spelling)
        if found is not None:
            raise WriteError(f"the written file differs from the source in {found}")
        return True


def _raw_tensor(graph: Graph, entry: TensorEntry, storages: Mapping[str, Storage]) -> Call:
    """A node for a tensor that is saved as raw bytes."""
    assert entry.storage is not None
    held = storages[entry.storage]
    storage = graph.storage(held.id, held.dtype, held.nbytes, held.location)
    return graph.tensor(
        storage,
        entry.dtype,
        entry.shape,
        entry.stride,
        entry.offset,
        requires_grad=entry.requires_grad,
    )


def _parts_cut(graph: Graph) -> Iterator[str]:
    if graph.cut:
        n = len(graph.cut)
        each = "part of a storage is used as a storage: it becomes"
        if n > 1:
            each = "parts of storages are used as storages: each becomes"
        yield f"{n:,} {each} a separate storage"
