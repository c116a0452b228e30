"""A zip as torch lays it out: pickles in records, and one record for each storage.

All records are in one folder, `P`, that of the first directory entry. If the new content of a
pickle has the old length, a clone of the file is patched; otherwise the zip is laid out again, as
torch would do it. Source: caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ...errors import CorruptError, UnsupportedError
from ...manifest.manifest import Extent
from ...manifest.other_records import HeldRecord, OtherRecord, RecordKind
from ...sources.source import MAX_NBYTES, Memory, Readable
from ...torch_pickle.streams import Container, LocationEdits, PickleStream
from ...torch_pickle.values.persistent_ids import StorageId, storage_ids, storages_of
from ...zips.archive import DEFLATED, STORED, Archive
from ...zips.local_headers import check_layout
from ...zips.members import Record
from ..session import ReadSession

if TYPE_CHECKING:
    from ...plans.plan import Plan

_NAMES = ("data.pkl", "byteorder", "version", ".format_version", ".storage_alignment")
#: Records that only describe the layout of the file.
_FRAME = (*_NAMES[1:], ".data/version")
_NEWEST_VERSION = 10  # caffe2/serialize/versions.h, kMaxSupportedFileFormatVersion
_LARGEST_ALIGNMENT = 1 << 15  # the padding must fit an extra field


def prefix_of(archive: Archive) -> str:
    """The folder in which torch looks for all records: that of the first directory entry."""
    first = next(iter(archive.records), "")
    return first[: first.find("/") + 1]


class ArchiveContainer(Container):
    """A zip file with storages in records."""

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Check the layout; no record is read."""
        super().__init__(archive.source)
        self.archive = archive
        self.session = session
        self.folder = session.folder()  #: the prefix of the ids of its storages
        # storage id → the name of its record, unless that follows from the id
        self._named: dict[str, str] = {}
        self._is_storage = bytearray(len(archive.records))  # of each record
        check_layout(archive)
        session.budget.hold_storages(len(archive.records))

    def content(self, storage: str) -> bytes:
        record = self.archive.records[self.record_of(storage)]
        return self.archive.read(record, at_most=MAX_NBYTES)

    def hold(self, storage: str, name: str) -> None:
        """Note that a record holds a storage."""
        if name != self.usual_record(storage):
            self._named[storage] = name
        self._is_storage[self.archive.records.number(name)] = True

    def record_of(self, storage: str) -> str:
        """The name of the record that holds a storage."""
        return self._named.get(storage) or self.usual_record(storage)

    def usual_record(self, storage: str) -> str:
        """The name that the record of a storage usually has."""
        return storage[len(self.folder) :]

    def records(self) -> Iterator[HeldRecord]:
        for record, kind in self._others():
            found = OtherRecord(self.short(record), kind, record.nbytes)
            yield HeldRecord(found, partial(self.content_to_compare, record))

    def _others(self) -> Iterator[tuple[Record, RecordKind]]:
        """The records other than pickles, storages and those that only describe the layout."""
        read = self.container_records()
        for name, is_storage in zip(self.archive.records, self._is_storage, strict=True):
            if is_storage or name in read:
                continue
            record = self.archive.records[name]
            kind = self.kind_of(self.short(record))
            if kind is not None and not (name.endswith("/") and not record.nbytes):
                yield record, kind

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        yield from self._beside

    @cached_property
    def _beside(self) -> tuple[str, ...]:
        """The unknown callables in records that are not read here; other programs may load them."""
        others = (record for record, kind in self._others() if kind is RecordKind.DATA)
        return tuple(name for record in others for name in self.callables_in(record))

    def callables_in(self, record: Record) -> list[str]:
        """The unknown callables that a program would import if it unpickled a record."""
        where = f"the record {self.short(record)!r}"
        if not self.archive.may_be_parsed(record):
            return [f"(in {where})"]
        return self.session.callables_in(content_of(self.archive, record), where)

    def container_records(self) -> set[str]:
        """The names of records that are pickles or nested checkpoints."""
        return set()

    def short(self, record: Record) -> str:
        """The name of a record without the folder of all records."""
        return record.name

    def kind_of(self, name: str) -> RecordKind | None:
        """The purpose of a record, by its short name; None if it only describes the layout."""
        if name in _FRAME:
            return None
        return RecordKind.IDENTITY if name == ".data/serialization_id" else RecordKind.DATA

    def content_to_compare(self, record: Record, no_devices: bool) -> Readable:
        """The content of a record, for the comparison of two checkpoints.

        If it is compressed too tightly to be held in memory, the compressed bytes. `no_devices`
        removes the devices that code names.
        """
        if not self.archive.may_be_parsed(record):
            return self.source.window(self.archive.data_at(record), record.stored_nbytes)
        return content_of(self.archive, record)

    def damage(self, report: Callable[[int], object]) -> Iterator[str]:
        from ...zips.checking import damage

        return damage(self.archive, report)

    def crc32(self, storage: str) -> int:
        return self.archive.records.stored_crc32(self.record_of(storage))


