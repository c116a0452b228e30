"""Read one pickle from a file, without the bytes of its long strings.

The end of a pickle is known only after reading all its opcodes. Long byte strings (the tensors of a
plainly pickled model) are skipped: the result is a pickle in which they are empty, and a list of
where they are in the file.
"""

from __future__ import annotations

import re
from functools import cache

from ..errors import CorruptError, InputError, UnsupportedError
from ..sources.source import MAX_NBYTES, Memory, Readable
from .gaps import LONG, FetchedPickle, Gap
from .opcodes.table import LINES, UNKNOWN, WIDTHS
from .scan import FRAME, STOP, lines_of, row_of

_AT_FIRST, _AT_ONCE = 1 << 12, 1 << 18  # bytes read ahead, at first and when the pickle is long
_HEADER = 9  # bytes of the longest opcode with its count


#: Short texts, and lines. These contain no other opcodes.
_COUNTED = rb"\x8c(?:" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(33)) + rb")"
_LINES = rb"[ci][^\n]{0,99}\n[^\n]{0,99}\n|[gp][^\n]{0,9}\n"
_ONE_BY_ONE = 256  # bytes at the start: many pickles, and most other data, end within them


@cache
def _row() -> re.Pattern[bytes]:
    """Many opcodes in a row, none of which ends the pickle; it takes a millisecond to compile."""
    return re.compile(b"(?:%b|%b|%b){1,1000}" % (row_of(()), _COUNTED, _LINES), re.DOTALL)


class TruncatedPickle(CorruptError):
    """The pickle is longer than the file."""


def fetch(source: Readable, start: int) -> FetchedPickle:
    """The pickle that starts at `start`; UnsupportedError if it is too long."""
    return _Fetcher(source, start).run()


def fetch_part(source: Readable, start: int) -> FetchedPickle:
    """Like `fetch`, but for bytes that may not be a pickle: as much as consists of opcodes.

    All long strings are skipped, texts too, and frames are ignored.
    """
    fetcher = _PartFetcher(source, start)
    try:
        return fetcher.run()
    except CorruptError:
        return FetchedPickle(bytes(fetcher.buffer), fetcher.gaps)


def fetch_prefix(source: Readable, start: int) -> FetchedPickle:
    """Like `fetch`, but for a pickle that is cut short or damaged: as much as can be read."""
    fetcher = _Fetcher(source, start)
    try:
        return fetcher.run()
    except InputError:
        return FetchedPickle(bytes(fetcher.buffer), fetcher.gaps)


