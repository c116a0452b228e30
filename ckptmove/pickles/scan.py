"""Scan the opcodes of a pickle once, to find their offsets; builds nothing."""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache, cached_property

from ..errors import CorruptError
from .opcodes.table import LINES, UNKNOWN, WIDTHS

BINPUT, LONG_BINPUT, MEMOIZE = ord("q"), ord("r"), 0x94
BINGET, LONG_BINGET = ord("h"), ord("j")
PUT, GET = ord("p"), ord("g")  # with a decimal line, of protocol 0
PUTS = frozenset((BINPUT, LONG_BINPUT, MEMOIZE, PUT))
_WORD = struct.Struct("<I").unpack_from
_SHORT = 8  # the most characters of a storage's number
_GETS = frozenset((BINGET, LONG_BINGET, GET))
BININT1, BININT2, BININT = ord("K"), ord("M"), ord("J")
INTS = frozenset((BININT1, BININT2, BININT))
LITERALS = frozenset(b"XUT\x8c\x8dVS")  # the opcodes that push a string
FRAME, STOP = 0x95, ord(".")


class Scan:
    """The offsets of opcodes that a splice may change: PUTs, GETs, BININTs, FRAMEs."""

    def __init__(self, data: bytes, nbytes: int | None = None) -> None:
        """Scan all of a pickle, or the opcodes that begin in its first `nbytes`."""
        self.data = data
        self.puts, self.put_slots = array("Q"), array("Q")
        self.gets, self.get_slots = array("Q"), array("Q")
        self.ints, self.frames = array("Q"), array("Q")
        #: slots are numbered by counting (MEMOIZE), so no PUT may be dropped or added
        self.numbered = False
        #: whether the scan reached the end
        self.is_whole = False
        # if such a byte is an opcode and not text, slots are counted
        counting = bytes([MEMOIZE]) in data
        filled: set[int] = set()
        puts, put_slots, gets, get_slots = self.puts, self.put_slots, self.gets, self.get_slots
        position, limit = 0, len(data) if nbytes is None else nbytes
        while position < limit:
            code = data[position]
            width = WIDTHS[code]
            end = position + width if width > 0 else end_of(data, position)
            if code in PUTS:
                slot = len(filled) if code == MEMOIZE else argument(data, position)
                if counting:
                    filled.add(slot)
                self.numbered |= code == MEMOIZE
                puts.append(position)
                put_slots.append(slot)
            elif code in _GETS:
                gets.append(position)
                get_slots.append(argument(data, position))
            elif code in INTS:
                self.ints.append(position)
            elif code == FRAME:
                self.frames.append(position)
            elif code == STOP:
                self.is_whole = True
                return
            position = end


class Survey:
    """The offsets of the opcodes of a pickle, found only as far as needed.

    Rows of opcodes of a known length are found at once. Questions about them are answered by one
    pattern per row, so that no list of all opcodes of a large pickle is needed. Of a usual pickle
    that was walked, most is known.
    """

    def __init__(self, data: bytes, recalled: frozenset[int] | None = None) -> None:
        """`recalled`: the slots that the pickle recalls, if it was walked and is usual."""
        self.data = data
        self._walked = recalled
        #: whether the pickle was walked and is usual, as `Pickle.recalled` says
        self.is_usual = recalled is not None

    @cached_property
    def _found(self) -> tuple[array[int], array[int], bool]:
        """Start and end of each row, alternating; the frames; and whether it is odd."""
        rows, frames = array("Q"), array("Q")
        data, at, many = self.data, 0, _rows(*_MANY)
        while True:
            row = many.match(data, at)
            if row is not None:
                rows.extend(row.span())
                at = row.end()
                continue
            code = data[at]
            if code == STOP or code in _ODD:
                return rows, frames, code != STOP
            if code == FRAME:
                frames.append(at)
            at = end_of(data, at)

    @cached_property
    def is_odd(self) -> bool:
        """Whether slots are numbered by counting or in lines: then everything is scanned."""
        return not self.is_usual and self._found[2]

    @cached_property
    def scan(self) -> Scan:
        """The scan of the whole pickle."""
        return Scan(self.data)

    @cached_property
    def frames(self) -> Sequence[int]:
        """The offsets of the FRAMEs."""
        if self.is_usual:
            return ()
        return self.scan.frames if self.is_odd else self._found[1]

    def parts(self, nbytes: int) -> Iterator[Scan]:
        """Scans of the first bytes, each of more than the one before.

        The last is of the whole pickle.
        """
        while not self.is_odd and nbytes < len(self.data):
            yield Scan(self.data, nbytes)
            nbytes *= 4
        yield self.scan

    @cached_property
    def recalled_slots(self) -> frozenset[int]:
        """The slots that the pickle recalls."""
        if self._walked is not None:
            return self._walked
        if self.is_odd:
            return frozenset(self.scan.get_slots)
        met: set[bytes] = set()
        for start, end in self._each_row():
            met.update(_rows(*_GETS_IN_ROW).findall(self.data, start, end))
        return frozenset(argument(each, 0) for each in met if each)

    def gets_of(self, slots: Set[int]) -> Iterator[tuple[int, int]]:
        """Offset and slot of each GET of these slots, in order."""
        return self._of(slots, _rows(*_GETS_IN_ROW), self.scan_of_gets)

    def puts_of(self, slots: Set[int]) -> Iterator[tuple[int, int]]:
        """Offset and slot of each PUT into these slots, in order."""
        return self._of(slots, _rows(*_PUTS_IN_ROW), self.scan_of_puts)

    def scan_of_gets(self) -> Iterator[tuple[int, int]]:
        """Offset and slot of every GET."""
        return zip(self.scan.gets, self.scan.get_slots, strict=True)

    def scan_of_puts(self) -> Iterator[tuple[int, int]]:
        """Offset and slot of every PUT."""
        return zip(self.scan.puts, self.scan.put_slots, strict=True)

    def _of(
        self,
        slots: Set[int],
        pattern: re.Pattern[bytes],
        scanned: Callable[[], Iterator[tuple[int, int]]],
    ) -> Iterator[tuple[int, int]]:
        if self.is_odd:
            yield from ((at, slot) for at, slot in scanned() if slot in slots)
            return
        data = self.data
        for start, end in self._each_row():
            for found in pattern.finditer(data, start, end):
                if found[1]:
                    slot = argument(found[1], 0)
                    if slot in slots:
                        yield found.start(1), slot

    def _each_row(self) -> Iterator[tuple[int, int]]:
        rows = self._found[0]
        return zip(rows[::2], rows[1::2], strict=True)


