"""The zip that torch.save lays out around a pickle and its storages: see `zip` for the records."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from ...plans.plan import Write
from ...zips.archive import STORED
from ...zips.layout import LaidOut, Member, directory, lay_out

PICKLE = "data.pkl"
#: The small records, as torch 2.13 has them, before and after the storages.
_BEFORE = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
_VERSION = b"3\n"
_ID_NBYTES = 40


class Frame:
    """All records of a zip in their places, but for the bytes of the storages."""

    def __init__(
        self,
        stem: str,
        pickle: bytes,
        storages: Sequence[tuple[int, int]],
        further: Mapping[str, bytes] | None = None,
    ) -> None:
        """Lay out a file with this stem.

        `storages` has the size of each, and its CRC-32, or 0 where that is not known yet; `further`
        are records beside those of torch.
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
        #: which have a checksum from the start: all but the identity, and storages without
        self._summed = {
            n for n, each in enumerate(self._members[:-1]) if each.crc32 or not each.nbytes
        }
        self._end = self._laid[-1].end
        self.nbytes = self._end + len(directory(self._laid, self._end))

    def data_at(self, n: int) -> int:
        """Where a storage begins."""
        return self._laid[self._first + n].data_at

    def writes(self) -> list[Write]:
        """What can be written before all checksums are known."""
        laid = self._laid
        found = [Write(place.at, place.header) for place in laid]
        found += [_ending(laid[n]) for n in self._summed if laid[n].descriptor]
        contents = zip(laid, self._fixed.values(), strict=False)
        found += [Write(place.data_at, content) for place, content in contents if content]
        found.append(Write(laid[-2].data_at, _VERSION))
        return found

    def sealed(self, crcs: Mapping[int, int]) -> list[Write]:
        """What can only be written once all checksums are known: descriptors, and the directory.

        `crcs` has those of the storages that were laid out without, by number. The identity is a
        number as torch makes one: of the names of the records, and of their contents.
        """
        members = [
            each if n - self._first not in crcs else each._replace(crc32=crcs[n - self._first])
            for n, each in enumerate(self._members)
        ]
        import hashlib  # here, since only who writes needs it

        names = hashlib.sha256("\0".join(each.name.partition("/")[2] for each in members).encode())
        sums = hashlib.sha256(b"".join(each.crc32.to_bytes(4, "little") for each in members[:-1]))
        numbers = (int.from_bytes(each.digest()[:8], "little") for each in (names, sums))
        identity = b"".join(str(number).zfill(20).encode() for number in numbers)
        members[-1] = _member(members[-1].name, identity)
        laid = [_with(place, each) for place, each in zip(self._laid, members, strict=True)]
        late = [each for n, each in enumerate(laid) if n not in self._summed]
        writes, at = [_ending(each) for each in late], self._end
        return [*writes, Write(laid[-1].data_at, identity), Write(at, directory(laid, at))]


def _member(name: str, content: bytes) -> Member:
    return Member(name, STORED, zlib.crc32(content), len(content), len(content))


def _ending(place: LaidOut) -> Write:
    return Write(place.end - len(place.descriptor), place.descriptor)


def _with(place: LaidOut, member: Member) -> LaidOut:
    """The same place, of a member with another checksum."""
    crc32, sizes = member.crc32.to_bytes(4, "little"), place.descriptor[8:]
    descriptor = place.descriptor and place.descriptor[:4] + crc32 + sizes
    return place._replace(member=member, descriptor=descriptor)
