"""A plan: everything that will be written, decided before a byte is. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Copy(NamedTuple):
    """Copy `nbytes` from offset `source_at` of the source to offset `at` of the destination."""

    source_at: int
    nbytes: int
    at: int


class Write(NamedTuple):
    """Write these bytes at offset `at` of the destination, over what was copied there."""

    at: int
    data: bytes


class Checksum(NamedTuple):
    """What the bytes `[at, at + nbytes)` of the destination must add up to, as zip's CRC-32.

    Attributes:
        name: of the record, for the message.
        source_at: where the same bytes lie in the source.
    """

    at: int
    nbytes: int
    crc32: int
    name: str
    source_at: int


class Check(NamedTuple):
    """A copied range of the destination, and how it can be known to be right.

    Attributes:
        at, nbytes: the range.
        source_at: where it came from; equal bytes there are the proof if there is no checksum.
        checksum: the proof that needs no second read.
    """

    at: int
    nbytes: int
    source_at: int
    checksum: Checksum | None


class Plan(NamedTuple):
    """How a destination comes to be.

    Attributes:
        method: `clone` (a copy of the source), `patch` (a copy with some bytes replaced) or `relay`
            (laid out anew).
        nbytes: its size.
        copies: in the order of the destination, without overlaps.
        writes: over and between the copies.
        checksums: of ranges that lie within one copy and outside the writes, in order.
    """

    method: str
    nbytes: int
    copies: tuple[Copy, ...]
    writes: tuple[Write, ...]
    checksums: tuple[Checksum, ...] = ()

    @property
    def is_clone(self) -> bool:
        """Whether the destination starts as a copy of the whole source, byte for byte."""
        return self.copies == (Copy(0, self.nbytes, 0),)

    def checks(self) -> Iterator[Check]:
        """How each copied byte that stays is verified, in the order of the destination."""
        cuts: list[tuple[int, int, Checksum | None]] = [
            (write.at, write.at + len(write.data), None) for write in self.writes
        ]
        cuts += [(sum_.at, sum_.at + sum_.nbytes, sum_) for sum_ in self.checksums]
        cuts.sort(key=lambda cut: cut[:2])
        n = 0
        for copy in self.copies:
            shift = copy.source_at - copy.at
            at, end = copy.at, copy.at + copy.nbytes
            while n < len(cuts) and cuts[n][1] <= at:
                n += 1
            while n < len(cuts) and cuts[n][0] < end:
                start, stop, checksum = cuts[n]
                if start > at:
                    yield Check(at, start - at, at + shift, None)
                if checksum is not None:
                    yield Check(start, stop - start, start + shift, checksum)
                at = max(at, stop)
                if stop > end:  # it goes on in what the next copy brings
                    break
                n += 1
            if at < end:
                yield Check(at, end - at, at + shift, None)