def argument(data: bytes, at: int) -> int:
    """The number that follows the opcode at `at`."""
    width = WIDTHS[data[at]]
    if width == 5:
        return int(_WORD(data, at + 1)[0])
    if width == LINES:  # PUT, GET
        return int(data[at + 1 : end_of(data, at)])
    return data[at + 1] if width == 2 else int.from_bytes(data[at + 1 : at + width], "little")


def end_of(data: bytes, at: int) -> int:
    """The offset after the opcode at `at` and its argument."""
    width = WIDTHS[data[at]]
    if width > 0:
        return at + width
    if width == -4:  # the most frequent of the others
        return at + 5 + int(_WORD(data, at + 1)[0])
    if width == LINES:
        for _ in range(lines_of(data[at])):
            at = data.index(b"\n", at + 1)
        return at + 1
    if width == UNKNOWN:
        raise CorruptError(f"the pickle holds a byte that is no opcode, at offset {at:,}")
    return at + 1 - width + int.from_bytes(data[at + 1 : at + 1 - width], "little")


def count_nbytes(code: int) -> int:
    """The width in bytes of the count, for an opcode whose argument starts with a count."""
    return -WIDTHS[code]


def lines_of(code: int) -> int:
    """The number of lines, for an opcode whose argument is lines."""
    return 2 if code in b"ci" else 1


@cache
def row_of(left_out: frozenset[int] | tuple[int, ...]) -> bytes:
    """A pattern for an opcode whose length is easy to tell, except the opcodes `left_out`.

    Its argument has a fixed length, or is a text of a few bytes, such as the number of a storage.
    """
    by_width: dict[int, bytes] = {}
    for code, width in enumerate(WIDTHS):
        if width > 0 and code not in (STOP, FRAME, *left_out):
            by_width[width] = by_width.get(width, b"") + re.escape(bytes([code]))
    each = (b"[%b].{%d}" % (codes, width - 1) for width, codes in by_width.items() if width > 1)
    short = (b"X\\x%02x\\0\\0\\0.{%d}" % (n, n) for n in range(1, _SHORT + 1))
    return b"(?:%b)" % b"|".join((b"[%b]+" % by_width[1], *each, *short))


@cache
def _rows(left_out: tuple[int, ...], then: bytes) -> re.Pattern[bytes]:
    """A pattern: opcodes as in `row_of`, followed by `then`; compiled when needed."""
    return re.compile(row_of(left_out) + then, re.DOTALL)


#: Opcodes that number slots by counting, or write them as a line.
_ODD = (MEMOIZE, PUT, GET)
#: Many opcodes in a row.
_MANY = (MEMOIZE,), b"{1,1000}"
#: The opcodes of a row before one of these, and that opcode; or nothing at the end of the row.
_GETS_IN_ROW = (MEMOIZE, BINGET, LONG_BINGET), b"*(h.|j....|\\Z)"
_PUTS_IN_ROW = (MEMOIZE, BINPUT, LONG_BINPUT), b"*(q.|r....|\\Z)"
