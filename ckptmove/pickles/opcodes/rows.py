"""Read, store, compare and write long rows of numbers, many at once.

A long list of numbers is a row of opcodes of the same kind; reading them one by one takes ten times
as long. As an object a number would take forty bytes, but in a file two to nine. So the items of a
list, tuple or set are stored in an array if all are integers of 63 bits or all are floats, and in a
`FlagRow` if all are True, False or None.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from ...sources.budget import ITEM
from ..flag_row import FlagRow
from ..nodes import Items, Node, are_plain
from .mixed_rows import MixedRow, is_worth_it

_SHORTEST, _LONGEST = 16, 1 << 16  # numbers that are read at once, at first and at most
_GROWN = 1 << 12  # the items of a list that grows one by one are packed again each time it doubles
#: Types of integer arrays, each with the range of values.
_INTEGERS = (
    ("B", 0, 1 << 8),
    ("H", 0, 1 << 16),
    ("i", -1 << 31, 1 << 31),
    ("q", (-1 << 63) + 1, 1 << 63),  # of 63 bits and a sign
)
_TYPES = [kind for kind, _, _ in _INTEGERS]
#: The type of the items that an array appends as it is, if it can; one of "q" would take -2^63.
_APPENDED = {"B": int, "H": int, "i": int, "d": float}
_FLAGS = frozenset((bool, type(None)))
_PACKED = frozenset((int, float, *_FLAGS))
_FLAG_OPCODES = {ord("N"): None, 0x88: True, 0x89: False}
_MEMORY_OF_FLAG = 25  # more than it takes in memory, since as JSON each takes six characters
_BINFLOAT, _BININT, _BININT1, _BININT2 = b"GJKM"
#: For each opcode: its length with the number, and the array type of such numbers.
_NUMBERS = {_BINFLOAT: (9, "d"), _BININT: (5, "i"), _BININT1: (2, "B"), _BININT2: (3, "H")}
#: Opcodes of integers, and the ranges for which no shorter opcode exists.
_RANGES = ((_BININT1, 0, 1 << 8), (_BININT2, 1 << 8, 1 << 16), (_BININT, 1 << 16, 1 << 31))


def repeats(data: bytes, at: int, end: int, width: int = 1) -> Iterator[int]:
    """How many opcodes follow that are identical to the one before, of `width` bytes.

    The first would be at `at`, and they end before `end`, such as the end of their frame. The
    counts that are yielded add up to the total.
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
    """The numbers pushed by consecutive opcodes of one kind, the first at `at`.

    Each row of numbers comes with the offset where its last opcode ends; `end` is the end of their
    frame.
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
    """The numbers of opcodes of a single kind."""
    if width == 2:
        return list(part[1::2])
    nbytes, big = width - 1, kind == "d"  # only floats are stored with the highest byte first
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


def compact_row(items: Items, shortest: int = _SHORTEST, *, may_empty: bool = False) -> Items:
    """The same items, in a compact row if they are many numbers.

    `may_empty`: whether a list of items may be emptied, so that they are not in memory twice.
    """
    if len(items) < shortest or isinstance(items, (array, FlagRow, MixedRow)):
        return items
    kind: type = type(items[0])
    kinds = set(map(type, items)) if kind in _PACKED else set()
    plain: Any = items
    if kinds == {float}:
        return array("d", plain)
    if kinds == {int}:
        low, high = min(plain), max(plain)
        fitting = (code for code, start, end in _INTEGERS if start <= low and high < end)
        code = next(fitting, None)
        return items if code is None else array(code, plain)
    if kinds and kinds <= _FLAGS:
        return FlagRow(plain)
    if not is_worth_it(items):
        return items
    return MixedRow(_popped(items) if may_empty and isinstance(items, list) else items)


def _popped(items: list[Node]) -> Iterator[Node]:
    items.reverse()
    while items:
        yield items.pop()


def extend_row(row: Items, items: Items) -> Items:
    """A row with more items; the same object if possible."""
    if type(row) is array and len(items) == 1 and type(items[0]) is _APPENDED.get(row.typecode):
        try:
            row.append(items[0])
        except OverflowError:  # it needs a wider type
            pass
        else:
            return row
    if isinstance(row, (array, FlagRow)):
        joined = _joined(row, compact_row(items, 1))
        if joined is not None:
            return joined
    if isinstance(row, MixedRow):
        row.extend(items)
        return row
    row = row if isinstance(row, list) else list(row)
    before = len(row)
    row.extend(items)
    # Protocol 0 appends one by one, others a thousand at once.
    doubled = len(row).bit_length() > before.bit_length()
    return compact_row(row) if len(row) >= _GROWN and doubled else row


def _joined(row: array[Any] | FlagRow, more: Items) -> Items | None:
    """Two rows of plain values joined; None if they are of different kinds."""
    if isinstance(row, FlagRow) or isinstance(more, FlagRow):
        if not (isinstance(row, FlagRow) and isinstance(more, FlagRow)):
            return None
        row.extend(more)
        return row
    if not isinstance(more, array) or (row.typecode == "d") != (more.typecode == "d"):
        return None
    if row.typecode != more.typecode:
        wider = max(row.typecode, more.typecode, key=_TYPES.index)
        row = row if row.typecode == wider else array(wider, row)
        more = more if more.typecode == wider else array(wider, more)
    row.extend(more)
    return row


def memory_of(row: Items) -> int:
    """The price of a row in bytes of memory, without the objects that its items refer to."""
    if type(row) is list:
        return ITEM * len(row)
    if isinstance(row, array):
        return len(row) * row.itemsize
    if isinstance(row, FlagRow):
        return _MEMORY_OF_FLAG * len(row)
    return 9 * len(row) + (ITEM * len(row.others) if isinstance(row, MixedRow) else 0)


def flags(data: bytes, at: int, end: int) -> Iterator[tuple[list[Node], int]]:
    """The values pushed by consecutive opcodes of True, False and None, the first at `at`.

    Each row of values comes with the offset where its last opcode ends; `end` is the end of their
    frame.
    """
    most = _SHORTEST
    while True:
        part = data[at : min(end, at + most)]
        count = len(part) - len(part.lstrip(b"N\x88\x89"))
        at += count
        if count:
            yield [_FLAG_OPCODES[code] for code in part[:count]], at
        if count < most:
            return
        most = min(_LONGEST, 16 * most)


def same_numbers(old: Sequence[Node], new: Sequence[Node]) -> bool:
    """Whether two rows hold the same plain values; fast for very many."""
    if len(old) != len(new) or not are_plain(old):
        return False
    if isinstance(old, array) and isinstance(new, array) and old.typecode == new.typecode:
        return bytes_of(old) == bytes_of(new)
    # In parts: the types of all values of a long row would take more memory than the row.
    starts = range(0, len(old), _LONGEST)
    return all(_is_same_part(old[at : at + _LONGEST], new[at : at + _LONGEST]) for at in starts)


def bytes_of(row: array[Any]) -> memoryview:
    """The bytes of an array, for a fast comparison: NaN equals itself, and -0.0 is not 0.0."""
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
    """The opcodes that push a row of plain values; None for another row.

    None also for a row with integers of more than 32 bits.
    """
    if isinstance(row, FlagRow):
        return row.opcodes or None
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
