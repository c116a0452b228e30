"""A zip whose records are checkpoints, or JSON that describes tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from ...errors import CorruptError, InputError
from ...manifest.dtypes import nbytes_of
from ...manifest.manifest import Extent, Section, Storage, TensorEntry
from ...manifest.paths import Path, spell
from ...plans.plan import Plan, apply_plan
from ...sources.source import Memory, Readable
from ...torch_pickle.streams import Container, LocationEdits
from ...torch_pickle.values.strided import MOST_DIMENSIONS, reach_of
from ...zips.amend import amend
from ...zips.archive import STORED, Archive
from ...zips.content import Content
from ...zips.layout import ALIGNMENT
from ...zips.members import Record
from ...zips.rewrite import rewrite
from ..session import ReadSession
from .documents import Changes, Document
from .zip_container import ArchiveContainer, content_of


class RecordView(NamedTuple):
    """A tensor over the raw bytes of a record; strides and offset are in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return nbytes_of(prod(self.shape), self.dtype)

    def entry(
        self,
        path: Path,
        storage: str | None,
        *,
        is_parameter: bool,
        requires_grad: bool,
        state_key: str | None = None,
    ) -> TensorEntry:
        """Its entry in a manifest; the name of a root is still empty."""
        return TensorEntry(
            path=path,
            name=spell(path) if path else "",
            section=Section.MODEL,
            kind="parameter" if is_parameter else "tensor",
            layout="strided",
            dtype=self.dtype,
            shape=self.shape,
            stride=self.stride,
            offset=self.offset,
            device=self.device,
            nbytes=self.nbytes,
            storage=storage,
            requires_grad=requires_grad,
            state_key=state_key,
        )


class RecordsContainer(ArchiveContainer):
    """A zip file that holds containers in its records."""

    def __init__(self, archive: Archive, session: ReadSession, *, by_torch: bool) -> None:
        """Check the layout; no record is read."""
        super().__init__(archive, session)
        self.parts: dict[str, Container] = {}  #: the containers, by the name of their record
        self.documents: dict[str, Document] = {}  #: the JSON documents, by the name of their record
        self.by_torch = by_torch  #: whether torch's own writer made the zip
        self.warnings += archive.oddities()

    def add(self, record: Record, path: Path, *, needed: bool) -> Container | None:
        """Open the checkpoint in a record; None if there is none and it is not `needed`."""
        try:
            container = (
                self.session.open(content_of(self.archive, record)) if record.nbytes else None
            )
        except InputError as error:
            raise type(error)(f"the record {record.name!r}: {error}", hint=error.hint) from error
        if container is not None:
            self.parts[record.name] = container
            self.roots += [((*path, *keys), root) for keys, root in container.roots]
        elif needed:
            raise CorruptError(f"the record {record.name!r} is no checkpoint")
        return container

    def add_raw(
        self, key: str, record: Record, view: RecordView, where: str, *, fake: bool
    ) -> None:
        """Add the raw bytes of a record as a storage, of which a tensor is a view.

        If `fake`, an empty record stands for a tensor without data. `where` is for messages.
        """
        if len(view.shape) != len(view.stride) or len(view.shape) > MOST_DIMENSIONS:
            raise CorruptError(
                f"{where} has {len(view.shape)} sizes and {len(view.stride)} strides"
            )
        reach = reach_of(view.shape, view.stride, view.offset, view.dtype)
        if reach > record.nbytes and (record.nbytes or not fake):
            raise CorruptError(f"{where} reaches outside the record {record.name!r}")
        if record.nbytes % nbytes_of(1, view.dtype):
            raise CorruptError(
                f"the record {record.name!r} has a size that is not a multiple of {view.dtype}"
            )
        known = self.storages.get(key)
        if known is not None and (known.location, known.dtype) != (view.device, view.dtype):
            raise CorruptError(f"the record {record.name!r} is described twice, differently")
        self.hold(key, record.name)
        extent = None
        if self.source.start is not None and record.method == STORED:
            extent = Extent(self.source.start + self.archive.data_at(record), record.nbytes)
        self.storages[key] = Storage(key, view.device, record.nbytes, view.dtype, extent)

    def read_document(self, record: Record) -> Document:
        """Read the JSON document in a record."""
        text = self.archive.read_parsed(record)
        self.documents[record.name] = Document(record.name, text)
        return self.documents[record.name]

    def record(self, name: str) -> Record:
        """The record of that name; CorruptError if it is missing."""
        found = self.archive.records.get(name)
        if found is None:
            raise CorruptError(f"the record {name!r} is missing")
        return found

    def container_records(self) -> set[str]:
        """The names of records that are containers."""
        return set(self.parts)

    def inner(self) -> Iterator[tuple[str, Container]]:
        return iter(self.parts.items())

    def content_to_compare(self, record: Record, no_devices: bool) -> Readable:
        document = self.documents.get(record.name)
        if document is None:
            return super().content_to_compare(record, no_devices)
        changes = self.without_devices(record.name) if no_devices else {}
        return Memory(document.with_values(changes), self.source.path)

    def without_devices(self, name: str) -> Changes:
        """The changes to a JSON document that remove its own device names."""
        return {}

    def everything(self) -> Iterator[Container]:
        """This container and all containers in it, at any depth."""
        yield self
        for part in self.parts.values():
            yield from part.everything()

    def plan(self, spelling: LocationEdits) -> Plan:
        """Patch a clone if all records can keep their lengths."""
        return self.plan_with(spelling, {})

    def plan_with(self, spelling: LocationEdits, changed: Mapping[str, bytes]) -> Plan:
        """Like `plan`, with new content in some records that are not checkpoints."""
        new: dict[str, Content] = dict(changed)
        for name, part in self.parts.items():
            plan = part.plan(spelling)
            if plan.method == "clone":
                continue
            source = part.source
            new[name] = apply_plan(plan, source.content) if isinstance(source, Memory) else plan
        if self.by_torch:
            return rewrite(self.archive, new, ALIGNMENT)
        return amend(self.archive, new)

    def frame(self, spelling: LocationEdits | None = None) -> object:
        """The names of the records, in order."""
        return list(self.archive.records)
