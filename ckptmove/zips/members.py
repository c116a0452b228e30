"""The members of a zip file, possibly hundreds of thousands, stored in columns."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import gt
from typing import NamedTuple

from ..errors import CorruptError


class Record(NamedTuple):
    """A member of the archive, from its directory entry."""

    name: str
    #: STORED or DEFLATED
    method: int
    flags: int
    #: CRC-32 of the content; 0 for a record with content means that none was computed
    crc32: int
    #: bytes in the file
    stored_nbytes: int
    #: bytes of the content
    nbytes: int
    #: offset of the local header
    header_at: int
    #: offset of the directory entry
    entry_at: int

    @property
    def lacks_checksum(self) -> bool:
        """Whether the writer left the checksum out (`torch.serialization.set_crc32_options`)."""
        return self.crc32 == 0 and self.nbytes > 0


class Records(Mapping[str, Record]):
    """The records by name, in directory order; a `Record` is made at each access.

    So a record takes a hundred bytes and its name, instead of four hundred.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        #: for each record, all fields besides its name, then the offset of its content, or 0
        self._numbers = array("Q")

    def append(self, record: Record) -> None:
        """Add a record with a new name."""
        self.add(record.name, record[1:])

    def add(self, name: str, numbers: tuple[int, ...]) -> bool:
        """Add a record with these fields; False if the name exists."""
        columns = self._numbers
        if self._rows.setdefault(name, len(columns)) != len(columns):
            return False
        columns.extend(numbers)
        columns.append(0)
        return True

    def add_all(self, names: Sequence[str], numbers: Iterable[tuple[int, ...]]) -> bool:
        """Add records, with fields that end with `data_at`; none, and False, if a name exists."""
        start = len(self._numbers)
        if len(set(names)) != len(names) or not self._rows.keys().isdisjoint(names):
            return False
        self._rows.update(zip(names, count(start, _WIDTH), strict=False))
        self._numbers.extend(chain.from_iterable(numbers))
        return True

    def alike(self) -> str | None:
        """Return the first name that equals an earlier one except for case, or None."""
        names = "\n".join(self._rows)
        if names == names.casefold():  # avoid a copy of each
            return None
        folded: set[str] = set()
        for name in self._rows:
            before = len(folded)
            folded.add(name.casefold())
            if len(folded) == before:
                return name
        return None

    def number(self, name: str) -> int:
        """Return the number of a record in the directory, from 0 on."""
        return self._rows[name] // _WIDTH

    def data_at(self, name: str) -> int:
        """Return the offset of a record's content, or 0 if it was not noted."""
        return self._numbers[self._rows[name] + _WIDTH - 1]

    def stored(self, names: Iterable[str]) -> Iterator[tuple[int, int, int]]:
        """Return number, size and offset of the content of stored records; 0 if unknown."""
        rows, numbers = self._rows, self._numbers
        for name in names:
            row = rows.get(name, -1)
            if row < 0 or numbers[row]:  # 0 is STORED
                yield 0, 0, 0
            else:
                yield row // _WIDTH, numbers[row + _NBYTES], numbers[row + _WIDTH - 1]

    def stored_crc32(self, name: str) -> int:
        """Return the checksum of a stored (uncompressed) record; 0 for others."""
        row, numbers = self._rows[name], self._numbers
        return 0 if numbers[row] else numbers[row + _CRC32]  # 0 is STORED

    def note_data_at(self, name: str, at: int) -> None:
        """Note the offset of the content, from the local header."""
        self._numbers[self._rows[name] + _WIDTH - 1] = at

    def starts(self) -> array[int]:
        """Return the offset of the content of each record, 0 where it was not noted."""
        return self._numbers[_WIDTH - 1 :: _WIDTH]

    def note_starts(self, starts: array[int]) -> None:
        """Note the offset of the content of each record."""
        self._numbers[_WIDTH - 1 :: _WIDTH] = starts

    def column(self, field: str) -> array[int]:
        """Return one numeric field of all records."""
        return self._numbers[Record._fields.index(field) - 1 :: _WIDTH]

    def checksums(self) -> Iterator[tuple[str, int, int, int]]:
        """Return name, size, checksum and `data_at` of each stored record with content and a sum.

        `data_at` is 0 where it was not noted.
        """
        columns = [*map(self.column, ("method", "nbytes", "crc32")), self.starts()]
        rows = zip(self._rows, *columns, strict=True)
        return (
            (name, nbytes, crc32, at)
            for name, method, nbytes, crc32, at in rows
            if not method and nbytes and crc32
        )  # 0 is STORED

    def by_header(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Return the records in order of their local headers: number, name and other fields."""
        columns = [self.column(field) for field in Record._fields[1:]]
        headers = columns[_HEADER_AT]
        rows = zip(count(), self._rows, zip(*columns, strict=True), strict=False)
        if any(map(gt, headers, headers[1:])):
            return iter(sorted(rows, key=lambda row: row[2][_HEADER_AT]))
        return rows

    def __getitem__(self, name: str) -> Record:
        at = self._rows[name]
        return Record(name, *self._numbers[at : at + _WIDTH - 1])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


_WIDTH = len(Record._fields)
_CRC32, _NBYTES, _HEADER_AT = (
    Record._fields.index(name) - 1 for name in ("crc32", "nbytes", "header_at")
)


# -- the fields of their headers that have no fixed place: names, and zip64 ----------------------

#: The placeholder of a number that is in the zip64 field.
MAX32 = 0xFFFFFFFF


def name_of(raw: bytes) -> str:
    """Decode the name of a record: UTF-8, or the code page of DOS."""
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        name = raw.decode("cp437")
    if "\0" in name:
        raise CorruptError("a record's name holds a NUL byte")
    return name


def widen_sizes(narrow: tuple[int, int, int], wide: bytes, name: str) -> list[int]:
    """Return sizes and offset of a directory entry, from the zip64 field if they do not fit."""
    values = []
    for value in narrow:
        if value == MAX32:
            if len(wide) < 8:
                raise CorruptError(f"the sizes of the record {name!r} are missing")
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        values.append(value)
    return values


def zip64_of(extra: bytes, name: str) -> bytes:
    """Return the content of the zip64 extra field; empty if there is none."""
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
