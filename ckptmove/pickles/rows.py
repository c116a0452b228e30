"""Read long rows of opcodes that push plain values, many at once.

A long list of numbers is a row of opcodes of the same kind; reading them one by one takes ten times
as long. Numbers of 16 bits are shared objects, as CPython shares those of 8 bits: each takes three
bytes in a file, and would take thirty-six in memory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from functools import cache

_SHORTEST, _LONGEST = 16, 1 << 16  # opcodes that are looked at together, at first and at most
_BINFLOAT, _BININT, _BININT1, _BININT2 = b"GJKM"
#: Of each opcode: how long it is with its number, and the type of an array of these.
_NUMBERS = {_BINFLOAT: (9, "d"), _BININT: (5, "i"), _BININT1: (2, "B"), _BININT2: (3, "H")}


def repeats(data: bytes, at: int, end: int) -> Iterator[int]:
    """How many opcodes without an argument follow that are the same as the one before.

    Args:
        data: a pickle.
        at: where the first would be that follows.
        end: where they end at last, such as that of their frame.

    Yields:
        Counts, whose sum it is.
    """
    code, most = data[at - 1 : at], _SHORTEST
    while data[at : at + 1] == code:
        part = data[at : min(end, at + most)]
        count = len(part) - len(part.lstrip(code))
        yield count
        if count < most:
            return
        at, most = at + count, min(_LONGEST, 16 * most)


def numbers(data: bytes, at: int, end: int) -> Iterator[tuple[list[int] | list[float], int]]:
    """The numbers that opcodes of one kind push which follow each other.

    Args:
        data: a pickle.
        at: where the first of them is.
        end: where they end at last, such as that of their frame.

    Yields:
        Numbers, and where the opcode of the last of them ends.
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
    return list(range(1 << 16))
