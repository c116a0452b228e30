"""The fields of a zip's headers that have no fixed place: names, and zip64."""

from __future__ import annotations

import struct

from ..errors import CorruptError

#: Stands for a number that is in the zip64 field.
MAX32 = 0xFFFFFFFF


def name_of(raw: bytes) -> str:
    """The name of a record: UTF-8, or what DOS had."""
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        name = raw.decode("cp437")
    if "\0" in name:
        raise CorruptError("a record's name holds a NUL byte")
    return name


def widened(narrow: tuple[int, int, int], wide: bytes, name: str) -> list[int]:
    """Sizes and offset of a directory entry, with those that do not fit it from its zip64 field."""
    values = []
    for value in narrow:
        if value == MAX32:
            if len(wide) < 8:
                raise CorruptError(f"the sizes of the record {name!r} are missing")
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        values.append(value)
    return values


def zip64_of(extra: bytes, name: str) -> bytes:
    """The zip64 extra field's content, or nothing."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, position)
        position += 4
        if position + nbytes > len(extra):
            raise CorruptError(f"an extra field of the record {name!r} is truncated")
        if kind == 1:
            return extra[position : position + nbytes]
        position += nbytes
    return b""
