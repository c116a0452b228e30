"""A checkpoint that will be written in another format: its graph, and the places of its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..manifest.dtypes import BITS
from ..manifest.manifest import Manifest, Section, Storage
from ..manifest.other_records import HeldRecord
from ..pickles.nodes import are_plain
from ..pickles.opcodes.mixed_rows import parts_of
from ..pickles.opcodes.plain_tensors import PlainTensor
from ..plans.plan import Checksum, Copy, Gather, Proof, SourceChecksum, Write
from ..sources.source import Memory, Readable, Source
from ..torch_pickle.listed_tensors import PickleContents
from ..torch_pickle.listing import contents_of
from ..torch_pickle.merged_contents import MergedContents
from ..torch_pickle.streams import Container
from ..torch_pickle.values.tensors import device_text
from .canonical import Graph
from .traversal import held_by, nodes_of

if TYPE_CHECKING:
    from ..reports.convert import Loss

_NBYTES_EACH = 8  # bytes of a pickle for each reference
_HELD_BY_TENSOR = 20  # objects that a compact tensor stands for


class StorageBytes(NamedTuple):
    """The bytes of a storage in the output, and their origin."""

    id: str
    #: its device tag in the output
    location: str
    #: None for an untyped storage
    dtype: str | None
    nbytes: int
    #: number of the source that has its bytes
    source: int = 0
    #: their offset in the source
    start: int = 0
    #: their checksum, if the source has one; 0 if not
    crc32: int = 0
    #: the bytes themselves, if no source has them in this form
    content: bytes | memoryview | None = None
    #: whether they are big-endian in the source
    big_endian: bool = False
    #: their dtype in the source, if it differs
    cast_from: str | None = None
    #: checksums of its parts, if the source joins several files
    proofs: Sequence[Proof] = ()

    @property
    def is_made(self) -> bool:
        """Whether the bytes differ from those of the source."""
        return self.big_endian or self.cast_from is not None

    @property
    def nbytes_before(self) -> int:
        """Its size in the source."""
        if self.cast_from is None or self.dtype is None:
            return self.nbytes
        return self.nbytes * BITS[self.cast_from] // BITS[self.dtype]


class View(NamedTuple):
    """The elements of a storage that a tensor shows; the fields are those of `strided.Tensor`."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False


