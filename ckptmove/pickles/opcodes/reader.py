"""Read the arguments of opcodes, never past the end."""

from __future__ import annotations

import struct

from ...errors import CorruptError

_MAX_DIGITS = 4300  # of a decimal integer; Python's own limit against quadratic parsing
_WORD = struct.Struct("<I").unpack_from


class Reader:
    """A position in a pickle."""

    def __init__(self, data: bytes, base: int = 0) -> None:
        self.data = data
        #: the offset of the next byte
        self.position = 0
        #: `base` is added to the offsets of nodes; `at` is the offset of the current opcode
        self.base = self.at = base

    def fault(self, message: str) -> CorruptError:
        return CorruptError(f"{message}, at offset {self.at - self.base:,} of the pickle")

    def take(self, nbytes: int) -> bytes:
        start = self.position
        self.position = end = start + nbytes
        if nbytes < 0 or end > len(self.data):
            raise self.fault("the pickle names more bytes than it has")
        return self.data[start:end]

    def byte(self) -> int:
        value = self.data[self.position]
        self.position += 1
        return value

    def word(self) -> int:
        value: int = _WORD(self.data, self.position)[0]
        self.position += 4
        return value

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        return self.raw_line().decode("utf-8")

    def raw_line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise self.fault("the pickle is truncated within a line")
        line = self.data[self.position : end]
        self.position = end + 1
        return line

    def decimal(self, line: str) -> int:
        digits = line.strip()
        # octal in C, but not here
        octal = digits.lstrip("-").startswith("0") and digits.lstrip("-") != "0"
        if octal or len(digits) > _MAX_DIGITS or not digits.isascii() or "_" in digits:
            raise self.fault("the pickle holds a number that is not one")
        try:
            return int(digits)
        except ValueError:
            raise self.fault("the pickle holds a number that is not one") from None

    def slot(self) -> int:
        slot = self.decimal(self.line())
        if not 0 <= slot < 1 << 32:
            raise self.fault("the pickle numbers a slot below zero, or absurdly high")
        return slot
