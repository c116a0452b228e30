"""Combine CRC-32s: the sum of a stretch of bytes from those of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

_POLYNOMIAL = 0xEDB88320  # of zlib's CRC-32, its bits reversed


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
