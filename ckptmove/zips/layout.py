"""Compute the layout of a zip exactly as torch does: bytes and offsets. Writes nothing.

The rules, from caffe2/serialize/inline_container.cc and miniz as torch builds it:

* every record's payload starts at a multiple of the alignment (64 unless told otherwise), by an
  extra field `FB` in the local header, filled with `Z`;
* checksum and sizes are 0 in the local header and follow the payload in a descriptor, whose sizes
  take 8 bytes where the size or the offset needs it; an empty record has none;
* zip64 fields appear only where a size or offset reaches 4 GiB, but the zip64 end record always.

torch may compute where a storage lies instead of looking it up, so none of this is free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .archive import (
    CENTRAL,
    CENTRAL_MAGIC,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
    STORED,
    SUM_AT,
)
from .members import MAX32

ALIGNMENT = 64
_UTF8 = 0x0800
_MADE_BY, _NEEDED = 798, 45  # of the zip64 end record, as in miniz


class Member(NamedTuple):
    """A record to lay out; the fields are those of `archive.Record`."""

    name: str
    method: int
    crc32: int
    stored_nbytes: int
    nbytes: int


class PlacedRecord(NamedTuple):
    """A record in its place: `header` at `at`, then the payload at `data_at`, then `descriptor`."""

    member: Member
    at: int
    header: bytes
    data_at: int
    descriptor: bytes

    @property
    def end(self) -> int:
        """The offset after the record."""
        return self.data_at + self.member.stored_nbytes + len(self.descriptor)


def lay_out(members: Sequence[Member], alignment: int = ALIGNMENT) -> list[PlacedRecord]:
    """Return the place of each record, in sequence from offset 0."""
    laid: list[PlacedRecord] = []
    at = 0
    for member in members:
        laid.append(_lay(member, at, alignment))
        at = laid[-1].end
    return laid


def _lay(member: Member, at: int, alignment: int) -> PlacedRecord:
    name = member.name.encode("utf-8")
    big = _is_big(member)
    extra = b""
    if big or at >= MAX32:
        extra = struct.pack("<QQ", member.nbytes, 0) if big else b""  # miniz knows one of them yet
        extra += struct.pack("<Q", at) if at >= MAX32 else b""
        extra = struct.pack("<HH", 1, len(extra)) + extra
    pad = -(at + LOCAL.size + len(name) + len(extra) + 4) % alignment
    extra += b"FB" + struct.pack("<H", pad) + b"Z" * pad
    header = LOCAL.pack(
        *(LOCAL_MAGIC, _version_needed(member), _flags(member), member.method),
        *(0, 0, 0, 0, 0, len(name), len(extra)),
    )
    sizes = struct.Struct("<QQ" if big or at >= MAX32 else "<II")
    descriptor = b""
    if _flags(member) & HAS_DESCRIPTOR:
        descriptor = DESCRIPTOR_MAGIC + struct.pack("<I", member.crc32)
        descriptor += sizes.pack(member.stored_nbytes, member.nbytes)
    header += name + extra
    return PlacedRecord(member, at, header, at + len(header), descriptor)


def directory(laid: Sequence[PlacedRecord], at: int) -> bytes:
    """Return the zip directory at this offset, for records in this order, and the end records."""
    entries = b"".join(_entry(each) for each in laid)
    count, end64_at = len(laid), at + len(entries)
    end64 = END64.pack(
        END64_MAGIC, END64.size - 12, _MADE_BY, _NEEDED, 0, 0, count, count, len(entries), at
    )
    locator = LOCATOR.pack(LOCATOR_MAGIC, 0, end64_at, 1)
    short = min(count, 0xFFFF)
    end = END.pack(END_MAGIC, 0, 0, short, short, min(len(entries), MAX32), min(at, MAX32), 0)
    return entries + end64 + locator + end


def sums_in_directory(laid: Sequence[PlacedRecord]) -> Iterator[int]:
    """Return the offsets of the checksums of records, from the start of the directory."""
    at = SUM_AT
    for each in laid:
        yield at
        at += len(_entry(each))


def _entry(laid: PlacedRecord) -> bytes:
    member = laid.member
    name = member.name.encode("utf-8")
    extra = b""
    stored, nbytes, at = member.stored_nbytes, member.nbytes, laid.at
    if _is_big(member):
        extra += struct.pack("<QQ", nbytes, stored)
        stored = nbytes = MAX32
    if at >= MAX32:
        extra += struct.pack("<Q", at)
        at = MAX32
    if extra:
        extra = struct.pack("<HH", 1, len(extra)) + extra
    lengths = len(name), len(extra), 0
    head = CENTRAL.pack(
        *(CENTRAL_MAGIC, 0, _version_needed(member), _flags(member), member.method, 0, 0),
        *(member.crc32, stored, nbytes, *lengths, 0, 0, 0, at),
    )
    return head + name + extra


def _is_big(member: Member) -> bool:
    return member.nbytes >= MAX32 or member.stored_nbytes >= MAX32


def _flags(member: Member) -> int:
    return _UTF8 | HAS_DESCRIPTOR if member.nbytes or member.stored_nbytes else _UTF8


def _version_needed(member: Member) -> int:
    """Return the zip version that a reader needs, as miniz writes it."""
    return 0 if member.method == STORED else 20
