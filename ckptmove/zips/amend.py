"""Plan new content for some records of an ordinary zip file, and keep the rest as it is.

`rewrite` lays records out as torch does. This module keeps the choices of the zip's own writer:
methods, times, attributes, extra fields, comments, order and gaps. What follows a record with a new
length moves, and all offsets are updated. It reads only headers, and the records that a plan
changes.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from ..errors import UnsupportedError
from ..plans.plan import Checksum, Edit, Plan, apply_edits
from .archive import (
    CENTRAL,
    DESCRIPTOR_MAGIC,
    END64,
    END64_MAGIC,
    HAS_DESCRIPTOR,
    LOCATOR,
    LOCATOR_MAGIC,
    STORED,
    Archive,
)
from .content import Content, checksum_of, checksums_that_stay, nbytes_of
from .members import MAX32, Record
from .rewrite import CENTRAL_CRC_AT, LOCAL_CRC_AT, deflated_content, fits, patch

_CENTRAL_OFFSET_AT, _LOCAL_EXTRA_AT = 42, 28
_END_OFFSET_AT, _END64_OFFSET_AT, _LOCATOR_OFFSET_AT = 16, 48, 8


class _NewRecord:
    """A record with new content, as the zip will keep it."""

    def __init__(self, archive: Archive, record: Record, content: Content) -> None:
        self.record = record
        self.at = archive.data_at(record)
        self.crc32 = checksum_of(archive, record, content)
        self.nbytes = nbytes_of(content)
        self.kept = content
        if record.method != STORED:
            assert isinstance(content, bytes)
            self.kept = deflated_content(content)
        self.stored_nbytes = nbytes_of(self.kept)

    @property
    def growth(self) -> int:
        """The number of bytes by which later records move."""
        return self.stored_nbytes - self.record.stored_nbytes


def amend(archive: Archive, new: Mapping[str, Content]) -> Plan:
    """Plan the zip with new content in some records; new content of compressed records is bytes.

    This is a patch if all new content takes as many bytes as the old. CorruptError if a record
    whose new content is a plan is damaged; UnsupportedError if the zip would reach 4 GiB, and has
    no room to say so.
    """
    if fits(archive, new):
        return patch(archive, new)
    changed = [_NewRecord(archive, archive.records[name], content) for name, content in new.items()]
    changed.sort(key=lambda each: each.at)
    shifts = _Shifts(changed)
    edits = [edit for each in changed for edit in _record_edits(archive, each)]
    edits.append(_directory_edit(archive, {each.record.name: each for each in changed}, shifts))
    edits += _end_edits(archive, shifts)
    plan = apply_edits(archive.source.start or 0, archive.source.nbytes, edits)
    return plan._replace(checksums=tuple(sorted(_checksums(archive, new, shifts))))


class _Shifts:
    """The shift of each byte of the zip."""

    def __init__(self, changed: list[_NewRecord]) -> None:
        self._at = [each.at for each in changed]
        self._sums = [0]
        for each in changed:
            self._sums.append(self._sums[-1] + each.growth)

    def of(self, at: int) -> int:
        """Return the new offset of a byte; a changed record's start maps to its new content."""
        return at + self._sums[bisect_left(self._at, at)]


def _checksums(archive: Archive, new: Mapping[str, Content], shifts: _Shifts) -> Iterator[Checksum]:
    records = archive.records.items()
    places = {name: shifts.of(archive.data_at(record)) for name, record in records}
    yield from checksums_that_stay(archive, dict(new), places)


def _record_edits(archive: Archive, changed: _NewRecord) -> Iterator[Edit]:
    """Yield the edits of a record's content, local header and descriptor."""
    record, at, end = changed.record, changed.at, changed.at + changed.record.stored_nbytes
    head = archive.source.read(record.header_at, at - record.header_at)
    absent = record.flags & HAS_DESCRIPTOR and not any(
        struct.unpack_from("<3I", head, LOCAL_CRC_AT)
    )
    if not absent:
        fresh = bytearray(head)
        extra_at = len(head) - int.from_bytes(head[_LOCAL_EXTRA_AT : _LOCAL_EXTRA_AT + 2], "little")
        _put(fresh, LOCAL_CRC_AT, changed.crc32)
        wide = _wide(head, extra_at, len(head))
        for field, value in ((22, changed.nbytes), (18, changed.stored_nbytes)):
            _put(fresh, field, value, wide)
        yield Edit(record.header_at, at, bytes(fresh))
    yield Edit(at, end, changed.kept)
    if record.flags & HAS_DESCRIPTOR:
        old, fresh_descriptor = _descriptors(archive, changed, end)
        yield Edit(end, end + len(old), fresh_descriptor)