def content_of(archive: Archive, record: Record) -> Readable:
    """The content of a record; a window of the file if it is not compressed."""
    if record.method == DEFLATED:
        return Memory(archive.read_parsed(record), archive.source.path)
    return archive.source.window(archive.data_at(record), record.nbytes)


class ZipContainer(ArchiveContainer):
    """A zip file with pickles in records, and a record for each storage, as torch lays it out."""

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        super().__init__(archive, session)
        self.prefix = prefix_of(archive)
        self.pickled: list[Record] = []  # the record of each stream
        self._check_records()
        self.warnings += self._warnings()

    def _check_records(self) -> None:
        records, prefix = self.archive.records, self.prefix
        for name in records:
            if not name.startswith(prefix):
                raise CorruptError(f"the record {name!r} is outside {prefix!r}")
        version = records.get(f"{prefix}version") or records.get(f"{prefix}.data/version")
        if version is None:
            raise CorruptError(
                "the record 'version' is missing; torch cannot load the file without it"
            )
        self._version = version
        text = self.archive.read(version, at_most=64).strip()
        if not text.isdigit() or not 1 <= int(text) <= _NEWEST_VERSION:
            raise UnsupportedError(f"its format version is not one of 1 to {_NEWEST_VERSION}")
        order = records.get(f"{prefix}byteorder")
        if order is not None and self.archive.read(order, at_most=64) not in (b"little", b"big"):
            raise CorruptError("its byte order is neither little nor big")
        # torch ignores the case of record names, so names must not differ only in case
        absent = {
            f"{prefix}{name}".casefold(): name for name in _NAMES if prefix + name not in records
        }
        for found in records if absent else ():
            if found.casefold() in absent:
                name = absent[found.casefold()]
                raise CorruptError(f"torch would read the record {found!r} instead of {name!r}")

    def add(self, name: str, folder: str, path: tuple[str, ...] = ()) -> None:
        """Read a pickle and the storages that it names.

        `name`, and `folder` with the storages' records (`data/`), are without the prefix.
        """
        stream = self.add_pickle(name, path)
        self.ids.update(storage_ids(stream.pickle.persistents, f"{self.folder}{folder}"))
        self.storages = storages_of(self.ids.values(), self.extents)

    def add_pickle(self, name: str, path: tuple[str, ...]) -> PickleStream:
        """Read a pickle without the storages it refers to; the arguments are those of `add`."""
        record = self.archive.records[f"{self.prefix}{name}"]
        content = Memory(self.archive.read_parsed(record), self.source.path)
        stream = self.session.stream(content)
        if stream.pickle.textual:
            raise UnsupportedError("its pickle has protocol 0, which torch can't load")
        self.streams.append(stream)
        self.pickled.append(record)
        self.roots.append((path, stream.pickle.root))
        if stream.nbytes != content.nbytes:
            rest = content.nbytes - stream.nbytes
            self.warnings.append(f"{rest:,} bytes follow the end of the pickle")
        return stream

    def extents(self, storages: Collection[StorageId], suffix: str = "") -> Iterator[Extent | None]:
        """The extent of each storage's record in the file; None if it is compressed."""
        names = [self.usual_record(storage.id) + suffix for storage in storages]
        start, found = self.source.start, self.archive.records.stored(names)
        for storage, name, (number, nbytes, at) in zip(storages, names, found, strict=True):
            if at and nbytes == storage.whole_nbytes and start is not None:
                self._is_storage[number] = True
                if suffix:
                    self._named[storage.id] = name
                yield tuple.__new__(Extent, (start + at, nbytes, 0))
            else:
                yield self._extent(storage, name)

    def _extent(self, storage: StorageId, name: str) -> Extent | None:
        record = self.archive.records.get(name)
        if record is None:
            raise CorruptError(f"the storage {storage.key!r} is missing")
        if storage.whole_nbytes != record.nbytes and not self.may_be_left_out(storage, record):
            raise CorruptError(
                f"the storage {storage.key!r} should have {storage.whole_nbytes:,} "
                f"bytes and has {record.nbytes:,}"
            )
        self.hold(storage.id, record.name)
        if self.source.start is None or record.method != STORED:
            return None
        return Extent(self.source.start + self.archive.data_at(record), record.nbytes)

    def may_be_left_out(self, storage: StorageId, record: Record) -> bool:
        """Whether the bytes of a storage may be missing."""
        return False

    def _warnings(self) -> list[str]:
        warnings, records = self.archive.oddities(), self.archive.records
        packed = []
        if any(records.column("method")):  # is not STORED
            packed = [r for r in records.values() if r.method != STORED and not self.is_text(r)]
        if packed:
            warnings.append(
                f"{len(packed):,} of its records are compressed: "
                "torch.load(mmap=True) would read the compressed bytes as tensors"
            )
        order = self.archive.records.get(f"{self.prefix}byteorder")
        self.big_endian = order is not None and self.archive.read(order, at_most=64) == b"big"
        if self.big_endian:
            warnings.append("its tensors are big-endian")
        return warnings

    def is_text(self, record: Record) -> bool:
        """Whether a record holds no tensor and so may be compressed."""
        return record.name == f"{self.prefix}data.pkl"

    def plan(self, spelling: LocationEdits) -> Plan:
        """Patch a clone if the pickles can keep their lengths; otherwise write a new zip."""
        from ...plans.plan import apply_edits, apply_plan
        from ...zips.rewrite import rewrite

        for exact in (True, False):
            new: dict[str, bytes] = {}
            for record, stream in zip(self.pickled, self.streams, strict=True):
                changes = stream.edits(spelling, exact=exact and record.method == STORED)
                if changes is None:
                    break
                if changes:
                    assert isinstance(stream.source, Memory)
                    plan = apply_edits(0, stream.source.nbytes, changes)
                    new[record.name] = apply_plan(plan, stream.source.content)
            else:
                break
        return rewrite(self.archive, {**new, **self.changed_records(spelling)}, self._alignment())

    def container_records(self) -> set[str]:
        """The records of its pickles."""
        return {record.name for record in self.pickled}

    def usual_record(self, storage: str) -> str:
        return self.prefix + storage[len(self.folder) :]

    def short(self, record: Record) -> str:
        return record.name.removeprefix(self.prefix)

    def changed_records(self, spelling: LocationEdits) -> dict[str, bytes]:
        """The new content of other records that change."""
        return {}

    def _alignment(self) -> int:
        from ...zips.layout import ALIGNMENT

        record = self.archive.records.get(f"{self.prefix}.storage_alignment")
        if record is None:
            return ALIGNMENT
        text = self.archive.read(record, at_most=64).strip()
        if not text.isdigit() or not 1 <= int(text) <= _LARGEST_ALIGNMENT:
            raise CorruptError("the record '.storage_alignment' is not a valid number")
        return int(text)

    def frame(self, spelling: LocationEdits | None = None) -> object:
        """The names of the records, in order."""
        return list(self.archive.records)
