"""Read, keep, compare and write long rows of numbers, many at once.

A long list of numbers is a row of opcodes of the same kind; reading them one by one takes ten times
as long. As objects they would take forty bytes each, which are but three to nine in a file: what a
list, a tuple or a set holds is an array where it is all integers of 63 bits, or all floats.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from ..nodes import Items, Node, are_plain
from .mixed_rows import MixedRow, is_worth_it

_SHORTEST, _LONGEST = 16, 1 << 16  # numbers that are looked at together, at first and at most
_GROWN = 1 << 12  # items of a list that grew one by one, to be looked at again whenever it doubles
_KINDS: dict[type, str] = {int: "q", float: "d"}
_BELOW = -1 << 63  # takes more than 63 bits
_BINFLOAT, _BININT, _BININT1, _BININT2 = b"GJKM"
#: Of each opcode: how long it is with its number, and the type of an array of these.
_NUMBERS = {_BINFLOAT: (9, "d"), _BININT: (5, "i"), _BININT1: (2, "B"), _BININT2: (3, "H")}
#: Opcodes of integers, and the range for which no shorter one is.
_RANGES = ((_BININT1, 0, 1 << 8), (_BININT2, 1 << 8, 1 << 16), (_BININT, 1 << 16, 1 << 31))


def repeats(data: bytes, at: int, end: int, width: int = 1) -> Iterator[int]:
    """How many opcodes follow that are the same as the one before, of so many bytes.

    The first would be at `at`, and they end before `end`, such as that of their frame. The sum of
    what is yielded is their number.
    """
    opcode, most = data[at - width : at], _SHORTEST
    while data[at : at + width] == opcode:
        part = data[at : min(end, at + most * width)]
        columns = ((part[n::width], opcode[n : n + 1]) for n in range(width))
        count = min(len(column) - len(column.lstrip(byte)) for column, byte in columns)
        yield count
        if count < most:
            return
        at, most = at + count * width, min(_LONGEST, 16 * most)


def numbers(data: bytes, at: int, end: int) -> Iterator[tuple[list[int] | list[float], int]]:
    """The numbers that opcodes of one kind push which follow each other, the first at `at`.

    With each row of numbers is where its last opcode ends; `end` is that of their frame.
    """
    code, most = data[at : at + 1], _SHORTEST
    width, kind = _NUMBERS[code[0]]
    while True:
        part = data[at : min(end, at + most * width)]
        codes = part[: len(part) // width * width : width]
        count = len(codes) - len(codes.lstrip(code))
        at += count * width
        if count:
            yield _numbers(part[: count * width], width, kind), at
        if count < most:
            return
        most = min(_LONGEST, 16 * most)


def _numbers(part: bytes, width: int, kind: str) -> list[int] | list[float]:
    """The numbers of opcodes that are all of one kind."""
    if width == 2:
        return list(part[1::2])
    nbytes, big = width - 1, kind == "d"  # floats are the only ones that begin with the highest
    packed = bytearray(len(part) // width * nbytes)
    for n in range(nbytes):
        packed[n::nbytes] = part[n + 1 :: width]
    values = array(kind)
    assert values.itemsize == nbytes
    values.frombytes(packed)
    if big == (sys.byteorder == "little"):
        values.byteswap()
    found: list[int] | list[float] = values.tolist()
    return list(map(_every_short().__getitem__, found)) if kind == "H" else found  # type: ignore[arg-type]


@cache
def _every_short() -> list[int]:
    """Numbers of 16 bits as shared objects, as CPython shares those of 8 bits."""
    return list(range(1 << 16))


def packed(items: Items, shortest: int = _SHORTEST) -> Items:
    """The same items, in a row that takes little if they are many numbers."""
    if len(items) < shortest or isinstance(items, (array, MixedRow)):
        return items
    kind: type = type(items[0])
    if kind in _KINDS and set(map(type, items)) == {kind}:
        try:
            row: array[Any] = array(_KINDS[kind], items)
        except OverflowError:
            return items
        return items if kind is int and min(row) == _BELOW else row
    return MixedRow(items) if is_worth_it(items) else items


def extended(row: Items, items: Items) -> Items:
    """A row with more items, which is the same object where it can be."""
    if isinstance(row, array):
        more = packed(items, 1)
        if isinstance(more, array) and more.typecode == row.typecode:
            row.extend(more)
            return row
    if isinstance(row, MixedRow):
        row.extend(items)
        return row
    row = row if isinstance(row, list) else list(row)
    before = len(row)
    row.extend(items)
    # Protocol 0 appends one by one, others a thousand at once.
    doubled = len(row).bit_length() > before.bit_length()
    return packed(row) if len(row) >= _GROWN and doubled else row


def same_numbers(old: Sequence[Node], new: Sequence[Node]) -> bool:
    """Whether two rows are of the same plain values, of which there may be very many."""
    if len(old) != len(new) or not are_plain(old):
        return False
    if isinstance(old, array) and isinstance(new, array) and old.typecode == new.typecode:
        return bytes_of(old) == bytes_of(new)
    # In parts: what is noted of each value of a long row would be larger than the row.
    starts = range(0, len(old), _LONGEST)
    return all(_is_same_part(old[at : at + _LONGEST], new[at : at + _LONGEST]) for at in starts)


def bytes_of(row: array[Any]) -> memoryview:
    """The bytes of an array, which are compared soon: NaN is itself, and -0.0 is not 0.0."""
    return memoryview(row).cast("B")


def _is_same_part(old: Sequence[Node], new: Sequence[Node]) -> bool:
    if list(map(type, old)) != list(map(type, new)):
        return False
    floats = array("d", [each for each in old if isinstance(each, float)])
    others = array("d", [each for each in new if isinstance(each, float)])
    if floats.tobytes() != others.tobytes():
        return False
    return len(floats) == len(old) or (not floats and list(old) == list(new))


def opcodes_of(row: Sequence[Node]) -> bytes | None:
    """The opcodes that push an array, or None for what is none, or has numbers of 32 bits."""
    if not isinstance(row, array) or not row:
        return None
    if row.typecode == "d":
        return _opcodes(_BINFLOAT, row)
    low, high = min(row), max(row)
    if low < -1 << 31 or high >= 1 << 31:
        return None
    for code, start, end in _RANGES:
        if start <= low and high < end:
            return _opcodes(code, array(_NUMBERS[code][1], row))
    pushed = (
        b"K%c" % n
        if 0 <= n < 1 << 8
        else b"M" + n.to_bytes(2, "little")
        if 0 <= n < 1 << 16
        else b"J" + n.to_bytes(4, "little", signed=True)
        for n in row
    )
    return b"".join(pushed)


def _opcodes(code: int, row: array[Any]) -> bytes:
    """The same opcode for each number, the reverse of `_numbers`."""
    width, kind = _NUMBERS[code]
    if (kind == "d") == (sys.byteorder == "little"):
        row = row[:]
        row.byteswap()
    out, content = bytearray(bytes([code]) * (width * len(row))), row.tobytes()
    for n in range(width - 1):
        out[n + 1 :: width] = content[n :: width - 1]
    return bytes(out)
