"""Find the records of a damaged zip by local headers, descriptors and directory entries.

torch writes the size and the checksum of a record behind its content. So a record ends where a
descriptor tells exactly the size of what lies before it. Where none does, it ends before the next
header that can be one. What the directory still says is used too, and never believed: bytes are
whole only if a checksum proves it.

All is read once or twice, and no more than a few times however hostile the file is.
"""

from __future__ import annotations

import re
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from typing import NamedTuple

from ..plans.crc32 import extend_crc32
from ..sources.source import MAX_NBYTES, Readable
from .archive import (
    CENTRAL,
    CENTRAL_MAGIC,
    DEFLATED,
    DESCRIPTOR_MAGIC,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MAGIC,
    STORED,
)
from .found_entries import (
    LONGEST_NAME,
    ODD_FLAGS,
    FoundEntry,
    directory_bytes,
    entry_at,
    entry_nbytes,
    name_end,
    record_name,
    wide_field,
)
from .layout import ALIGNMENT
from .members import MAX32

_MAGIC = re.compile(rb"PK(?:\x03\x04|\x07\x08|\x01\x02)")
_STEP = 1 << 20  # bytes read at once
_FIRST_STEP = 1 << 12  # bytes that are searched first
_MOST_RECORDS = 1_000_000
_READS = 4  # how often the whole file may be read
_LEAST_READ = 16 << 20
_HIT = 256  # cost of checking one magic number, in bytes
_RATIO = 64  # most inflated bytes per byte of the file, in total
_MOST_COMPARED = 10_000  # records
_FAR = 4 << 20  # bytes that are searched for records of another writer
_NUMBERED = re.compile(r"(.*/)(\d{1,8})")


class ProofLevel(Enum):
    """How well the bytes of a record are proven."""

    RIGHT = "its checksum is right"
    NONE = "it has no checksum"
    WRONG = "its checksum is wrong"
    CUT = "its end is missing"


class FoundRecord(NamedTuple):
    """A record, or the rest of one."""

    name: str
    method: int
    data_at: int
    #: bytes that are present, as stored in the file
    stored_nbytes: int
    crc32: int
    proof: ProofLevel
    header_at: int
    #: whether more than its own header confirms its name
    is_named_twice: bool = False


class _Header(NamedTuple):
    """A local header, and its offset."""

    name: str
    method: int
    flags: int
    crc32: int
    stored_nbytes: int
    data_at: int
    at: int


def find_records(source: Readable) -> dict[str, FoundRecord]:
    """Return the records of a zip by name, in the order of the file.

    If two records with one name differ, neither is proven.
    """
    return _Scan(source).run()


def has_two_layouts(source: Readable) -> bool:
    """Whether a zip has records that its directory lacks, or that differ from the directory.

    This happens if two programs write one file. It checks the headers of the first records, and a
    few MiB after the first one that differs from the directory.
    """
    scan = _Scan(source)
    entries = sorted(scan.entries.values(), key=lambda each: each.header_at)[:_MOST_COMPARED]
    places = {each.name: each.header_at for each in entries}
    zips = list[tuple[int, int]]()  # records that are zips with their own names
    first = wrong = others = 0
    for entry in entries:
        header = scan.header(entry.header_at)
        if header is not None and header.name == entry.name:
            end = header.data_at + entry.stored_nbytes
            described = source.read(end, 8) if end + 8 <= source.nbytes else bytes(8)
            magic, crc32 = described[:4], int.from_bytes(described[4:], "little")
            is_right = magic == DESCRIPTOR_MAGIC and crc32 == entry.crc32
            if is_right or not header.flags & HAS_DESCRIPTOR:
                if source.read(header.data_at, min(4, entry.stored_nbytes)) == LOCAL_MAGIC:
                    zips.append((entry.header_at, end))
                continue
            others += magic == DESCRIPTOR_MAGIC
        first, wrong = first if wrong else entry.header_at, wrong + 1
    if not wrong or (others and wrong > 1):
        return wrong > 0
    window = source.read(first, min(_FAR, source.nbytes - first))
    for found in islice(re.finditer(re.escape(LOCAL_MAGIC), window), _MOST_COMPARED):
        at = first + found.start()
        below = bisect_right(zips, (at, source.nbytes))
        inside = below > 0 and zips[below - 1][0] < at < zips[below - 1][1]
        header = None if inside else scan.header(at)
        if header is not None and places.get(header.name, at) != at:
            return True
    return False