class _Fetcher:
    may_be_long = frozenset(b"BT\x8e")  # BINBYTES, BINSTRING, BINBYTES8
    framed = True

    def __init__(self, source: Readable, start: int) -> None:
        self.source = source
        self.start = start
        self.next = start  # file offset of the next byte after the buffer
        self.buffer = bytearray()
        self.gaps: list[Gap] = []

    def run(self) -> FetchedPickle:
        at, frame_end, buffer = 0, -1, self.buffer
        while True:
            if _ONE_BY_ONE < at < len(buffer):  # a false length leads far beyond the end
                run = _row().match(buffer, at)
                at = at if run is None else run.end()
            if at + _HEADER > len(buffer):
                self.fill(at + _HEADER)
                if at >= len(buffer):
                    raise self.truncated()
            code = buffer[at]
            width = WIDTHS[code]
            if width > 0:
                end = at + width
            elif width == LINES:
                end = self.end_of_lines(at, lines_of(code))
            elif width == UNKNOWN:
                raise CorruptError(f"the pickle holds a byte that is no opcode, at offset {at:,}")
            else:
                header_end = at + 1 - width
                nbytes = int.from_bytes(buffer[at + 1 : header_end], "little")
                end = header_end + nbytes
                if nbytes > LONG and code in self.may_be_long and at >= frame_end:
                    self.pass_over(at, header_end, nbytes)
                    end = header_end
            if code == STOP:
                return FetchedPickle(self.content(end), self.gaps)
            if code == FRAME and self.framed:
                frame_end = end + int.from_bytes(buffer[at + 1 : end], "little")
            at = end

    def content(self, end: int) -> bytes:
        """The bytes of the pickle up to `end`, without a copy if the source is in memory."""
        source, whole = self.source, self.start == 0 and not self.gaps
        if whole and isinstance(source, Memory) and source.nbytes == end:
            return source.content
        del self.buffer[end:]
        return bytes(self.buffer)

    def fill(self, end: int) -> None:
        """Read ahead until the buffer reaches `end`, or the file ends."""
        if end > MAX_NBYTES:
            if end - len(self.buffer) > self.source.nbytes - self.next:
                raise self.truncated()
            raise UnsupportedError(f"the pickle is longer than {MAX_NBYTES:,} bytes")
        while len(self.buffer) < end and self.next < self.source.nbytes:
            ahead = min(max(_AT_FIRST, len(self.buffer)), _AT_ONCE)
            missing = max(end - len(self.buffer), ahead)
            part = self.source.read(self.next, min(missing, self.source.nbytes - self.next))
            self.buffer += part
            self.next += len(part)

    def end_of_lines(self, at: int, count: int) -> int:
        for _ in range(count):
            found = self.buffer.find(b"\n", at + 1)
            while found < 0:
                known = len(self.buffer)
                self.fill(known + 1)
                if len(self.buffer) == known:
                    raise self.truncated()
                found = self.buffer.find(b"\n", max(known, at + 1))
            at = found
        return at + 1

    def pass_over(self, at: int, header_end: int, nbytes: int) -> None:
        place = self.next - (len(self.buffer) - header_end)
        if nbytes > self.source.nbytes - place:
            raise self.truncated()
        self.gaps.append(Gap(at, header_end, place - self.start, nbytes))
        if place + nbytes >= self.next:
            del self.buffer[header_end:]
            self.next = place + nbytes
        else:
            del self.buffer[header_end : header_end + nbytes]
        self.buffer[at + 1 : header_end] = bytes(header_end - at - 1)

    def truncated(self) -> CorruptError:
        return TruncatedPickle("the pickle is truncated")


class _PartFetcher(_Fetcher):
    """Fetches bytes that may not be a pickle: any line may be as long as the rest of the file."""

    may_be_long = _Fetcher.may_be_long | frozenset(b"X\x8d\x96")  # texts, BYTEARRAY8
    framed = False

    def end_of_lines(self, at: int, count: int) -> int:
        self.fill(at + count * LONG)
        code, end = self.buffer[at], at
        for _ in range(count):
            end = self.buffer.find(b"\n", end + 1)
            if end < 0 and code in _LONG_LINES:
                return self.pass_over_line(at)
            if end < 0:  # longer than any number or name
                raise self.truncated()
        return end + 1

    def pass_over_line(self, at: int) -> int:
        """Skip the rest of a long line, and keep a short valid line in its place."""
        last, found = bytes(self.buffer[-1:]), -1
        while found < 0:
            if self.next >= self.source.nbytes:
                raise self.truncated()
            part = self.source.read(self.next, min(_AT_ONCE, self.source.nbytes - self.next))
            found = part.find(b"\n")
            self.next += len(part) if found < 0 else found + 1
            last = (last + part if found < 0 else last + part[:found])[-1:]
        kept = _LONG_LINES[self.buffer[at]]
        quoted = bytes(self.buffer[at + 1 : at + 2]) == last and last in (b"'", b'"')
        if kept == b"''" and not quoted:
            raise self.truncated()
        del self.buffer[at + 1 :]
        self.buffer += kept + b"\n"
        return len(self.buffer)


#: Opcodes with lines of unlimited length, and the line that replaces a long one.
_LONG_LINES = {ord("V"): b"", ord("S"): b"''", ord("F"): b"0"}
