"""torch-zip: what `torch.save` writes since 1.6.

    P/data.pkl            the object, a pickle of protocol 2; tensors name their storages
    P/.format_version     "1", since 2.8 or so; then offsets of storages may be computed by torch
    P/.storage_alignment  "64"
    P/byteorder           "little" or "big"
    P/data/0 … N-1        the bytes of each storage
    P/version             "3\\n"
    P/.data/serialization_id

`P` is the file's stem at the time of saving. Relocating changes device tags in `data.pkl` alone: if
the new pickle is as long as the old one, a clone of the file is patched; else the zip is laid out
anew, as torch would have. `.data/serialization_id` is kept either way: it is an identity that
nothing checks, and the tensors it stands for are the same.

Sources: torch/serialization.py (`_save`, `_load`); caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from ..contents.listing import Contents, contents_of, unknown_callables
from ..contents.pids import StorageId, storage_id
from ..errors import CorruptError, UnsupportedError, WriteError
from ..manifest import Extent, Manifest, Storage
from ..pickles.compare import difference
from ..pickles.nodes import Call, Text
from ..pickles.splice import Respelling, splice
from ..pickles.walk import MAX_NBYTES, Pickle, walk
from ..placement import Moves
from ..plan import Checksum, Copy, Plan, Write
from ..zips.archive import (
    DESCRIPTOR_MAGIC,
    HAS_DESCRIPTOR,
    LOCAL,
    STORED,
    Archive,
    Record,
)
from ..zips.layout import ALIGNMENT, Member, directory, lay_out
from .base import Carries, Checkpoint, Glimpse

_CENTRAL_CRC_AT, _LOCAL_CRC_AT = 16, 14  # within a directory entry, and a local header
_NAMES = ("data.pkl", "byteorder", "version", ".format_version", ".storage_alignment")
_NEWEST_VERSION = 10  # caffe2/serialize/versions.h, kMaxSupportedFileFormatVersion
_LARGEST_ALIGNMENT = 1 << 15  # the padding must fit an extra field


class TorchZip:
    """The format of `torch.save`."""

    name = "torch-zip"
    suffixes: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt")
    summary = "torch.save, torch 1.6 and newer"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, glimpse: Glimpse) -> bool:
        """A zip with a `data.pkl`, and without the `constants.pkl` of TorchScript."""
        if glimpse.archive is None:
            return False
        prefix = _prefix(glimpse.archive)
        records = glimpse.archive.records
        return (
            bool(prefix)
            and f"{prefix}data.pkl" in records
            and f"{prefix}constants.pkl" not in records
        )

    def read(self, glimpse: Glimpse) -> TorchZipCheckpoint:
        """Read the directory and the pickle."""
        assert glimpse.archive is not None
        return TorchZipCheckpoint(glimpse.archive)


def _prefix(archive: Archive) -> str:
    """The folder that torch takes all records from: that of the first directory entry."""
    first = next(iter(archive.records), "")
    return first[: first.find("/") + 1]


class _Spelling(NamedTuple):
    """The moves, as changes of the pickle."""

    respelling: Respelling
    devices: dict[int, str]  # id of a torch.device call → its new device


class TorchZipCheckpoint:
    """A file that torch.save wrote, read but for its tensors."""

    def __init__(self, archive: Archive) -> None:
        """Args:
        archive: the zip, with a `data.pkl`.

        Raises:
            CorruptError, UnsupportedError: as `formats.read`.
        """
        self.source = archive.source
        self.archive = archive
        self.prefix = _prefix(archive)
        self._check_records()
        self.record = archive.records[f"{self.prefix}data.pkl"]
        self.data = archive.read(self.record, at_most=MAX_NBYTES)
        self.pickle: Pickle = walk(self.data)
        if self.pickle.textual:
            raise UnsupportedError("its pickle is of protocol 0, which torch itself can't load")
        self.ids = {id(node): storage_id(node) for node in self.pickle.persistents}
        self.storages = self._storages()

    # -- reading -------------------------------------------------------------------------------

    def _check_records(self) -> None:
        self.archive.check_layout()
        for name in self.archive.records:
            if not name.startswith(self.prefix):
                raise CorruptError(f"the record {name!r} is outside {self.prefix!r}")
        version = self.archive.records.get(f"{self.prefix}version") or self.archive.records.get(
            f"{self.prefix}.data/version"
        )
        if version is None:
            raise CorruptError("the record 'version' is missing, without which torch loads nothing")
        text = self.archive.read(version, at_most=64).strip()
        if not text.isdigit() or not 1 <= int(text) <= _NEWEST_VERSION:
            raise UnsupportedError(f"its format version is not one of 1 to {_NEWEST_VERSION}")
        order = self.archive.records.get(f"{self.prefix}byteorder")
        if order is not None and self.archive.read(order, at_most=64) not in (b"little", b"big"):
            raise CorruptError("its byte order is neither little nor big")
        for name in _NAMES:  # torch finds a record whatever the case of its name
            for found in self.archive.records:
                wanted = f"{self.prefix}{name}"
                if found != wanted and found.casefold() == wanted.casefold():
                    raise CorruptError(f"torch would take the record {found!r} for {name!r}")

    @cached_property
    def contents(self) -> Contents:
        """What the pickle holds, and the nodes that spell devices."""
        return contents_of(self.pickle, self.storages, self.ids)

    @cached_property
    def manifest(self) -> Manifest:
        """What it holds."""
        contents = self.contents
        return Manifest(
            path=self.source.path,
            format=TorchZip.name,
            nbytes=self.source.nbytes,
            tensors=tuple(contents.tensors),
            storages={storage.id: storage for storage in self.storages.values()},
            values_naming_devices=tuple(contents.values),
            objects=dict(contents.objects),
            globals=tuple(dict.fromkeys(name.qualname for name in self.pickle.globals)),
            unknown_callables=unknown_callables(self.pickle),
            aliases=tuple(contents.aliases),
            capturable=tuple(contents.capturable),
            meshes=tuple(map(str, contents.meshes)),
            warnings=tuple(self._warnings()),
            tree=self.pickle.root,
        )

    def _storages(self) -> dict[str, Storage]:
        """Each storage by its key, checked: one location, one size, and a record to match."""
        uses: dict[str, list[StorageId]] = defaultdict(list)
        for each in self.ids.values():
            uses[each.key].append(each)
        storages = {}
        for key, same in uses.items():
            first = same[0]
            for each in same[1:]:
                if str(each.location) != str(first.location):
                    raise CorruptError(
                        f"the storage {key!r} is said to be on {str(first.location)!r} and on "
                        f"{str(each.location)!r}"
                    )
            if len({each.dtype for each in same if each.dtype is not None}) > 1:
                raise CorruptError(f"the storage {key!r} is said to be of several dtypes")
            name = f"{self.prefix}data/{key}"
            record = self.archive.records.get(name)
            if record is None:
                raise CorruptError(f"the storage {key!r} is missing")
            if any(each.nbytes != record.nbytes for each in same):
                raise CorruptError(
                    f"the storage {key!r} should be {first.nbytes:,} bytes long, and is "
                    f"{record.nbytes:,}"
                )
            storages[key] = Storage(
                id=f"data/{key}",
                location=str(first.location),
                nbytes=first.nbytes,
                dtype=first.dtype,
                extent=Extent(self.archive.data_at(record), record.stored_nbytes),
            )
        return storages

    def _warnings(self) -> list[str]:
        records = list(self.archive.records.values())
        warnings = []
        unchecked = sum(record.unchecksummed for record in records)
        if unchecked:
            warnings.append(f"{unchecked:,} of its records carry no checksum")
        packed = [r for r in records if r.method != STORED and r is not self.record]
        if packed:
            warnings.append(
                f"{len(packed):,} of its records are compressed: torch.load(mmap=True) would take "
                "compressed bytes for tensors"
            )
        order = self.archive.records.get(f"{self.prefix}byteorder")
        if order is not None and self.archive.read(order, at_most=64) == b"big":
            warnings.append("its tensors are big-endian")
        if self.archive.trailing_nbytes:
            warnings.append(f"{self.archive.trailing_nbytes:,} bytes follow the end of the zip")
        if self.pickle.nbytes != len(self.data):
            rest = len(self.data) - self.pickle.nbytes
            warnings.append(f"{rest:,} bytes follow the end of the pickle")
        return warnings

    # -- relocating ----------------------------------------------------------------------------

    def plan_relocate(self, moves: Moves) -> Plan:
        """Patch a clone if the pickle can keep its length, else lay the zip out anew."""
        if not moves:
            return self._patch(None)
        spelling = self._spell(moves)
        if self.record.method == STORED:
            patched = splice(self.data, spelling.respelling, exact=True)
            if patched is not None:
                return self._patch(patched)
        free = splice(self.data, spelling.respelling, exact=False)
        assert free is not None
        return self._relay(free)

    def _spell(self, moves: Moves) -> _Spelling:
        respelling, devices = Respelling(), {}
        for each in self.ids.values():
            moved = moves.storages.get(self.storages[each.key].id)
            if moved is not None:
                respelling.text(each.location, moved)
        for node, device in self._spelled(moves):
            if isinstance(node, Call):
                respelling.device(self.data, node, device)
                devices[id(node)] = device
            else:
                respelling.text(node, device)
        return _Spelling(respelling, devices)

    def _spelled(self, moves: Moves) -> Iterator[tuple[Text | Call, str]]:
        """The nodes that spell a device which is to change, but for locations."""
        contents = self.contents
        for n, device in moves.tensors.items():
            yield from ((node, device) for node in contents.spelled[n])
        yield from ((contents.meshes[n], kind) for n, kind in moves.meshes.items())
        yield from ((contents.value_nodes[n], device) for n, device in moves.values.items())

    def _checksums(self) -> list[tuple[Record, int]]:
        """The records, but for the pickle, whose bytes in the file have a checksum."""
        return [
            (record, self.archive.data_at(record))
            for record in self.archive.records.values()
            if record is not self.record and record.method == STORED and record.crc32
        ]

    def _patch(self, data: bytes | None) -> Plan:
        """Clone the file; put a pickle of the same length in the place of the old one."""
        return Plan(
            method="clone" if data is None else "patch",
            nbytes=self.source.nbytes,
            copies=(Copy(0, self.source.nbytes, 0),),
            writes=() if data is None else tuple(sorted(self._patches(data))),
            checksums=tuple(
                sorted(
                    Checksum(start, record.nbytes, record.crc32, record.name, start)
                    for record, start in self._checksums()
                )
            ),
        )

    def _patches(self, data: bytes) -> list[Write]:
        """The pickle, and its checksum wherever the zip repeats it."""
        record, at = self.record, self.archive.data_at(self.record)
        old, new = struct.pack("<I", record.crc32), struct.pack("<I", zlib.crc32(data))
        writes = [Write(at, data), Write(record.entry_at + _CENTRAL_CRC_AT, new)]
        local = self.source.read(record.header_at, LOCAL.size)
        if local[_LOCAL_CRC_AT : _LOCAL_CRC_AT + 4] == old and record.crc32:
            writes.append(Write(record.header_at + _LOCAL_CRC_AT, new))
        if record.flags & HAS_DESCRIPTOR:
            end = at + record.stored_nbytes
            descriptor = self.source.read(end, 8)
            if descriptor == DESCRIPTOR_MAGIC + old:
                writes.append(Write(end + 4, new))
            elif descriptor[:4] == old:
                writes.append(Write(end, new))
        return writes

    def _relay(self, data: bytes) -> Plan:
        records = sorted(self.archive.records.values(), key=lambda record: record.header_at)
        pickle = Member(self.record.name, STORED, zlib.crc32(data), len(data), len(data))
        members = [
            pickle
            if record is self.record
            else Member(
                record.name, record.method, record.crc32, record.stored_nbytes, record.nbytes
            )
            for record in records
        ]
        placed = lay_out(members, self._alignment())
        copies, writes, starts = [], [], {}
        for record, place in zip(records, placed, strict=True):
            writes.append(Write(place.at, place.header))
            starts[record.name] = place
            if record is self.record:
                writes.append(Write(place.data_at, data))
            elif record.stored_nbytes:
                start = self.archive.data_at(record)
                copies.append(Copy(start, record.stored_nbytes, place.data_at))
            if place.descriptor:
                writes.append(Write(place.end - len(place.descriptor), place.descriptor))
        end = placed[-1].end
        tail = directory([starts[name] for name in self.archive.records], end)
        return Plan(
            method="relay",
            nbytes=end + len(tail),
            copies=tuple(copies),
            writes=(*writes, Write(end, tail)),
            checksums=tuple(
                sorted(
                    Checksum(
                        starts[record.name].data_at, record.nbytes, record.crc32, record.name, start
                    )
                    for record, start in self._checksums()
                    if record.nbytes
                )
            ),
        )

    def _alignment(self) -> int:
        record = self.archive.records.get(f"{self.prefix}.storage_alignment")
        if record is None:
            return ALIGNMENT
        text = self.archive.read(record, at_most=64).strip()
        if not text.isdigit() or not 1 <= int(text) <= _LARGEST_ALIGNMENT:
            raise CorruptError("the record '.storage_alignment' is not a number that makes sense")
        return int(text)

    def check_relocated(self, other: Checkpoint, moves: Moves) -> None:
        """Compare trees and storages with those of what was written.

        Raises:
            WriteError: they differ in more than the moves.
        """
        assert isinstance(other, TorchZipCheckpoint)
        spelling = self._spell(moves)
        found = difference(self.pickle, other.pickle, spelling.respelling.texts, spelling.devices)
        if found is not None:
            raise WriteError(f"what was written differs from the source in {found}")
        mine, theirs = self.storages, other.storages
        same = list(mine) == list(theirs) and all(
            theirs[key].nbytes == storage.nbytes
            and theirs[key].location == moves.storages.get(storage.id, storage.location)
            for key, storage in mine.items()
        )
        if not same or list(self.archive.records) != list(other.archive.records):
            raise WriteError("what was written has other storages than the source")