def read_record(source: Readable, record: FoundRecord, at_most: int = MAX_NBYTES) -> bytes:
    """Return the remaining content of a record, at most this many bytes."""
    if record.method == STORED:
        return source.read(record.data_at, min(record.stored_nbytes, at_most))
    content = source.read(record.data_at, min(record.stored_nbytes, MAX_NBYTES))
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(
            content, min(at_most, max(1, _RATIO * len(content)))
        )
    except zlib.error:
        return b""


class _Scan:
    def __init__(self, source: Readable) -> None:
        self.source = source
        self.room = _LEAST_READ + _READS * source.nbytes  # bytes that may be read
        self.entries = {entry.header_at: entry for entry in self.directory()}

    def run(self) -> dict[str, FoundRecord]:
        found = dict[str, FoundRecord]()
        at: int | None = 0
        while at is not None and len(found) < _MOST_RECORDS and self.room > 0:
            header = self.next_header(at)
            if header is None:
                break
            record, at = self.record(header)
            self.add(found, record)
        for entry in self.entries.values():
            if entry.name not in found and len(found) < _MOST_RECORDS:
                record_of_entry = self.by_entry(entry)
                if record_of_entry is not None:
                    self.add(found, record_of_entry)
        return _with_order(found)

    def add(self, found: dict[str, FoundRecord], record: FoundRecord) -> None:
        before = found.get(record.name)
        if before is None:
            found[record.name] = record
        elif before.proof is ProofLevel.RIGHT is record.proof:
            if (before.crc32, before.stored_nbytes) != (record.crc32, record.stored_nbytes):
                found[record.name] = before._replace(proof=ProofLevel.WRONG)
        elif before.proof is not ProofLevel.RIGHT and record.proof is ProofLevel.RIGHT:
            found[record.name] = record._replace(proof=ProofLevel.NONE)  # one of two is not certain

    # -- headers -------------------------------------------------------------------------------

    def magics(self, at: int) -> Iterator[tuple[int, bytes]]:
        """Return the next magic numbers after an offset; the first is usually near."""
        step = _FIRST_STEP
        while at < self.source.nbytes and self.room > 0:
            data = self.source.read(at, min(step, self.source.nbytes - at))
            step = min(2 * step, _STEP)
            searched = 0
            for found in _MAGIC.finditer(data):
                self.room -= found.end() - searched + _HIT
                searched = found.end()
                yield at + found.start(), found[0]
            self.room -= len(data) - searched
            if at + len(data) >= self.source.nbytes:
                return
            at += len(data) - len(LOCAL_MAGIC) + 1

    def next_header(self, at: int) -> _Header | None:
        for where, magic in self.magics(at):
            if magic == LOCAL_MAGIC:
                header = self.header(where)
                if header is not None:
                    return header
            elif magic == CENTRAL_MAGIC:
                entry = self.entry(where)
                if entry is not None and len(self.entries) < _MOST_RECORDS:
                    self.entries.setdefault(entry.header_at, entry)
        return None

    def header(self, at: int) -> _Header | None:
        """Return the local header there, if it is possible."""
        source = self.source
        if at + LOCAL.size > source.nbytes:
            return None
        fields = LOCAL.unpack(source.read(at, LOCAL.size))
        _, _, flags, method, _, _, crc32, stored, nbytes, name_nbytes, extra_nbytes = fields
        data_at = at + LOCAL.size + name_nbytes + extra_nbytes
        if flags & ODD_FLAGS or method not in (STORED, DEFLATED) or data_at > source.nbytes:
            return None
        self.room -= name_nbytes
        name = record_name(source.read(at + LOCAL.size, min(name_nbytes, LONGEST_NAME + 1)))
        if name is None:
            return None
        if stored == MAX32 or nbytes == MAX32:
            self.room -= extra_nbytes
            wide = wide_field(source.read(data_at - extra_nbytes, extra_nbytes))
            if len(wide) < 16:
                return None
            nbytes, stored = struct.unpack_from("<QQ", wide)
        return _Header(name, method, flags, crc32, stored, data_at, at)

    def entry(self, at: int) -> FoundEntry | None:
        """Return the directory entry there, if it is possible."""
        source = self.source
        nbytes = entry_nbytes(source.read(at, min(CENTRAL.size, source.nbytes - at)), 0)
        if at + nbytes > source.nbytes:
            return None
        self.room -= nbytes
        return entry_at(source.read(at, nbytes), 0)

    def directory(self) -> Iterator[FoundEntry]:
        """Return the directory entries that make sense."""
        directory, position = directory_bytes(self.source), 0
        while position + CENTRAL.size <= len(directory) and self.room > 0:
            self.room -= entry_nbytes(directory, position)
            entry = entry_at(directory, position)
            behind = position + 4
            if entry is not None:
                yield entry
                behind = name_end(directory, position)  # its extra fields may have a wrong length
            found = directory.find(CENTRAL_MAGIC, behind)
            position = len(directory) if found < 0 else found

    # -- records -------------------------------------------------------------------------------

    def record(self, header: _Header) -> tuple[FoundRecord, int]:
        """Return the record of a header, and the offset to search for the next one."""
        entry = self.entries.get(header.at)
        named = entry is not None and entry.name == header.name
        if entry is not None and named:
            found = self.proven(header, entry.stored_nbytes, entry.crc32, named=True)
            if found is not None:
                return found, header.data_at + found.stored_nbytes
        if header.flags & HAS_DESCRIPTOR and not header.crc32 and not header.stored_nbytes:
            found, end = self.described(header)
        else:
            found, end = self.measured(header)
        return found._replace(is_named_twice=named), end

    def proven(
        self, header: _Header, stored_nbytes: int, crc32: int, *, named: bool = False
    ) -> FoundRecord | None:
        """Return the record, if it has this size and checksum."""
        if header.data_at + stored_nbytes > self.source.nbytes:
            return None
        if (crc32 or not stored_nbytes) and self.sum(header, stored_nbytes) == crc32:
            return _make_record(header, stored_nbytes, crc32, ProofLevel.RIGHT)._replace(
                is_named_twice=named
            )
        return None

    def measured(self, header: _Header) -> tuple[FoundRecord, int]:
        """Return a record whose header has its size."""
        there = min(header.stored_nbytes, self.source.nbytes - header.data_at)
        if there < header.stored_nbytes:
            return _make_record(header, there, 0, ProofLevel.CUT), header.data_at
        proof = self.judged(header, there, header.crc32)
        end = header.data_at + there
        follows = self.source.read(end, min(2, self.source.nbytes - end))
        return _make_record(header, there, header.crc32, proof), end if follows == b"PK" else (
            header.data_at
        )

    def described(self, header: _Header) -> tuple[FoundRecord, int]:
        """Return a record whose descriptor has its size."""
        next_at = None  # of a possible next record, or the directory
        for at, magic in self.magics(header.data_at):
            if magic == DESCRIPTOR_MAGIC:
                told = self.descriptor(at, at - header.data_at)
                if told is not None:
                    proof = self.judged(header, at - header.data_at, told)
                    return _make_record(header, at - header.data_at, told, proof), at + 16
            elif next_at is None:
                header_there = self.header(at) if magic == LOCAL_MAGIC else self.entry(at)
                next_at = at if header_there is not None else None
        end = self.source.nbytes if next_at is None else next_at
        return _make_record(header, end - header.data_at, 0, ProofLevel.CUT), end

    def descriptor(self, at: int, nbytes: int) -> int | None:
        """Return the checksum in a descriptor for this many stored bytes; None if it is not one."""
        data = self.source.read(at + 4, min(20, self.source.nbytes - at - 4))
        for form in (struct.Struct("<IQQ"), struct.Struct("<III")):
            if len(data) >= form.size:
                crc32, stored, _ = form.unpack_from(data)
                if stored == nbytes:
                    return int(crc32)
        return None

    def by_entry(self, entry: FoundEntry) -> FoundRecord | None:
        """Return a record with a damaged header, at its offset in the directory."""
        lead = entry.header_at + LOCAL.size
        if lead > self.source.nbytes or self.room <= 0:
            return None
        sizes = struct.unpack("<HH", self.source.read(lead - 4, 4))
        named = len(entry.name.encode("utf-8", "surrogatepass"))
        starts = (lead + sum(sizes), -(-(lead + named + 4) // ALIGNMENT) * ALIGNMENT)
        for data_at in starts:
            header = _Header(entry.name, entry.method, 0, 0, 0, data_at, entry.header_at)
            found = self.proven(header, entry.stored_nbytes, entry.crc32, named=True)
            if found is not None:
                return found
        there = min(entry.stored_nbytes, max(0, self.source.nbytes - starts[1]))
        header = _Header(entry.name, entry.method, 0, 0, 0, starts[1], entry.header_at)
        return _make_record(header, there, 0, ProofLevel.WRONG) if there else None

    def judged(self, header: _Header, stored_nbytes: int, crc32: int) -> ProofLevel:
        if not stored_nbytes:
            return ProofLevel.NONE if crc32 else ProofLevel.RIGHT
        if not crc32:
            return ProofLevel.NONE
        return ProofLevel.RIGHT if self.sum(header, stored_nbytes) == crc32 else ProofLevel.WRONG

    def sum(self, header: _Header, stored_nbytes: int) -> int:
        """Return the checksum of a record's content; -1 if it can't be computed."""
        machine = zlib.decompressobj(-zlib.MAX_WBITS) if header.method == DEFLATED else None
        crc32, end = 0, header.data_at + stored_nbytes
        for at in range(header.data_at, end, _STEP):
            data = self.source.read(at, min(_STEP, end - at))
            self.room -= len(data)
            while data:
                content = data
                if machine is not None:
                    try:
                        content = machine.decompress(data, _STEP)
                    except zlib.error:
                        return -1
                    data = machine.unconsumed_tail
                    self.room -= len(content) // _RATIO
                else:
                    data = b""
                crc32 = extend_crc32(crc32, content)
                if self.room <= 0:
                    return -1
        return crc32 if machine is None or machine.eof else -1


def _make_record(header: _Header, stored_nbytes: int, crc32: int, proof: ProofLevel) -> FoundRecord:
    return FoundRecord(
        header.name, header.method, header.data_at, stored_nbytes, crc32, proof, header.at
    )


def _with_order(found: dict[str, FoundRecord]) -> dict[str, FoundRecord]:
    """Accept consecutive numbers of records as a proof of their names.

    A checksum covers only the content: a flipped bit in the name would make it another record.
    """
    last: dict[str, int] = {}
    for record in sorted(found.values(), key=lambda each: each.header_at):
        numbered = _NUMBERED.fullmatch(record.name)
        if numbered is None:
            continue
        folder, number = numbered[1], int(numbered[2])
        if number == last.get(folder, -1) + 1:
            found[record.name] = record._replace(is_named_twice=True)
        last[folder] = number
    return found
