"""Plan new content for some records of a zip, laid out as torch does. Reads only headers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from ..plans.plan import Copy, Edit, Plan, Write, apply_edits
from .archive import DESCRIPTOR_MAGIC, HAS_DESCRIPTOR, LOCAL, STORED, Archive
from .content import Content, checksum_of, checksums_that_stay, nbytes_of
from .layout import Member, directory, lay_out
from .members import Record

#: The offset of the checksum in a directory entry, and in a local header.
CENTRAL_CRC_AT, LOCAL_CRC_AT = 16, 14


def rewrite(archive: Archive, new: Mapping[str, Content], alignment: int) -> Plan:
    """Plan the zip with new content in some records.

    This is a patch if all new content has the old length, otherwise the zip is laid out as torch
    does. Pickles are stored uncompressed, as in torch; other compressed records stay compressed.
    CorruptError if a record whose new content is a plan is damaged.
    """
    if fits(archive, new):
        return patch(archive, new)
    return _relay(archive, dict(new), alignment)


def fits(archive: Archive, new: Mapping[str, Content]) -> bool:
    """Whether all new content fits into the place of the old."""
    return all(
        archive.records[name].method == STORED
        and (isinstance(content, bytes) or content.keeps_length)
        and archive.records[name].nbytes == nbytes_of(content)
        for name, content in new.items()
    )


def patch(archive: Archive, new: Mapping[str, Content]) -> Plan:
    """Clone the file, and replace contents with new ones of the same length."""
    start = archive.source.start or 0
    edits = [
        edit
        for name, content in new.items()
        for edit in _edits(archive, archive.records[name], content)
    ]
    plan = apply_edits(start, archive.source.nbytes, edits)
    checksums = checksums_that_stay(archive, dict(new))
    return plan._replace(checksums=tuple(sorted(checksums)))


def _edits(archive: Archive, record: Record, content: Content) -> list[Edit]:
    """Yield the content, and its checksum wherever the zip repeats it."""
    at = archive.data_at(record)
    old = struct.pack("<I", record.crc32)
    new = struct.pack("<I", checksum_of(archive, record, content))
    places = [record.entry_at + CENTRAL_CRC_AT]
    local = archive.source.read(record.header_at, LOCAL.size)
    if local[LOCAL_CRC_AT : LOCAL_CRC_AT + 4] == old and record.crc32:
        places.append(record.header_at + LOCAL_CRC_AT)
    if record.flags & HAS_DESCRIPTOR:
        end = at + record.stored_nbytes
        descriptor = archive.source.read(end, 8)
        if descriptor == DESCRIPTOR_MAGIC + old:
            places.append(end + 4)
        elif descriptor[:4] == old:
            places.append(end)
    return [Edit(at, at + record.nbytes, content), *(Edit(n, n + 4, new) for n in places)]


def _relay(archive: Archive, new: dict[str, Content], alignment: int) -> Plan:
    """Plan the records in order, each at the offset that torch would choose."""
    start = archive.source.start or 0
    records = sorted(archive.records.values(), key=lambda record: record.header_at)
    stored = {name: _pack(archive.records[name], content) for name, content in new.items()}
    members = [
        Member(
            record.name,
            _method(record),
            checksum_of(archive, record, new[record.name]),
            nbytes_of(stored[record.name]),
            nbytes_of(new[record.name]),
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
        content = stored.get(record.name)
        if isinstance(content, Plan):
            copies += [each._replace(at=place.data_at + each.at) for each in content.copies]
            writes += [each._replace(at=place.data_at + each.at) for each in content.writes]
        elif content is not None:
            writes.append(Write(place.data_at, content))
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
                checksums_that_stay(
                    archive, new, {name: place.data_at for name, place in places.items()}
                )
            )
        ),
    )


def _method(record: Record) -> int:
    return STORED if record.name.endswith(".pkl") else record.method


def _pack(record: Record, content: Content) -> Content:
    """Return the content in its stored form."""
    if _method(record) == STORED or isinstance(content, Plan):
        return content
    return deflated_content(content)


def deflated_content(content: bytes) -> bytes:
    """Compress content for a record of method DEFLATED."""
    machine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return machine.compress(content) + machine.flush()
