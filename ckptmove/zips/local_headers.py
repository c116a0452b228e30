"""Check the local headers of a zip file, which repeat what its directory says."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..errors import CorruptError
from ..sources.nearby import NearbyReads
from .archive import (
    DESCRIPTOR_MAGIC,
    DESCRIPTOR_NBYTES,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MAGIC,
    USUAL_EXTRA,
    Archive,
)
from .members import MAX32, Record

#: Of a header the signature, flags and method, and the lengths of the name and the extra field.
_HEAD = struct.Struct("<4s2x2H16x2H")
_EXTRA_FIELD, _NO_EXTRA = struct.Struct("<2H"), 4  # the head of a field in the extra field
_SUM_AT, _SUM = 14, struct.Struct("<3I")  # the checksum and both sizes
_NO_SUM = bytes(_SUM.size)  # stands for those that follow the content
_ZIP64 = 1


def check_layout(archive: Archive) -> None:
    """Check every local header, and that no two records overlap."""
    archive.source.expect(_beside_content(archive))
    nearby, records = NearbyReads(archive.source), archive.records
    starts = records.starts()
    end, before = 0, ""
    for row, name, fields in records.by_header():
        _, _, _, stored, _, header_at, _ = fields
        if header_at < end:
            raise CorruptError(f"the records {before!r} and {name!r} overlap")
        at = (
            starts[row]
            or _usual_start(name, fields, nearby, archive.directory_at)
            or archive.check_header(Record(name, *fields), nearby.read)
        )
        starts[row], end, before = at, at + stored, name
    records.note_starts(starts)


def _usual_start(name: str, fields: tuple[int, ...], nearby: NearbyReads, directory_at: int) -> int:
    """Return a record's content offset if its local header, read with others, is usual; or 0.

    That is as nearly all of many are; what it takes `Archive.check_header` takes as well.
    """
    method, flags, crc32, stored, nbytes, header_at, _ = fields
    block, head, encoded = nearby.block, header_at - nearby.start, name.encode()
    extra_at = head + LOCAL.size + len(encoded)
    if method or head < 0 or extra_at + _NO_EXTRA > len(block) or nbytes >= MAX32:
        return 0
    magic, *alike, name_nbytes, extra_nbytes = _HEAD.unpack_from(block, head)
    start = extra_at + extra_nbytes
    after = start + stored
    if (
        magic != LOCAL_MAGIC
        or alike != [flags, 0]
        or name_nbytes != len(encoded)
        or block[extra_at - name_nbytes : extra_at] != encoded
        or nearby.start + after + DESCRIPTOR_NBYTES > directory_at
    ):
        return 0
    if extra_nbytes:  # one field that is not zip64: torch's padding
        kind, filled = _EXTRA_FIELD.unpack_from(block, extra_at)
        if kind == _ZIP64 or filled + _NO_EXTRA != extra_nbytes:
            return 0
    sums = _SUM.pack(crc32, stored, nbytes)
    said = block[head + _SUM_AT : head + _SUM_AT + _SUM.size]
    at = nearby.start + start
    if flags & HAS_DESCRIPTOR:
        form = DESCRIPTOR_MAGIC + sums
        found = block[after : after + len(form)]
        if len(found) < len(form):
            found = nearby.read(nearby.start + after, len(form))
        return at if said == _NO_SUM and found == form else 0
    return at if said == sums else 0


def _beside_content(archive: Archive) -> Iterator[tuple[int, int]]:
    """Return the ranges of headers and descriptors, as far as the directory tells."""
    for _, name, fields in archive.records.by_header():
        _, flags, _, stored, _, header_at, _ = fields
        header = LOCAL.size + len(name)
        yield header_at, header + USUAL_EXTRA
        if flags & HAS_DESCRIPTOR:  # the length of the extra field is not yet known
            yield header_at + header + stored, USUAL_EXTRA + DESCRIPTOR_NBYTES
