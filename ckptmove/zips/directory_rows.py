"""Parse many entries of a zip directory at once, if their names have one length, as torch's.

torch numbers the records of tensors, so that thousands of entries in a row differ only in checksum,
sizes, place and name. Each of their fields is a column of bytes at a fixed step: equal fields are
compared column by column, and the others are unpacked in one go.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from .members import MAX32

_NAME_AT, _LOCAL_NBYTES = 46, 30
#: Of an entry the bytes that are to be as in the first: signature, flags, method, length of the
#: name, of the extra field, of the comment, disk and attributes.
_SAME = (*range(4), *range(8, 12), *range(28, 36), *range(38, 42))
_ZERO = (10, 11, *range(30, 36), *range(38, 42))  # those that are 0 in a plain entry
_FLAGS_AT, _NAME_NBYTES_AT = 8, 28
_LONGEST_NAME = 128  # bytes; longer entries would make a row too large


class EntryRow(NamedTuple):
    """Plain entries that follow each other."""

    names: list[str]
    #: the fields of each record besides its name
    numbers: Iterable[tuple[int, ...]]
    nbytes: int


def row_at(
    directory: bytes, at: int, count: int, directory_at: int, refused: int
) -> EntryRow | None:
    """Return the next `count` entries, if they are plain, alike, and without refused flags.

    None if one of them must be parsed separately. `directory_at` is the directory's offset in the
    file.
    """
    first = directory[at : at + _NAME_AT]
    if len(first) < _NAME_AT or any(first[n] for n in _ZERO):
        return None
    flags, name_nbytes = (
        int.from_bytes(first[n : n + 2], "little") for n in (_FLAGS_AT, _NAME_NBYTES_AT)
    )
    step = _NAME_AT + name_nbytes
    if not 0 < name_nbytes <= _LONGEST_NAME or flags & refused:
        return None
    part = directory[at : at + count * step]
    if len(part) < count * step:
        return None
    if not all(part[n::step] == first[n : n + 1] * count for n in _SAME):
        return None
    layout = struct.Struct(f"<16x3I14xI{name_nbytes}s")
    sums, stored, sizes, headers, raw = zip(*layout.iter_unpack(part), strict=True)
    text = b"".join(raw)
    if (
        stored != sizes
        or max(map(sum, zip(headers, sizes, strict=True))) + _LOCAL_NBYTES > directory_at
        or max(headers) == MAX32
        or max(sizes) == MAX32
        or not text.isascii()
        or b"\0" in text
        or b"/" in part[step - 1 :: step]
    ):
        return None
    joined = text.decode()
    names = [joined[n : n + name_nbytes] for n in range(0, len(joined), name_nbytes)]
    entries = range(directory_at + at, directory_at + at + len(part), step)
    numbers = zip(
        repeat(0), repeat(flags), sums, stored, sizes, headers, entries, repeat(0), strict=False
    )
    return EntryRow(names, numbers, len(part))
