"""Zips with other bytes in some records, laid out again by Python or as torch's C++ writer does."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

Edit = Callable[[str, bytes], bytes]

ALIGNMENT = 64
CHECKED_LATER = 0x8  # the flag of a record whose sizes follow it
UTF8 = 0x800
DEFLATE_NEEDS = 20  # the version needed; 0 of what is stored


class Laid(NamedTuple):
    name: bytes
    method: int
    crc: int
    packed: int
    size: int
    at: int

    @property
    def flags(self) -> int:
        """An empty record has no descriptor."""
        return UTF8 | (CHECKED_LATER if self.size else 0)

    @property
    def needs(self) -> int:
        return DEFLATE_NEEDS if self.method == zipfile.ZIP_DEFLATED else 0

    def directory_entry(self) -> bytes:
        """As miniz writes it: its version and attributes are 0."""
        versions = (0, self.needs, self.flags, self.method, 0, 0)
        sizes = (self.crc, self.packed, self.size)
        rest = (len(self.name), 0, 0, 0, 0, 0, self.at)
        return struct.pack("<4s6H3I5H2I", b"PK\1\2", *versions, *sizes, *rest) + self.name


def rezipped(
    source: Path, path: Path, edit: Callable[[str, bytes], bytes | None], *, deflated: bool = False
) -> Path:
    """A zip of Python's with the same records, as `edit` gives them by their whole names.

    It gives None for a record that is left out.
    """
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", method) as new:
        for name in old.namelist():
            content = edit(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return path


def big_endian(source: Path, path: Path, widths: dict[str, int], *, deflated: bool = False) -> Path:
    """As a machine would have saved it that puts the most significant byte first.

    `widths` are those of the numbers in each storage, by its key.
    """

    def swapped(name: str, data: bytes) -> bytes:
        folder, _, key = name.partition("/")[2].rpartition("/")
        if folder != "data":
            return b"big" if key == "byteorder" else data
        return np.frombuffer(data, np.uint8).reshape(-1, widths[key])[:, ::-1].tobytes()

    return rezipped(source, path, swapped, deflated=deflated)


def relay(path: Path, edit: Edit) -> None:
    """Rewrite the zip at `path`, with `edit(name, data)` in each record.

    The name is without its prefix. Other records are copied as they are, deflated or not. Records
    are below 4 GiB.
    """
    out = bytearray()
    laid = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            old = archive.read(info)
            new = edit(info.filename.partition("/")[2], old)
            packed = _packed(path, info) if new == old else _pack(new, info.compress_type)
            laid.append(_append(out, info, new, packed))
    start = len(out)
    out += b"".join(record.directory_entry() for record in laid)
    path.write_bytes(bytes(out) + _end(start, len(out) - start, len(laid)))


def _append(out: bytearray, info: zipfile.ZipInfo, data: bytes, packed: bytes) -> Laid:
    name, crc = info.filename.encode(), zlib.crc32(data)
    record = Laid(name, info.compress_type, crc, len(packed), len(data), len(out))
    padding = b"Z" * (-(len(out) + 30 + len(name) + 4) % ALIGNMENT)
    extra = b"FB" + struct.pack("<H", len(padding)) + padding
    numbers = (record.needs, record.flags, record.method, 0, 0, 0, 0, 0, len(name), len(extra))
    out += struct.pack("<4s5H3I2H", b"PK\3\4", *numbers) + name + extra + packed
    if record.size:
        out += struct.pack("<4s3I", b"PK\7\x08", crc, len(packed), len(data))
    return record


def _packed(path: Path, info: zipfile.ZipInfo) -> bytes:
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name, extra = struct.unpack("<26xHH", file.read(30))
        file.seek(name + extra, 1)
        return file.read(info.compress_size)


def _pack(data: bytes, method: int) -> bytes:
    if method == zipfile.ZIP_STORED:
        return data
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


def _end(start: int, size: int, count: int) -> bytes:
    """The zip64 end, its locator, and the end, which torch always writes."""
    sizes = (count, count, size, start)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 798, 45, 0, 0, *sizes)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    return end64 + locator + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, *sizes, 0)