class Pieces:
    """Collects the operations of a plan."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.writes: list[Write] = []
        self.gathers: list[Gather] = []
        self.checksums: list[Checksum] = []
        self._whole: set[str] = set()  # storages that are copied unchanged
        self._partly: dict[str, StorageBytes] = {}  # storages that are used in another way
        self._apart: list[Proof] = []  # rest of the copied ones

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write these bytes at an offset of the destination."""
        if data:
            self.writes.append(tuple.__new__(Write, (at, data)))

    def put(self, stored: StorageBytes, start: int, nbytes: int, at: int, dtype: str) -> None:
        """Put a range of a storage, converted if needed, at an offset of the destination.

        `dtype` is the type of its elements, if their bytes must be swapped.
        """
        if not nbytes:
            return
        if stored.is_made:
            count = nbytes * 8 // BITS[stored.dtype or dtype]
            view = View(dtype, (count,), (1,), start * 8 // BITS[stored.dtype or dtype])
            self.gather(stored, view, nbytes, at)
        elif stored.content is not None:
            self.write(at, stored.content[start : start + nbytes])
        else:
            source_at = stored.start + start
            self.copies.append(tuple.__new__(Copy, (source_at, nbytes, at, stored.source)))
            if nbytes != stored.nbytes:
                self._partly[stored.id] = stored
                return
            self._whole.add(stored.id)
            for proof in stored.proofs:
                self._prove(proof, stored, at)
            if stored.crc32:
                known = at, nbytes, stored.crc32, stored.id, source_at, stored.source
                self.checksums.append(tuple.__new__(Checksum, known))

    def _prove(self, proof: Proof, stored: StorageBytes, at: int) -> None:
        if proof.at is None:
            self._apart.append(proof)
            return
        where, source_at = at + proof.at, stored.start + proof.at
        self.checksums.append(
            Checksum(where, proof.nbytes, proof.crc32, proof.name, source_at, stored.source)
        )

    def gather(self, stored: StorageBytes, view: View, nbytes: int, at: int) -> None:
        """Put the elements of a view, in row-major order, at an offset of the destination."""
        before = stored.cast_from or view.dtype
        self._partly[stored.id] = stored
        self.gathers.append(
            Gather(
                at=at,
                nbytes=nbytes,
                source=stored.source,
                source_at=0 if stored.content is not None else stored.start,
                source_nbytes=stored.nbytes_before,
                dtype=before,
                shape=view.shape,
                stride=view.stride,
                offset=view.offset,
                conj=view.conj,
                neg=view.neg,
                big_endian=stored.big_endian,
                to=None if stored.cast_from is None else view.dtype,
                content=stored.content,
            )
        )

    @property
    def source_checksums(self) -> list[SourceChecksum]:
        """Return the source checksums of storages that are not copied as a whole."""
        partly = [each for key, each in self._partly.items() if key not in self._whole]
        found = [
            SourceChecksum(each.start, each.nbytes_before, each.crc32, each.id, each.source)
            for each in partly
            if each.crc32 and each.content is None
        ]
        proofs = [*self._apart, *(proof for each in partly for proof in each.proofs)]
        apart = (
            SourceChecksum(each.source_at, each.nbytes, each.crc32, each.name, each.source)
            for each in proofs
        )
        return [*found, *dict.fromkeys(apart)]  # a checksum may cover parts of many storages


class _Graph(Container):
    """Presents a graph like a file, to list its content."""

    @property
    def described_nbytes(self) -> int:
        """Return the approximate size of a pickle of it."""
        root, held = self.roots[0][1], 1
        tensors = {id(root)} if type(root) is PlainTensor else set[int]()
        for node in nodes_of(root, compact=False):
            if type(node) is not PlainTensor:
                inside = held_by(node)
                held += len(inside)
                if not are_plain(inside):
                    others = parts_of(inside)
                    tensors.update(id(each) for each in others if type(each) is PlainTensor)
        return _NBYTES_EACH * (held + _HELD_BY_TENSOR * len(tensors))


@dataclass(eq=False, repr=False)
class CheckpointGraph:
    """A checkpoint that will be written."""

    path: str
    format: str
    graph: Graph
    stored: dict[str, StorageBytes]
    sources: Sequence[Source]
    #: storages without a device in the source, with the storages of files that they are made of
    untagged: Mapping[str, str] = field(default_factory=dict)
    #: the section of its tensors if nothing else tells
    section: Section = Section.OTHER
    #: `id()` of bytes in the graph that were passed over → their place
    blobs: dict[int, Readable] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: content of the source that the graph does not hold
    losses: list[Loss] = field(default_factory=list)
    #: further content of the source that the graph does not show, to compare
    records: Sequence[HeldRecord] = ()
    #: content of the source that is missing here, in a few words each
    beside: Sequence[str] = ()
    warnings: list[str] = field(default_factory=list)
    #: the unknown callables that loading the source would run; None: all that it names
    runs: frozenset[str] | None = None
    #: as `streams.Container` has it
    bytecode: str = ""
    #: the checkpoint that it was taken from, no longer usable
    origin: object = None

    @property
    def source_nbytes(self) -> int:
        """The size of its source."""
        return sum(each.own_nbytes for each in self.sources)

    def release(self) -> None:
        """Release everything except the sources, once the writing is planned."""
        self.graph, self.stored, self.blobs = Graph(None), {}, {}
        self.records = ()  # they refer to the checkpoint's source
        if self.origin is not None:
            vars(self.origin).clear()

    def manifest(self) -> Manifest:
        """Return the manifest of the draft."""
        found = self.list_contents()
        return Manifest(
            path=self.path,
            format=self.format,
            nbytes=self.source_nbytes,
            tensors=tuple(found.tensors),
            storages={**self.storages, **found.storages},
            values_naming_devices=tuple(found.values),
            objects=dict(found.objects),
            aliases=tuple(found.aliases),
            capturable=tuple(found.capturable),
            meshes=tuple(map(str, found.meshes)),
            remotes=tuple(device_text(each) or "" for each in found.remotes),
            tree=self.graph.root,
        )

    def move(self, locations: Mapping[str, str]) -> None:
        """Tag storages with other devices: id → device."""
        for key, location in locations.items():
            stored = self.stored[key]._replace(location=location)
            self.stored[key] = stored
            self.graph.retype(key, stored.dtype, stored.nbytes, location)

    def number_of(self, window: Readable) -> int:
        """Return the number of the source that holds a part of a file."""
        return [id(each) for each in self.sources].index(id(getattr(window, "source", window)))

    def list_contents(self) -> PickleContents:
        """List the content of the graph, as for any checkpoint."""
        container = _Graph(Memory(b"", self.path))
        container.section = self.section
        container.roots = [((), self.graph.root)]
        found = contents_of(
            container,
            MergedContents([], self.graph.ids, {}, {}, {}),
            self.graph.recogniser,
            self.graph.storages,
        )
        for n, entry in enumerate(found.tensors if self.graph.sections else ()):
            section = self.graph.sections.get(entry.name, entry.section)
            if section is not entry.section:
                found.tensors[n] = entry._replace(section=section)
                found.mixed.add(id(self.graph.root))
        return found

    @property
    def storages(self) -> dict[str, Storage]:
        """The storages as entries of a manifest."""
        return {
            key: Storage(key, each.location, each.nbytes, each.dtype, None)
            for key, each in self.stored.items()
            if key in self.graph.storages
        }
