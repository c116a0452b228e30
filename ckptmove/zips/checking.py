"""Read every record of a zip and check its CRC-32, which torch itself never does.

The padding before an aligned record has no checksum, but its content is known: torch writes an
extra field `FB` of letters `Z`. Source: caffe2/serialize/inline_container.cc, `getPadding`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

from ..plans.crc32 import extend_crc32
from ..sources.source import Readable
from .archive import DEFLATED, DESCRIPTOR_MAGIC, HAS_DESCRIPTOR, LOCAL, Archive
from .members import Record
from .rewrite import CENTRAL_CRC_AT, LOCAL_CRC_AT

_STEP = 1 << 20  # bytes read at once
_LENGTHS = struct.Struct("<2H")  # lengths of name and extra field, at a local header's end
_FIELD = struct.Struct("<2sH")  # the kind of an extra field, and the number of bytes that follow


def damage(archive: Archive, report: Callable[[int], object]) -> Iterator[str]:
    """Yield the faults in the bytes of records, a sentence each, in bounded memory.

    `report` is called with the number of bytes read since its last call.
    """
    for record in archive.records.values():
        content_at = archive.data_at(record) - record.header_at
        first = archive.source.read(record.header_at, content_at + min(_STEP, record.stored_nbytes))
        if not _is_filled(first[:content_at]):
            yield f"the padding before the record {record.name!r} is damaged"
        crc32, nbytes, whole = _read(archive, record, first[content_at:], report)
        if not whole or nbytes != record.nbytes:
            yield f"the record {record.name!r} does not inflate to its declared size"
        elif not record.lacks_checksum and crc32 != record.crc32:
            yield f"the record {record.name!r} is damaged: its checksum is wrong"


def holds_patched(archive: Archive, written: Readable, changed: Sequence[Record]) -> bool:
    """Whether a copy of a zip has the same directory, and correct new content in some records.

    These are uncompressed, with the old length and offset; only their checksums differ.
    """
    source, at = archive.source, archive.directory_at
    if written.nbytes != source.nbytes:
        return False
    directory = bytearray(source.read(at, source.nbytes - at))
    for record in changed:
        if record.method == DEFLATED:
            return False
        start, nbytes = archive.data_at(record), record.stored_nbytes
        old = struct.pack("<I", record.crc32)
        new = struct.pack("<I", _sum(written, start, start + nbytes))
        entry = record.entry_at - at + CENTRAL_CRC_AT
        directory[entry : entry + 4] = new
        for first, end in ((record.header_at, start), _descriptor(archive, record)):
            frame = bytearray(source.read(first, end - first))
            for place in (LOCAL_CRC_AT,) if end == start else (len(DESCRIPTOR_MAGIC), 0):
                if frame[place : place + 4] == old:
                    frame[place : place + 4] = new
                    break
            if written.read(first, end - first) != frame:
                return False
    return written.read(at, len(directory)) == directory


def _sum(source: Readable, start: int, end: int) -> int:
    """Return the CRC-32 of a range."""
    crc32 = 0
    for at in range(start, end, _STEP):
        crc32 = extend_crc32(crc32, source.read(at, min(_STEP, end - at)))
    return crc32


def _descriptor(archive: Archive, record: Record) -> tuple[int, int]:
    """Return the range in which a descriptor's magic and checksum may be, if there is one."""
    end = archive.data_at(record) + record.stored_nbytes
    return end, end + (8 if record.flags & HAS_DESCRIPTOR else 0)


def _is_filled(header: bytes) -> bool:
    """Whether the padding field of a local header is as torch writes it."""
    name_nbytes, _ = _LENGTHS.unpack_from(header, LOCAL.size - _LENGTHS.size)
    at = LOCAL.size + name_nbytes
    while at + _FIELD.size <= len(header):
        kind, nbytes = _FIELD.unpack_from(header, at)
        at += _FIELD.size
        if kind == b"FB":  # the last field
            return not header[at:].strip(b"Z") and at + nbytes == len(header)
        at += nbytes
    return True


def _read(
    archive: Archive, record: Record, first: bytes, report: Callable[[int], object]
) -> tuple[int, int, bool]:
    """Return the content's CRC-32 and size, and whether it ends correctly; `first` is its start."""
    start = archive.data_at(record)
    machine = zlib.decompressobj(-zlib.MAX_WBITS) if record.method == DEFLATED else None
    crc32 = nbytes = 0
    for done in range(0, record.stored_nbytes, _STEP):
        step = min(_STEP, record.stored_nbytes - done)
        data = archive.source.read(start + done, step) if done else first
        report(step)
        while data:
            content = data
            if machine is not None:
                try:
                    content = machine.decompress(data, _STEP)
                except zlib.error:
                    return crc32, nbytes, False
            crc32, nbytes = extend_crc32(crc32, content), nbytes + len(content)
            if nbytes > record.nbytes:
                return crc32, nbytes, False
            data = b"" if machine is None else machine.unconsumed_tail
    return crc32, nbytes, machine is None or machine.eof
