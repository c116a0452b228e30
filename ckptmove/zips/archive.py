"""Read the directory of a zip file strictly: it has one meaning, or it is an error.

Zip readers disagree if a file contradicts itself, and such files can pass checks unnoticed. So
names that occur twice (torch looks them up without regard to case), entries that overlap, local
headers that differ from the directory, encryption, unknown methods and sizes beyond the file are
all refused. What torch itself writes or reads without doubt is accepted: data descriptors, zip64
with or without need, comments, a few bytes after the end.

Source: PKWARE APPNOTE 6.3.10; what torch writes: caffe2/serialize/inline_container.cc and its
miniz (third_party/miniz).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from ..errors import CorruptError, UnsupportedError
from ..sources.budget import Budget
from ..sources.source import MAX_NBYTES, Readable
from .directory_rows import row_at
from .members import MAX32, Record, Records, name_of, widen_sizes, zip64_of

STORED, DEFLATED = 0, 8
HAS_DESCRIPTOR = 0x0008
_REFUSED_FLAGS = {0x0001: "encrypted", 0x0020: "patch data", 0x0040: "encrypted", 0x2000: "masked"}
_ANY_REFUSED = 0x2061

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
SUM_AT = 16  # offset of the checksum in a directory entry
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
LOCAL_MAGIC, CENTRAL_MAGIC, END_MAGIC = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END64_MAGIC, LOCATOR_MAGIC, DESCRIPTOR_MAGIC = b"PK\6\6", b"PK\6\7", b"PK\7\10"
_MAX16 = 0xFFFF
_MAX_ENTRIES = 2_000_000
_MAX_DIRECTORY_NBYTES = 512 << 20
_DIRECTORY_ATTRIBUTE = 0x10  # of MS-DOS, which torch's zip reader respects
USUAL_EXTRA = 96  # bytes of an extra field read with the header; torch's are shorter
DESCRIPTOR_NBYTES = 24  # the longest
_WIDE_SIZES = struct.Struct("<QQ")
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<3I"), struct.Struct("<IQQ")
_SHORTEST_ROW, _LONGEST_ROW = 1 << 4, 1 << 12  # entries parsed at once
_MAX_RATIO = 1032  # the highest ratio of deflate


class Archive:
    """The records of one zip file."""

    def __init__(
        self, source: Readable, budget: Budget | None = None, *, tail: int | None = None
    ) -> None:
        """Read the directory; the rest of the file is not touched.

        `budget` limits the bytes inflated from the file; without it, the archive makes its own.
        `tail`: the number of bytes at the end to read first; they usually hold the whole directory.
        """
        self.source = source
        #: in directory order
        self.records = Records()
        self._budget = Budget() if budget is None else budget
        self._granted: set[str] = set()  # compressed records that were counted
        if tail is None or not self._is_within(tail):
            self._find_directory()
        self._read_directory()

    # -- the directory -------------------------------------------------------------------------

    def _is_within(self, tail: int) -> bool:
        """Find the directory in this many bytes at the end; return whether they hold it all."""
        window_at = max(0, self.source.nbytes - tail)
        window = self.source.read(window_at, self.source.nbytes - window_at)
        end = len(window) - END.size
        self.trailing_nbytes = 0
        return (
            0 <= end == window.rfind(END_MAGIC)
            and END.unpack_from(window, end)[7] == 0
            and self._locate(window, window_at, end)
            and self.directory_at >= window_at
            and not self._another_end(window[:end], window_at)
        )

    def _find_directory(self) -> None:
        """Use the last end record, as torch does; there must be no other."""
        source = self.source
        window_at = max(0, source.nbytes - END.size - _MAX16)
        window = source.read(window_at, source.nbytes - window_at)
        end = window.rfind(END_MAGIC)
        if end < 0 or end + END.size > len(window):
            raise CorruptError("the zip directory is missing: the file is truncated or damaged")
        comment_nbytes = END.unpack_from(window, end)[7]
        self.trailing_nbytes = len(window) - end - END.size - comment_nbytes
        if self.trailing_nbytes < 0 or not self._locate(window, window_at, end):
            if self._follows_another(window, window_at, end):
                raise UnsupportedError(
                    "is several zip files in a row, like a shard of a distributed checkpoint"
                )
            raise CorruptError("the zip directory is damaged: it does not lie where it should")
        if self._another_end(window[:end], window_at):
            raise CorruptError("the file has two zip directories: readers would disagree on it")

    def _follows_another(self, window: bytes, window_at: int, end: int) -> bool:
        """Whether the archive that ends there starts after the start of the file."""
        _, _, _, _, _, nbytes, at, _ = END.unpack_from(window, end)
        locator = end - LOCATOR.size
        if locator >= 0 and window[locator : locator + 4] == LOCATOR_MAGIC:
            end = locator - END64.size
        start = window_at + end - at - nbytes
        return start > 0 and self.source.read(start, 4) == LOCAL_MAGIC

    def _another_end(self, window: bytes, window_at: int) -> bool:
        """Whether earlier bytes, outside of all records, could be taken for the end record."""
        at = window.find(END_MAGIC, max(0, self.directory_at - window_at))
        while at >= 0:
            if at + END.size <= len(window):
                _, _, _, _, _, nbytes, directory_at, _ = END.unpack_from(window, at)
                if directory_at == MAX32 or directory_at + nbytes <= window_at + at:
                    return True
            at = window.find(END_MAGIC, at + 1)
        return False

    def _locate(self, window: bytes, window_at: int, end: int) -> bool:
        """Take the directory's place from the end record at `end`; return if it is possible."""
        _, disk, first_disk, here, entries, nbytes, at, _ = END.unpack_from(window, end)
        directory_end = window_at + end
        locator = end - LOCATOR.size
        if locator >= 0 and window[locator : locator + 4] == LOCATOR_MAGIC:
            _, locator_disk, end64_at, disks = LOCATOR.unpack_from(window, locator)
            if end64_at + END64.size != window_at + locator or locator_disk or disks > 1:
                return False
            record = END64.unpack(self.source.read(end64_at, END64.size))
            if record[0] != END64_MAGIC or record[1] != END64.size - 12:
                return False
            narrow = ((here, _MAX16), (entries, _MAX16), (nbytes, MAX32), (at, MAX32))
            for (value, limit), wide in zip(narrow, record[6:10], strict=True):
                if value not in (limit, wide):
                    return False
            disk, first_disk = record[4], record[5]
            here, entries, nbytes, at = record[6:10]
            directory_end = end64_at
        self.directory_at, self.directory_nbytes, self._entries = at, nbytes, entries
        return bool(disk == first_disk == 0 and here == entries and at + nbytes == directory_end)

    def _read_directory(self) -> None:
        if (
            self._entries > _MAX_ENTRIES
            or self._entries * CENTRAL.size > self.directory_nbytes
            or self.directory_nbytes > _MAX_DIRECTORY_NBYTES
        ):
            raise CorruptError(f"the zip directory claims {self._entries:,} entries: damaged")
        directory = self.source.read(self.directory_at, self.directory_nbytes)
        position, left, most = 0, self._entries, _SHORTEST_ROW
        while left:
            count = min(most, left)
            nbytes = self._take_row(directory, position, count)
            if nbytes:
                position, left, most = position + nbytes, left - count, min(2 * most, _LONGEST_ROW)
            elif most > _SHORTEST_ROW:
                most //= 2
            else:
                for _ in range(count):
                    position += self._take_entry(directory, position)
                left -= count
        if position != len(directory):
            raise CorruptError("the zip directory holds more than its entries")
        twice = self.records.alike()
        if twice is not None:
            raise CorruptError(f"the record {twice!r} occurs twice")

    def _take_row(self, directory: bytes, at: int, count: int) -> int:
        """Add the records of similar plain entries; return their size, or 0 if one differs."""
        row = None
        if directory.startswith(CENTRAL_MAGIC, at):
            row = row_at(directory, at, count, self.directory_at, _ANY_REFUSED)
        return row.nbytes if row and self.records.add_all(row.names, row.numbers) else 0

    def _take_entry(self, directory: bytes, at: int) -> int:
        """Add the record of an entry; return its size."""
        if at + CENTRAL.size > len(directory):
            raise CorruptError("the zip directory is truncated")
        nbytes = self._take_usual(directory, at)
        if not nbytes:
            record, nbytes = self._entry(directory, at)
            if record.name in self.records:
                raise CorruptError(f"the record {record.name!r} occurs twice")
            self.records.append(record)
        return nbytes

    def _take_usual(self, directory: bytes, at: int) -> int:
        """Add the record of a plain entry, as nearly all are; return its size, or 0 for others.

        What it takes `_entry` takes as well, and gives the same record.
        """
        (
            magic, _, _, flags, method, _, _, crc32, stored, nbytes, name_nbytes,
            extra_nbytes, comment_nbytes, disk, _, attributes, header_at,
        ) = CENTRAL.unpack_from(directory, at)  # fmt: skip
        name_end = at + CENTRAL.size + name_nbytes
        raw = directory[at + CENTRAL.size : name_end]
        if (
            magic != CENTRAL_MAGIC
            or method != STORED
            or extra_nbytes
            or comment_nbytes
            or disk
            or attributes
            or stored != nbytes
            or flags & _ANY_REFUSED
            or header_at == MAX32
            or nbytes == MAX32
            or header_at + LOCAL.size + stored > self.directory_at
            or name_end > len(directory)
            or b"\0" in raw
            or raw.endswith(b"/")
            or not raw.isascii()
        ):
            return 0
        entry_at = self.directory_at + at
        numbers = (method, flags, crc32, stored, nbytes, header_at, entry_at)
        return CENTRAL.size + name_nbytes if self.records.add(raw.decode(), numbers) else 0

    def _entry(self, directory: bytes, at: int) -> tuple[Record, int]:
        fields = CENTRAL.unpack_from(directory, at)
        magic, _, _, flags, method, _, _, crc32, stored, nbytes = fields[:10]
        name_nbytes, extra_nbytes, comment_nbytes, disk, _, attributes, header_at = fields[10:]
        entry_nbytes = CENTRAL.size + name_nbytes + extra_nbytes + comment_nbytes
        if magic != CENTRAL_MAGIC or at + entry_nbytes > len(directory):
            raise CorruptError("the zip directory is damaged")
        name_end = at + CENTRAL.size + name_nbytes
        name = name_of(directory[at + CENTRAL.size : name_end])
        wide = (
            zip64_of(directory[name_end : name_end + extra_nbytes], name) if extra_nbytes else b""
        )
        if MAX32 in (nbytes, stored, header_at):
            nbytes, stored, header_at = widen_sizes((nbytes, stored, header_at), wide, name)
        if flags & _ANY_REFUSED:
            meaning = next(each for flag, each in _REFUSED_FLAGS.items() if flags & flag)
            raise UnsupportedError(f"the record {name!r} is not readable: {meaning}")
        if method not in (STORED, DEFLATED):
            raise UnsupportedError(f"the record {name!r} is compressed by method {method}")
        if (
            (method == STORED and stored != nbytes)
            or disk not in (0, _MAX16)
            or header_at + LOCAL.size + stored > self.directory_at
        ):
            raise CorruptError(f"the record {name!r} is larger than the file, or damaged")
        if nbytes and (name.endswith("/") or attributes & _DIRECTORY_ATTRIBUTE):
            raise CorruptError(f"the record {name!r} is a folder, and has content")
        entry_at = self.directory_at + at
        record = Record(name, method, flags, crc32, stored, nbytes, header_at, entry_at)
        return record, entry_nbytes

    # -- the records ---------------------------------------------------------------------------

    def data_at(self, record: Record) -> int:
        """Return the offset of the record's first byte, from its local header, which must agree."""
        at = self.records.data_at(record.name)
        if not at:
            at = self.check_header(record, self.source.read)
            self.records.note_data_at(record.name, at)
        return at

    def check_header(self, record: Record, read: Callable[[int, int], bytes]) -> int:
        """As `data_at`, with bytes that `read` gives."""
        header_at, stored_nbytes = record.header_at, record.stored_nbytes
        guess = LOCAL.size + len(record.name) + USUAL_EXTRA
        head = read(header_at, min(guess, self.directory_at - header_at))
        magic, _, flags, method, _, _, crc32, stored, nbytes, name_nbytes, extra_nbytes = (
            LOCAL.unpack_from(head)
        )
        name_end = LOCAL.size + name_nbytes
        header_nbytes = name_end + extra_nbytes
        data_at: int = header_at + header_nbytes
        if magic != LOCAL_MAGIC or data_at + stored_nbytes > self.directory_at:
            raise CorruptError(f"the record {record.name!r} is not where the zip directory says")
        if len(head) < header_nbytes:
            head = read(header_at, header_nbytes)
        wide = zip64_of(head[name_end:header_nbytes], record.name) if extra_nbytes else b""
        if len(wide) >= _WIDE_SIZES.size:
            nbytes, stored = _WIDE_SIZES.unpack_from(wide)
        absent = (0,) if flags & HAS_DESCRIPTOR else ()  # they follow the content
        agree = (
            name_of(head[LOCAL.size : name_end]) == record.name
            and method == record.method
            and flags == record.flags
            and (crc32 == record.crc32 or crc32 in absent)
            and (stored == stored_nbytes or stored in absent)
            and (nbytes == record.nbytes or nbytes in absent)
        )
        if not agree:
            raise CorruptError(
                f"the local header of the record {record.name!r} contradicts the zip directory"
            )
        if flags & HAS_DESCRIPTOR:
            at = data_at + stored_nbytes
            found = read(at, min(DESCRIPTOR_NBYTES, self.source.nbytes - at))
            if not found.startswith(_descriptors(record)):
                raise CorruptError(
                    f"the descriptor of the record {record.name!r} contradicts the zip directory"
                )
        return data_at

    def oddities(self) -> list[str]:
        """Return what is unusual about a zip file, a sentence each."""
        sums, sizes = self.records.column("crc32"), self.records.column("nbytes")
        unchecked = sum(size > 0 == crc32 for crc32, size in zip(sums, sizes, strict=True))
        odd = [f"{unchecked:,} of its records carry no checksum"] if unchecked else []
        if self.trailing_nbytes:
            odd.append(f"{self.trailing_nbytes:,} bytes follow the end of the zip")
        return odd

    def read_parsed(self, record: Record) -> bytes:
        """Return the content of a record to parse; raises as `read`."""
        if record.method == DEFLATED:
            self._grant(record, self._budget.unpack)
        return self.read(record, at_most=MAX_NBYTES)

    def may_be_parsed(self, record: Record) -> bool:
        """Whether `read_parsed` would accept the compression of the record."""
        packed = record.method == DEFLATED and record.name not in self._granted
        return not packed or self._budget.may_unpack(self._stored_nbytes(record), record.nbytes)

    def _stored_nbytes(self, record: Record) -> int:
        """Return the bytes that a record takes in the file; 0 if the file itself was inflated."""
        return record.stored_nbytes if self.source.start is not None else 0

    def _grant(self, record: Record, allows: Callable[[int, int], bool]) -> None:
        """Count the inflated size of a record, once; UnsupportedError if it is far too large."""
        if record.name not in self._granted:
            self._granted.add(record.name)
            if not allows(self._stored_nbytes(record), record.nbytes):
                raise UnsupportedError(
                    f"the compressed record {record.name!r} would take too much memory: "
                    f"{record.nbytes:,} bytes are stored as {record.stored_nbytes:,}"
                )

    def read(self, record: Record, *, at_most: int) -> bytes:
        """Return the content of a record, checked against its checksum and `at_most` bytes."""
        longest = max(record.nbytes, record.stored_nbytes)
        if longest > at_most:
            raise UnsupportedError(
                f"the record {record.name!r} is {longest:,} bytes long, more than {at_most:,}"
            )
        content = self.source.read(self.data_at(record), record.stored_nbytes)
        if record.method == DEFLATED:
            self._grant(record, self._budget.inflate)
            content = _inflate(content, record)
        if not record.lacks_checksum and zlib.crc32(content) != record.crc32:
            raise CorruptError(f"the record {record.name!r} is damaged: its checksum is wrong")
        return content


def _descriptors(record: Record) -> tuple[bytes, ...]:
    """Return the possible descriptors after a record's content, in four usual forms."""
    crc32, stored, nbytes = record.crc32, record.stored_nbytes, record.nbytes
    form = _WIDE_DESCRIPTOR.pack(crc32, stored, nbytes)
    if stored > MAX32 or nbytes > MAX32:
        return form, DESCRIPTOR_MAGIC + form
    short = _DESCRIPTOR.pack(crc32, stored, nbytes)
    return DESCRIPTOR_MAGIC + short, short, form, DESCRIPTOR_MAGIC + form


def _inflate(raw: bytes, record: Record) -> bytes:
    """Inflate exactly the declared size, never more."""
    if record.nbytes > len(raw) * _MAX_RATIO:
        raise CorruptError(f"the record {record.name!r} claims more than deflate can hold")
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = machine.decompress(raw, record.nbytes + 1)
    except zlib.error as error:
        raise CorruptError(f"the record {record.name!r} does not inflate") from error
    if len(content) != record.nbytes or not machine.eof:
        raise CorruptError(f"the record {record.name!r} does not inflate to its declared size")
    return content
