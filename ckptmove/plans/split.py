"""Split a plan into ranges of its destination that can be written separately. No I/O.

The ranges may be written on several machines. Two machines must not write to the same page, because
one would undo the other's change; so the limits are multiples of a mebibyte. Writes and gathers are
never split. If a checksum spans a limit, neither side can check it: the CRC-32s of the pieces are
computed and combined at the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, TypeVar

from .plan import Checksum, Copy, CrcRange, Gather, Plan, Write

_ALIGNED = 1 << 20
_POLYNOMIAL = 0xEDB88320  # of zlib's CRC-32, its bits reversed
_AT = attrgetter("at")
_Ranged = TypeVar("_Ranged", Checksum, Gather, CrcRange, Write)


class Divided(NamedTuple):
    """A plan in parts.

    Attributes:
        whole: what was divided.
        parts: plans with the offsets of the whole; each ends where the next begins. Their measures
            are pieces of those of the whole, and of checksums that were cut.
        cut: those checksums.
    """

    whole: Plan
    parts: tuple[Plan, ...]
    cut: tuple[Checksum, ...]

    def crcs(self, measured: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The CRC-32s of the measures of the whole, and those of the cut checksums.

        Args:
            measured: of the measures of each part.
        """
        pieces = [each for part in self.parts for each in part.measures]
        sums = [crc32 for part in measured for crc32 in part]
        starts = [piece.at for piece in pieces]

        def over(at: int, nbytes: int) -> int:
            crc32 = 0
            for n in range(bisect_left(starts, at), bisect_left(starts, at + nbytes)):
                crc32 = combined(crc32, sums[n], pieces[n].nbytes)
            return crc32

        return (
            [over(each.at, each.nbytes) for each in self.whole.measures],
            [over(each.at, each.nbytes) for each in self.cut],
        )


def divided(plan: Plan, nbytes: int) -> Divided:
    """Divide a plan, such that hardly a part is larger than so many bytes."""
    limits = _limits(plan, nbytes)
    inner = limits[1:-1]
    cut = tuple(each for each in plan.checksums if _is_cut(each, inner))
    wanted: list[tuple[int, int]] = [(each.at, each.at + each.nbytes) for each in plan.measures]
    wanted += [(each.at, each.at + each.nbytes) for each in cut]
    points = sorted({*limits, *(point for each in wanted for point in each)})
    covered = _covered(points, wanted)
    whole = [each for each in plan.checksums if not _is_cut(each, inner)]
    pieces = [
        CrcRange(at, end - at)
        for at, end, is_wanted in zip(points[:-1], points[1:], covered, strict=True)
        if is_wanted
    ]
    writes = sorted(plan.writes, key=_AT)
    parts = tuple(
        Plan(
            plan.method,
            end,
            tuple(_clipped(plan.copies, start, end)),
            tuple(_within(writes, start, end)),
            tuple(_within(whole, start, end)),
            tuple(_within(plan.gathers, start, end)),
            tuple(_within(pieces, start, end)),
            None,
            plan.proofs[n :: len(limits) - 1],
        )
        for n, (start, end) in enumerate(pairwise(limits))
    )
    return Divided(plan, parts, cut)


def _limits(plan: Plan, nbytes: int) -> list[int]:
    """Where the parts begin, and where the last one ends."""
    solid = [(each.at, each.at + len(each.data)) for each in plan.writes]
    solid += [(each.at, each.at + each.nbytes) for each in plan.gathers]
    solid.sort()
    limits, at, n = [0], nbytes, 0
    while (at := -(-at // _ALIGNED) * _ALIGNED) < plan.nbytes:
        while n < len(solid) and solid[n][1] <= at:
            n += 1
        if n < len(solid) and solid[n][0] < at:  # a little later, then
            at = solid[n][1]
            continue
        limits.append(at)
        at += nbytes
    return [*limits, plan.nbytes]


def _is_cut(checksum: Checksum, inner: Sequence[int]) -> bool:
    end = checksum.at + checksum.nbytes
    return bisect_right(inner, checksum.at) < bisect_left(inner, end)


def _covered(points: Sequence[int], wanted: Sequence[tuple[int, int]]) -> list[bool]:
    """For each stretch from one point to the next: whether its CRC-32 is needed."""
    change = dict.fromkeys(points, 0)
    for start, end in wanted:
        change[start] += 1
        change[end] -= 1
    covered, depth = list[bool](), 0
    for point in points[:-1]:
        depth += change[point]
        covered.append(depth > 0)
    return covered


def _clipped(copies: Sequence[Copy], start: int, end: int) -> Iterator[Copy]:
    for n in range(max(0, bisect_right(copies, start, key=_AT) - 1), len(copies)):
        copy = copies[n]
        if copy.at >= end:
            return
        at, stop = max(copy.at, start), min(copy.at + copy.nbytes, end)
        if at < stop:
            yield Copy(copy.source_at + at - copy.at, stop - at, at, copy.source)


def _within(ranges: Sequence[_Ranged], start: int, end: int) -> Sequence[_Ranged]:
    """Those that begin in a range."""
    return ranges[bisect_left(ranges, start, key=_AT) : bisect_left(ranges, end, key=_AT)]


# -- CRC-32 ------------------------------------------------------------------------------------


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two stretches one after the other, the second of so many bytes.

    To add a zero byte is linear over GF(2): `nbytes` of them are a power of one matrix, by
    squaring; the rest is exclusive or.
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
    """What 2**n zero bits do: a few matrices, that all sums are put together with."""
    if not n:
        return [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    return _squared(_zeros(n - 1))


def _times(matrix: Sequence[int], vector: int) -> int:
    product, n = 0, 0
    while vector:
        if vector & 1:
            product ^= matrix[n]
        vector >>= 1
        n += 1
    return product


def _squared(matrix: Sequence[int]) -> list[int]:
    return [_times(matrix, row) for row in matrix]
