"""Plan how a zip file gets other content in some of its records. Pure, but for reading headers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from ..plan import Checksum, Copy, Edit, Plan, Write, edited
from .archive import DESCRIPTOR_MAGIC, HAS_DESCRIPTOR, LOCAL, STORED, Archive, Record
from .layout import Member, directory, lay_out

_CENTRAL_CRC_AT, _LOCAL_CRC_AT = 16, 14  # within a directory entry, and a local header


def rewrite(archive: Archive, new: Mapping[str, bytes], alignment: int) -> Plan:
    """How to write the zip with other content in some records.

    Args:
        archive: the zip.
        new: the name of a record → its new content. Pickles are stored, as torch has them; what
            else was compressed stays so.
        alignment: of what is laid out anew.

    Returns:
        A patch if all new content takes as many bytes as the old, else the zip laid out as torch
        does.
    """
    if all(_fits(archive.records[name], content) for name, content in new.items()):
        return _patch(archive, new)
    return _relay(archive, new, alignment)


def _fits(record: Record, content: bytes) -> bool:
    return record.method == STORED and record.nbytes == len(content)


def _checksums(archive: Archive, new: Mapping[str, bytes]) -> list[tuple[Record, int]]:
    """The records whose bytes in the file have a checksum and stay."""
    return [
        (record, archive.data_at(record))
        for record in archive.records.values()
        if record.name not in new and record.method == STORED and record.crc32 and record.nbytes
    ]


def _patch(archive: Archive, new: Mapping[str, bytes]) -> Plan:
    """Clone the file; put contents of the same length in the place of the old ones."""
    start = archive.source.start or 0
    edits = [
        Edit(write.at, write.at + len(write.data), write.data)
        for name, content in new.items()
        for write in _patches(archive, archive.records[name], content)
    ]
    plan = edited(start, archive.source.nbytes, edits)
    return plan._replace(
        checksums=tuple(
            sorted(
                Checksum(at, record.nbytes, record.crc32, record.name, start + at)
                for record, at in _checksums(archive, new)
            )
        )
    )


def _patches(archive: Archive, record: Record, content: bytes) -> list[Write]:
    """The content, and its checksum wherever the zip repeats it."""
    at = archive.data_at(record)
    old, new = struct.pack("<I", record.crc32), struct.pack("<I", zlib.crc32(content))
    writes = [Write(at, content), Write(record.entry_at + _CENTRAL_CRC_AT, new)]
    local = archive.source.read(record.header_at, LOCAL.size)
    if local[_LOCAL_CRC_AT : _LOCAL_CRC_AT + 4] == old and record.crc32:
        writes.append(Write(record.header_at + _LOCAL_CRC_AT, new))
    if record.flags & HAS_DESCRIPTOR:
        end = at + record.stored_nbytes
        descriptor = archive.source.read(end, 8)
        if descriptor == DESCRIPTOR_MAGIC + old:
            writes.append(Write(end + 4, new))
        elif descriptor[:4] == old:
            writes.append(Write(end, new))
    return writes


def _relay(archive: Archive, new: Mapping[str, bytes], alignment: int) -> Plan:
    """The records in their order, each in the place where torch would have put it."""
    start = archive.source.start or 0
    records = sorted(archive.records.values(), key=lambda record: record.header_at)
    stored = {name: _stored(archive.records[name], content) for name, content in new.items()}
    members = [
        Member(
            record.name,
            _method(record),
            zlib.crc32(new[record.name]),
            len(stored[record.name]),
            len(new[record.name]),
        )
        if record.name in new
        else Member(record.name, record.method, record.crc32, record.stored_nbytes, record.nbytes)
        for record in records
    ]
    placed = lay_out(members, alignment)
    copies, writes, places = [], [], {}
    for record, place in zip(records, placed, strict=True):
        writes.append(Write(place.at, place.header))
        places[record.name] = place
        if record.name in new:
            writes.append(Write(place.data_at, stored[record.name]))
        elif record.stored_nbytes:
            at = start + archive.data_at(record)
            copies.append(Copy(at, record.stored_nbytes, place.data_at))
        if place.descriptor:
            writes.append(Write(place.end - len(place.descriptor), place.descriptor))
    end = placed[-1].end
    tail = directory([places[name] for name in archive.records], end)
    return Plan(
        method="relay",
        nbytes=end + len(tail),
        copies=tuple(copies),
        writes=(*writes, Write(end, tail)),
        checksums=tuple(
            sorted(
                Checksum(places[r.name].data_at, r.nbytes, r.crc32, r.name, start + at)
                for r, at in _checksums(archive, new)
            )
        ),
    )


def _method(record: Record) -> int:
    return STORED if record.name.endswith(".pkl") else record.method


def _stored(record: Record, content: bytes) -> bytes:
    """The content as the file keeps it."""
    if _method(record) == STORED:
        return content
    machine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return machine.compress(content) + machine.flush()
