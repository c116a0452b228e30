"""Read what is left of the directory of a damaged zip.

Nothing of it is believed: lengths are bounded, and an entry that can't be one is none.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..sources.source import Readable
from .archive import (
    CENTRAL,
    CENTRAL_MAGIC,
    DEFLATED,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
    STORED,
)
from .members import MAX32

ODD_FLAGS = 0x2061  # encrypted, patched or masked
LONGEST_NAME = 4096  # bytes
_MOST_FIELDS = 64  # extra fields of a record that are looked at
_TAIL = 1 << 16  # bytes at the end that are searched for the end record
_LONGEST_DIRECTORY = 64 << 20


class FoundEntry(NamedTuple):
    """A record as its directory entry describes it."""

    name: str
    method: int
    crc32: int
    stored_nbytes: int
    header_at: int


def directory_bytes(source: Readable) -> bytes:
    """Return the bytes of the directory, as far as it can be found."""
    start = max(0, source.nbytes - _TAIL - END.size)
    tail = source.read(start, source.nbytes - start)
    end = tail.rfind(END_MAGIC)
    if end < 0 or end + END.size > len(tail):
        return b""
    fields = END.unpack_from(tail, end)
    nbytes, at = fields[5], fields[6]
    locator = end - LOCATOR.size
    if locator >= 0 and tail.startswith(LOCATOR_MAGIC, locator):
        end64_at = LOCATOR.unpack_from(tail, locator)[2]
        if end64_at + END64.size <= source.nbytes:
            wide = END64.unpack(source.read(end64_at, END64.size))
            nbytes, at = (wide[8], wide[9]) if wide[0] == END64_MAGIC else (nbytes, at)
    if at + nbytes > source.nbytes or nbytes > _LONGEST_DIRECTORY:
        return b""
    return source.read(at, nbytes)


def name_end(data: bytes, at: int) -> int:
    """Return the end of the name in the directory entry at an offset."""
    return at + CENTRAL.size + int(CENTRAL.unpack_from(data, at)[10])


def entry_nbytes(data: bytes, at: int) -> int:
    """Return the claimed length of the directory entry at an offset, without its comment."""
    if at + CENTRAL.size > len(data):
        return CENTRAL.size
    name_nbytes, extra_nbytes = CENTRAL.unpack_from(data, at)[10:12]
    return CENTRAL.size + int(name_nbytes) + int(extra_nbytes)


def entry_at(data: bytes, at: int) -> FoundEntry | None:
    """Return the directory entry at an offset, if it is possible."""
    if at + CENTRAL.size > len(data):
        return None
    fields = CENTRAL.unpack_from(data, at)
    magic, _, _, flags, method, _, _, crc32, stored, nbytes = fields[:10]
    name_nbytes, extra_nbytes, _, _, _, _, header_at = fields[10:]
    name_end = at + CENTRAL.size + name_nbytes
    if magic != CENTRAL_MAGIC or name_end + extra_nbytes > len(data) or flags & ODD_FLAGS:
        return None
    name = record_name(data[at + CENTRAL.size : name_end][: LONGEST_NAME + 1])
    wide = wide_field(data[name_end : name_end + extra_nbytes])
    values = []
    for value in (nbytes, stored, header_at):
        if value == MAX32 and len(wide) >= 8:
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        values.append(value)
    if name is None or method not in (STORED, DEFLATED):
        return None
    return FoundEntry(name, method, crc32, values[1], values[2])


def record_name(raw: bytes) -> str | None:
    """Return the name of a record, if it is possible."""
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return name if 0 < len(raw) <= LONGEST_NAME and name.isprintable() else None


def wide_field(extra: bytes) -> bytes:
    """Return the content of the zip64 extra field, if there is one."""
    at = 0
    for _ in range(_MOST_FIELDS):
        if at + 4 > len(extra):
            break
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    return b""
