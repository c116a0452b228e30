"""Opcodes that push one plain value: numbers, strings, bytes."""

from __future__ import annotations

import codecs
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from sys import getsizeof

from ...errors import UnsupportedError
from ...sources.budget import BLOB, BYTES, LONG, TEXT
from ..device_tags import may_be_tag
from ..nodes import Blob, Node, Text
from .reader import Reader
from .rows import flags, numbers, repeats

_LONG_ROW = 1 << 6  # values in a list or dict that is being filled
_USUAL_NBYTES, _USUAL_DIGITS = 8, 20  # of an integer of at most 64 bits
_SHORTEST = 32  # bytes; a shorter pickle has nothing to relocate
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset(b"\n\\'\"abfnrtvx01234567")
_FLAG_OPCODES = (b"N", b"\x88", b"\x89")
_ZIP, _PROTO = b"PK\3\4", 0x80


def may_be_checkpoint(content: bytes) -> bool:
    """Whether bytes within a pickle start like a zip file or a pickle."""
    if len(content) < _SHORTEST:
        return False
    return content.startswith(_ZIP) or (content[0] == _PROTO and 2 <= content[1] <= 5)


def _literally(escape: re.Match[bytes]) -> bytes:
    """A valid escape unchanged; an invalid one as a backslash and the character."""
    return escape[0] if escape[1][0] in _KNOWN_ESCAPES else b"\\" + escape[0]


