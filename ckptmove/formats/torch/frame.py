"""The zip that torch.save writes around a pickle and its storages: see `zip` for the records."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module

from ...plans.plan import Write
from ...zips.archive import STORED
from ...zips.layout import Member, PlacedRecord, directory, lay_out, sums_in_directory

PICKLE = "data.pkl"
#: The small records before and after the storages, as in torch 2.13.
_BEFORE = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
_VERSION = b"3\n"
_ID_NBYTES = 40


class Frame:
    """The layout of all records of a zip; everything except the bytes of the storages."""

    def __init__(
        self,
        stem: str,
        pickle: bytes,
        storages: Sequence[tuple[int, int]],
        further: Mapping[str, bytes] | None = None,
    ) -> None:
        """Lay out a file with this stem.

        `storages` has the size and CRC-32 of each storage; the CRC-32 is 0 if it is not known yet.
        `further` are records that torch does not write.
        """
        prefix = f"{stem}/"
        self._fixed = {PICKLE: pickle, **_BEFORE, **(further or {})}
        self._members = [_member(prefix + name, each) for name, each in self._fixed.items()]
        self._first = len(self._members)
        self._members += [
            Member(f"{prefix}data/{n}", STORED, crc32, nbytes, nbytes)
            for n, (nbytes, crc32) in enumerate(storages)
        ]
        self._members.append(_member(f"{prefix}version", _VERSION))
        self._members.append(_member(f"{prefix}.data/serialization_id", b"0" * _ID_NBYTES))
        self._laid = lay_out(self._members)
        #: indexes of records with a known checksum: all but the identity and storages without one
        self._summed = {
            n for n, each in enumerate(self._members[:-1]) if each.crc32 or not each.nbytes
        }
        self._end = self._laid[-1].end
        self.nbytes = self._end + len(directory(self._laid, self._end))

    def data_at(self, n: int) -> int:
        """The offset of the bytes of a storage."""
        return self._laid[self._first + n].data_at

    def writes(self) -> list[Write]:
        """The writes that are possible before all checksums are known."""
        laid = self._laid
        found = [Write(place.at, place.header) for place in laid]
        found += [_ending(laid[n]) for n in self._summed if laid[n].descriptor]
        contents = zip(laid, self._fixed.values(), strict=False)
        found += [Write(place.data_at, content) for place, content in contents if content]
        found.append(Write(laid[-2].data_at, _VERSION))
        return found

    def final_writes(self, crcs: Mapping[int, int]) -> list[Write]:
        """The writes that need all checksums: descriptors, and the directory.

        `crcs` has the checksums that were missing, by number of the storage. The identity is a
        number like torch makes: from the names of the records, and from their contents.
        """
        last = len(self._members) - 1
        sums = [each.crc32 for each in self._members[:last]]
        for n, crc32 in crcs.items():
            sums[self._first + n] = crc32
        digest = _sha256(struct.pack(f"<{last}I", *sums))
        identity = b"".join(str(_number(each)).zfill(20).encode() for each in (self._names, digest))
        sums.append(zlib.crc32(identity))
        found, places = self._directory
        content, writes = bytearray(found), list[Write]()
        for n in self._late:
            place, known = self._laid[n], sums[n].to_bytes(4, "little")
            content[places[n] : places[n] + 4] = known
            ending = place.descriptor[:4] + known + place.descriptor[8:]
            writes.append(Write(place.end - len(ending), ending))
        return [
            *writes,
            Write(self._laid[last].data_at, identity),
            Write(self._end, bytes(content)),
        ]

    @cached_property
    def _late(self) -> list[int]:
        """The indexes of the records whose checksums are known last."""
        return [n for n in range(len(self._members)) if n not in self._summed]

    @cached_property
    def _names(self) -> bytes:
        """The digest of the names of all records."""
        names = "\0".join(each.name.partition("/")[2] for each in self._members)
        return _sha256(names.encode())

    @cached_property
    def _directory(self) -> tuple[bytes, Sequence[int]]:
        """The directory with the checksums known so far, and the offset of each checksum in it."""
        return directory(self._laid, self._end), array("Q", sums_in_directory(self._laid))


def _sha256(data: bytes) -> bytes:
    """The SHA-256, by Python's own module: OpenSSL takes longer to load than a file to write."""
    for name in ("_sha2", "_sha256"):  # since Python 3.12, and before
        with suppress(ImportError):
            digest: bytes = import_module(name).sha256(data).digest()
            return digest
    return import_module("hashlib").sha256(data).digest()  # type: ignore[no-any-return]


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _member(name: str, content: bytes) -> Member:
    return Member(name, STORED, zlib.crc32(content), len(content), len(content))


def _ending(place: PlacedRecord) -> Write:
    return Write(place.end - len(place.descriptor), place.descriptor)
