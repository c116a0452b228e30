"""CRC-32s of a stream of bytes, and of adjacent ranges with known CRC-32s."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache

_LARGE = 1 << 16  # from this size, importing a faster implementation pays off
_POLYNOMIAL = 0xEDB88320  # of zlib's CRC-32, its bits reversed


def extend_crc32(crc32: int, data: bytes | bytearray | memoryview) -> int:
    """Extend a CRC-32 (0 at the start) by the data that follows."""
    return zlib.crc32(data, crc32) if len(data) < _LARGE else _fastest()(data, crc32)


@cache
def _fastest() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """Return the CRC-32 of isal, ten times as fast as zlib's, if it is installed."""
    try:
        from isal.isal_zlib import crc32  # imported only here: small files do not need it
    except (ImportError, OSError):  # an import opens files, which may fail
        return zlib.crc32
    return crc32


def combine_crc32(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two adjacent ranges; `nbytes` is the size of the second.

    Adding a zero byte is linear over GF(2): adding `nbytes` of them is a power of one matrix.
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
    """Return the matrix that appends 2**n zero bits."""
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