class Literals(Reader, ABC):
    """A reader that pushes what it reads on a stack."""

    def __init__(self, data: bytes, base: int, gaps: Mapping[int, int]) -> None:
        super().__init__(data, base)
        #: offset of an opcode that pushes bytes → how many were left out of the data
        self.gaps = gaps
        self.stack: list[Node] = []
        #: the blobs among the nodes
        self.blobs: list[Blob] = []
        self.blob_nbytes = 0
        #: whether there are strings that only Python 2 writes
        self.python2 = False
        #: -1 outside of any frame
        self.frame_end = -1
        #: how long the stack may be before it must be checked
        self.longest_row = 0

    def push(self, node: Node) -> None:
        """Put a node on the stack."""
        self.stack.append(node)

    def push_text(self, text: str) -> None:
        """Put a string on the stack, with the offset of this use."""
        self.charge(getsizeof(text) + TEXT)
        self.stack.append(self.use_of(text, self.at, len(self.stack)))

    def use_of(self, text: str, at: int, depth: int) -> str:
        """The node of a string that is pushed at an offset on a stack of so many nodes."""
        # In a long row, the offset of a short text that names no device is never needed, and it
        # takes more memory than the text.
        loose = depth >= _LONG_ROW and len(text) < _SHORTEST and not may_be_tag(text)
        return text if loose else Text(text, at)

    @abstractmethod
    def charge(self, nbytes: int) -> None:
        """Count the memory of a built object; raises CorruptError if the sum is too large."""

    @abstractmethod
    def check_row(self) -> None:
        """Check the length of the stack; raises CorruptError if it is too long."""

    # -- scalars -----------------------------------------------------------------------------

    def op_none(self) -> None:
        self.push_flag(None)

    def op_newtrue(self) -> None:
        self.push_flag(True)

    def op_newfalse(self) -> None:
        self.push_flag(False)

    def push_flag(self, value: bool | None) -> None:
        """Push True, False or None, and all such values that follow directly."""
        self.stack.append(value)
        data, at = self.data, self.position
        if data[at : at + 1] in _FLAG_OPCODES and data[at + 1 : at + 2] in _FLAG_OPCODES:
            for row, end in flags(data, at, self.end_of_frame):
                self.stack += row
                self.position = end
                if len(self.stack) > self.longest_row:
                    self.check_row()

    def repeat_last(self, width: int) -> None:
        """Push the last value again for each identical opcode of `width` bytes that follows."""
        for count in repeats(self.data, self.position, self.end_of_frame, width):
            self.stack += self.stack[-1:] * count
            self.position += count * width
            if len(self.stack) > self.longest_row:
                self.check_row()

    @property
    def end_of_frame(self) -> int:
        return self.frame_end if self.frame_end >= 0 else len(self.data)

    def op_binint1(self) -> None:
        self.stack.append(self.byte())
        self.push_numbers(2)

    def op_binint2(self) -> None:
        self.stack.append(self.number(2))
        self.push_numbers(3)

    def op_binint(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))
        self.push_numbers(5)

    def push_numbers(self, width: int) -> None:
        """Push the numbers that follow, if the next two opcodes are the same as the last."""
        data, at = self.data, self.position
        if at >= len(data) or data[at] != data[at - width]:
            return
        if data[at - width : at + 2 * width : width][1:] == data[at - width : at - width + 1] * 2:
            for row, end in numbers(data, at, self.end_of_frame):
                self.stack += row
                self.position = end
                if len(self.stack) > self.longest_row:
                    self.check_row()

    def op_int(self) -> None:
        line = self.line()
        self.push(
            {"00": False, "01": True}[line] if line in ("00", "01") else self.integer_of_line(line)
        )

    def op_long(self) -> None:
        self.push(self.integer_of_line(self.line().removesuffix("L")))

    def integer_of_line(self, line: str) -> int:
        """The integer that a line spells."""
        if len(line) > _USUAL_DIGITS:
            self.charge(LONG)
        return self.decimal(line)

    def op_long1(self) -> None:
        self.push(self.integer(self.byte()))

    def op_long4(self) -> None:
        self.push(self.integer(self.word()))

    def integer(self, nbytes: int) -> int:
        """The next `nbytes` bytes as an integer."""
        if nbytes > _USUAL_NBYTES:
            self.charge(LONG)
        return int.from_bytes(self.take(nbytes), "little", signed=True)

    def op_binfloat(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])
        self.push_numbers(9)

    def op_float(self) -> None:
        try:
            self.push(float(self.line()))
        except ValueError:
            raise self.fault("the pickle holds a number that is not one") from None

    # -- strings and bytes -------------------------------------------------------------------

    def op_binunicode(self) -> None:
        self.push_text(self.take(self.word()).decode("utf-8", "surrogatepass"))

    def op_short_binunicode(self) -> None:
        self.push_text(self.take(self.byte()).decode("utf-8", "surrogatepass"))

    def op_binunicode8(self) -> None:
        self.push_text(self.take(self.number(8)).decode("utf-8", "surrogatepass"))

    def op_unicode(self) -> None:
        self.push_text(self.raw_line().decode("raw-unicode-escape"))

    def op_string(self) -> None:
        line = self.raw_line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self.fault("the pickle holds a string without quotes")
        try:
            raw = codecs.escape_decode(_ESCAPE.sub(_literally, line[1:-1]))[0]
        except ValueError:
            raise self.fault("the pickle holds a string with a bad escape") from None
        self.push_string(raw)

    def op_binstring(self) -> None:
        self.push_string(self.content(self.word()))

    def op_short_binstring(self) -> None:
        self.push_string(self.take(self.byte()))

    def op_binbytes(self) -> None:
        self.push(self.content(self.word()))

    def op_short_binbytes(self) -> None:
        self.push(self.content(self.byte()))

    def op_binbytes8(self) -> None:
        self.push(self.content(self.number(8)))

    def content(self, nbytes: int) -> bytes | Blob:
        """The next `nbytes` bytes; a blob if they look like a checkpoint or were left out."""
        passed_over = self.gaps.get(self.at - self.base)
        if passed_over is not None:
            return self.blob(passed_over, None)
        content = self.take(nbytes)
        self.charge(BYTES)
        return self.blob(nbytes, content) if may_be_checkpoint(content) else content

    def blob(self, nbytes: int, content: bytes | None) -> Blob:
        blob = Blob(self.at, nbytes, content)
        self.charge(BLOB)
        self.blob_nbytes += 0 if content is None else nbytes
        self.blobs.append(blob)
        return blob

    def push_string(self, content: bytes | Blob) -> None:
        """Push a string of Python 2, which had no other type for bytes.

        It is text if it is valid UTF-8, as for `torch.load`. `torch.load` raises for any other
        string; here it becomes bytes, as for `torch.load(encoding="bytes")`.
        """
        self.python2 = True
        if isinstance(content, bytes) and may_be_checkpoint(content):
            content = self.blob(len(content), content)
        if isinstance(content, Blob):
            content.string = True
            return self.push(content)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return self.push(content)
        return self.push_text(text)

    def op_next_buffer(self) -> None:
        raise UnsupportedError("the pickle needs buffers that were kept outside of it")

    op_readonly_buffer = op_next_buffer
