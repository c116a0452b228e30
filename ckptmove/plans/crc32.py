"""CRC-32s of bytes that come one after the other, and of stretches whose sums are known."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache

_LARGE = 1 << 16  # bytes from which on it is worth to import what is faster
_POLYNOMIAL = 0xEDB88320  # of zlib's CRC-32, its bits reversed


def extend_crc32(crc32: int, data: bytes | bytearray | memoryview) -> int:
    """The CRC-32 of what has this one so far, 0 for nothing, and of the data after it."""
    return zlib.crc32(data, crc32) if len(data) < _LARGE else _fastest()(data, crc32)


@cache
def _fastest() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """That of isal, which is ten times as fast as that of zlib, where it is installed."""
    try:
        from isal.isal_zlib import crc32  # only here: small files need none of this
    except (ImportError, OSError):  # an import opens files, and calls on these may fail
        return zlib.crc32
    return crc32


def combine_crc32(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two stretches of bytes one after the other; `nbytes` is the size of the second.

    To add a zero byte is linear over GF(2): `nbytes` of them are a power of one matrix.
    """
    if not first:  # as before the first of many
        return second
    n = 3
    while nbytes:
        if nbytes & 1:
            first = _times(_zeros(n), first)
        nbytes >>= 1
        n += 1
    return first ^ second


@cache
def _zeros(n: int) -> Sequence[int]:
    """The matrix that appends 2**n zero bits."""
    if not n:
        return [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    return _square(_zeros(n - 1))


def _times(matrix: Sequence[int], vector: int) -> int:
    product, n = 0, 0
    while vector:
        if vector & 1:
            product ^= matrix[n]
        vector >>= 1
        n += 1
    return product


def _square(matrix: Sequence[int]) -> list[int]:
    return [_times(matrix, row) for row in matrix]