def _descriptors(archive: Archive, changed: _NewRecord, end: int) -> tuple[bytes, bytes]:
    """Return the old descriptor and the new one, in the same form."""
    record = changed.record
    found = archive.source.read(end, min(24, archive.source.nbytes - end))
    for sizes in (struct.Struct("<I2Q"), struct.Struct("<3I")):
        for magic in (DESCRIPTOR_MAGIC, b""):
            if sizes.format == "<3I" and max(record.nbytes, record.stored_nbytes) > MAX32:
                continue
            old = magic + sizes.pack(record.crc32, record.stored_nbytes, record.nbytes)
            if found.startswith(old):
                if sizes.format == "<3I" and max(changed.nbytes, changed.stored_nbytes) > MAX32:
                    raise _too_large()
                new = sizes.pack(changed.crc32, changed.stored_nbytes, changed.nbytes)
                return old, magic + new
    raise AssertionError("the archive has checked this descriptor")


def _directory_edit(archive: Archive, changed: dict[str, _NewRecord], shifts: _Shifts) -> Edit:
    """Return the edit of the directory, with the new sizes and offsets."""
    at = archive.directory_at
    directory = bytearray(archive.source.read(at, archive.directory_nbytes))
    for record in archive.records.values():
        entry = record.entry_at - at
        name_nbytes, extra_nbytes = struct.unpack_from("<2H", directory, entry + 28)
        extra_at = entry + CENTRAL.size + name_nbytes
        wide = _wide(directory, extra_at, extra_at + extra_nbytes)
        found = changed.get(record.name)
        if found is not None:
            _put(directory, entry + CENTRAL_CRC_AT, found.crc32)
        sizes = found or record
        for field, value in ((24, sizes.nbytes), (20, sizes.stored_nbytes)):
            _put(directory, entry + field, value, wide)
        _put(directory, entry + _CENTRAL_OFFSET_AT, shifts.of(record.header_at), wide)
    return Edit(at, at + len(directory), bytes(directory))


def _end_edits(archive: Archive, shifts: _Shifts) -> Iterator[Edit]:
    """Yield the edits of the end records, which have the offset of the directory."""
    at = archive.directory_at + archive.directory_nbytes
    directory_at = shifts.of(archive.directory_at)
    tail = archive.source.read(at, min(END64.size + LOCATOR.size, archive.source.nbytes - at))
    if tail.startswith(END64_MAGIC):
        yield Edit(at + _END64_OFFSET_AT, at + END64.size, struct.pack("<Q", directory_at))
        at += END64.size
        assert tail[END64.size :].startswith(LOCATOR_MAGIC)
        end64_at = struct.pack("<Q", shifts.of(at - END64.size))
        yield Edit(at + _LOCATOR_OFFSET_AT, at + _LOCATOR_OFFSET_AT + 8, end64_at)
        at += LOCATOR.size
    end = bytearray(archive.source.read(at + _END_OFFSET_AT, 4))
    if end != b"\xff\xff\xff\xff":
        _put(end, 0, directory_at)
        yield Edit(at + _END_OFFSET_AT, at + _END_OFFSET_AT + 4, bytes(end))


def _wide(data: bytes | bytearray, at: int, end: int) -> Iterator[int]:
    """Return the offsets of the values in the zip64 extra field, in order."""
    while at + 4 <= end:
        kind, nbytes = struct.unpack_from("<HH", data, at)
        if kind == 1:
            yield from range(at + 4, at + 4 + nbytes - 7, 8)
            return
        at += 4 + nbytes


def _put(data: bytearray, at: int, value: int, wide: Iterator[int] | None = None) -> None:
    """Write a number into its 4 bytes, or into the zip64 extra field if it is too wide."""
    if wide is not None and data[at : at + 4] == b"\xff\xff\xff\xff":
        place = next(wide, None)
        if place is not None:
            data[place : place + 8] = struct.pack("<Q", value)
            return
    if value >= MAX32:
        raise _too_large()
    data[at : at + 4] = struct.pack("<I", value)


def _too_large() -> UnsupportedError:
    return UnsupportedError("what would be written reaches 4 GiB, for which the zip has no room")
