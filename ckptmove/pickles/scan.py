"""Where things lie in a pickle: one pass over its opcodes, without building anything."""

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

from ..errors import CorruptError, UnsupportedError

BINPUT, LONG_BINPUT, MEMOIZE = ord("q"), ord("r"), 0x94
BINGET, LONG_BINGET = ord("h"), ord("j")
PUTS = frozenset((BINPUT, LONG_BINPUT, MEMOIZE))
BININT1, BININT2, BININT = ord("K"), ord("M"), ord("J")
LITERALS = frozenset(b"XUT\x8c\x8dVS")  # the opcodes that push a string
_TEXT_MEMO = frozenset(b"pg")  # PUT and GET with a decimal line, of protocol 0
_FRAME, _STOP = 0x95, ord(".")


class Scan:
    """The offsets of what a splice may change.

    Attributes:
        puts, put_slots: each BINPUT, LONG_BINPUT and MEMOIZE, and the slot it fills.
        gets, get_slots: each BINGET and LONG_BINGET, and the slot it recalls.
        ints: each BININT1 and BININT2.
        frames: each FRAME.
        numbered: slots are numbered by counting, so none may be dropped or added.

    Raises:
        UnsupportedError: slots are named in a way that can't be followed.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.puts, self.put_slots = array("Q"), array("Q")
        self.gets, self.get_slots = array("Q"), array("Q")
        self.ints, self.frames = array("Q"), array("Q")
        self.numbered = False
        counting = bytes([MEMOIZE]) in data  # if that is an opcode and not text, slots are counted
        filled: set[int] = set()
        position = 0
        while True:
            code = data[position]
            end = end_of(data, position)
            if code in PUTS:
                slot = len(filled) if code == MEMOIZE else self.argument(position)
                if counting:
                    filled.add(slot)
                self.numbered |= code == MEMOIZE
                self.puts.append(position)
                self.put_slots.append(slot)
            elif code in (BINGET, LONG_BINGET):
                self.gets.append(position)
                self.get_slots.append(self.argument(position))
            elif code in (BININT1, BININT2):
                self.ints.append(position)
            elif code == _FRAME:
                self.frames.append(position)
            elif code in _TEXT_MEMO:
                raise UnsupportedError("a pickle that memoises in text can't be rewritten")
            elif code == _STOP:
                return
            position = end

    def argument(self, at: int) -> int:
        """The number that follows the opcode at `at`."""
        return int.from_bytes(self.data[at + 1 : end_of(self.data, at)], "little")


def end_of(data: bytes, at: int) -> int:
    """The offset after the opcode at `at` and its argument."""
    width = _WIDTHS[data[at]]
    if width > 0:
        return at + width
    if width == _LINES:
        for _ in range(2 if data[at] in b"ci" else 1):
            at = data.index(b"\n", at + 1)
        return at + 1
    if width == _UNKNOWN:
        raise CorruptError(f"the pickle holds a byte that is no opcode, at offset {at:,}")
    return at + 1 - width + int.from_bytes(data[at + 1 : at + 1 - width], "little")


_UNKNOWN, _LINES = 0, -100
_COUNTS = {
    TAKEN_FROM_ARGUMENT1: -1,
    TAKEN_FROM_ARGUMENT4: -4,
    TAKEN_FROM_ARGUMENT4U: -4,
    TAKEN_FROM_ARGUMENT8U: -8,
    UP_TO_NEWLINE: _LINES,
}


def _widths() -> list[int]:
    """For each byte: the width of that opcode, or minus the width of the count it starts with."""
    table = [_UNKNOWN] * 256
    for opcode in opcodes:
        n = 0 if opcode.arg is None else opcode.arg.n
        table[ord(opcode.code)] = 1 + n if n >= 0 else _COUNTS[n]
    return table


_WIDTHS = _widths()
