"""Check the local headers of a zip file, which repeat what its directory says."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice

from ..errors import CorruptError
from ..sources.nearby import LONGEST_BLOCK, NearbyReads
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
_SHORTEST_ROW, _LONGEST_ROW = 1 << 4, 1 << 9  # records that are checked at once


def check_layout(archive: Archive) -> None:
    """Check every local header, and that no two records overlap."""
    archive.source.expect(_beside_content(archive))
    nearby, records = NearbyReads(archive.source), archive.records
    starts, ordered = records.starts(), records.by_header()
    end, before, most = 0, "", _SHORTEST_ROW
    while part := list(islice(ordered, most)):
        found: Sequence[int] = () if nearby.is_far else _row_starts(part, nearby, archive)
        most = min(2 * most, _LONGEST_ROW) if found else max(most // 2, _SHORTEST_ROW)
        for (row, _, _), at in zip(part, found, strict=False):
            starts[row] = at
        for row, name, fields in part:
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


def _row_starts(
    part: list[tuple[int, str, tuple[int, ...]]], nearby: NearbyReads, archive: Archive
) -> Sequence[int]:
    """Return the content offsets of small records of one size, or none if one is unusual.

    Their headers lie equally far apart. All fields that are the same are compared with the first
    header, a column of bytes at a time.
    """
    _, names, fields = zip(*part, strict=True)
    methods, flags, sums, stored, sizes, heads, _ = zip(*fields, strict=True)
    count, head, width, text = len(part), heads[0], len(names[0]), "".join(names)
    step = heads[min(1, count - 1)] - head
    if (
        not 0 < count * step <= LONGEST_BLOCK
        or heads != tuple(range(head, head + count * step, step))
        or len(set(zip(methods, flags, stored, sizes, map(len, names), strict=True))) > 1
        or not text.isascii()
        or head + count * step > archive.directory_at
    ):
        return ()
    block = nearby.read(head, count * step)
    start = _usual_start(names[0], fields[0], nearby, archive.directory_at)
    extra, after = LOCAL.size + width, start - head + stored[0]
    same = [*range(4), *range(6, 10), *range(_SUM_AT + 4, LOCAL.size)]
    same += range(extra, extra + _NO_EXTRA * (start > head + extra))
    if flags[0] & HAS_DESCRIPTOR:
        same += [*range(_SUM_AT, _SUM_AT + 4), *range(after, after + 4)]
        same += range(after + 8, after + 4 + _SUM.size)
    if not start or max(same[-1] + 1, after) > step:
        return ()
    if any(block[at::step] != block[at : at + 1] * count for at in same):
        return ()
    if flags[0] & HAS_DESCRIPTOR:
        form = f"<{LOCAL.size}x{width}s{after + 4 - extra}xI{step - after - 8}x"
        raw, said = zip(*struct.iter_unpack(form, block), strict=True)
    else:
        form = f"<{_SUM_AT}xI{LOCAL.size - _SUM_AT - 4}x{width}s{step - extra}x"
        said, raw = zip(*struct.iter_unpack(form, block), strict=True)
    right = said == sums and b"".join(raw) == text.encode()
    return range(start, start + count * step, step) if right else ()


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
