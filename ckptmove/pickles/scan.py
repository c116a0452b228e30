"""Scan the opcodes of a pickle once, to find where things are; builds nothing."""

from __future__ import annotations

from array import array
from pickletools import (
    TAKEN_FROM_ARGUMENT1,
    TAKEN_FROM_ARGUMENT4,
    TAKEN_FROM_ARGUMENT4U,
    TAKEN_FROM_ARGUMENT8U,
    UP_TO_NEWLINE,
    opcodes,
)

from ..errors import CorruptError

BINPUT, LONG_BINPUT, MEMOIZE = ord("q"), ord("r"), 0x94
BINGET, LONG_BINGET = ord("h"), ord("j")
PUT, GET = ord("p"), ord("g")  # with a decimal line, of protocol 0
PUTS = frozenset((BINPUT, LONG_BINPUT, MEMOIZE, PUT))
_GETS = frozenset((BINGET, LONG_BINGET, GET))
BININT1, BININT2, BININT = ord("K"), ord("M"), ord("J")
_INTS = frozenset((BININT1, BININT2, BININT))
LITERALS = frozenset(b"XUT\x8c\x8dVS")  # the opcodes that push a string
FRAME, STOP = 0x95, ord(".")


class Scan:
    """The offsets of what a splice may change: PUTs, GETs and their slots, BININTs, and FRAMEs."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.puts, self.put_slots = array("Q"), array("Q")
        self.gets, self.get_slots = array("Q"), array("Q")
        self.ints, self.frames = array("Q"), array("Q")
        #: slots are numbered by counting (MEMOIZE), so none may be dropped or added
        self.numbered = False
        counting = bytes([MEMOIZE]) in data  # if that is an opcode and not text, slots are counted
        filled: set[int] = set()
        puts, put_slots, gets, get_slots = self.puts, self.put_slots, self.gets, self.get_slots
        position = 0
        while True:
            code = data[position]
            width = WIDTHS[code]
            end = position + width if width > 0 else end_of(data, position)
            if code in PUTS:
                slot = len(filled) if code == MEMOIZE else self.argument(position)
                if counting:
                    filled.add(slot)
                self.numbered |= code == MEMOIZE
                puts.append(position)
                put_slots.append(slot)
            elif code in _GETS:
                gets.append(position)
                get_slots.append(self.argument(position))
            elif code in _INTS:
                self.ints.append(position)
            elif code == FRAME:
                self.frames.append(position)
            elif code == STOP:
                return
            position = end

    def argument(self, at: int) -> int:
        """The number that follows the opcode at `at`."""
        data = self.data
        width = WIDTHS[data[at]]
        if width == LINES:  # PUT, GET
            return int(data[at + 1 : end_of(data, at)])
        return data[at + 1] if width == 2 else int.from_bytes(data[at + 1 : at + width], "little")


def end_of(data: bytes, at: int) -> int:
    """The offset after the opcode at `at` and its argument."""
    width = WIDTHS[data[at]]
    if width > 0:
        return at + width
    if width == LINES:
        for _ in range(lines_of(data[at])):
            at = data.index(b"\n", at + 1)
        return at + 1
    if width == UNKNOWN:
        raise CorruptError(f"the pickle holds a byte that is no opcode, at offset {at:,}")
    return at + 1 - width + int.from_bytes(data[at + 1 : at + 1 - width], "little")


def count_nbytes(code: int) -> int:
    """How many bytes the count of an opcode takes whose argument is counted."""
    return -WIDTHS[code]


def lines_of(code: int) -> int:
    """How many lines an opcode takes that takes lines."""
    return 2 if code in b"ci" else 1


UNKNOWN, LINES = 0, -100
_COUNTS = {
    TAKEN_FROM_ARGUMENT1: -1,
    TAKEN_FROM_ARGUMENT4: -4,
    TAKEN_FROM_ARGUMENT4U: -4,
    TAKEN_FROM_ARGUMENT8U: -8,
    UP_TO_NEWLINE: LINES,
}


def _widths() -> list[int]:
    """For each byte: the width of that opcode, or minus the width of the count it starts with."""
    table = [UNKNOWN] * 256
    for opcode in opcodes:
        n = 0 if opcode.arg is None else opcode.arg.n
        table[ord(opcode.code)] = 1 + n if n >= 0 else _COUNTS[n]
    return table


WIDTHS = _widths()
