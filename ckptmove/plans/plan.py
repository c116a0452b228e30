"""A plan: the operations that write a file, decided before the first byte is written. No I/O."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """Copy `nbytes` from offset `source_at` of a source to offset `at` of the destination."""

    source_at: int
    nbytes: int
    at: int
    source: int = 0  #: the number of the source, here and below


class Write(NamedTuple):
    """Write these bytes at offset `at` of the destination, over what was copied there."""

    at: int
    data: bytes | memoryview


class Gather(NamedTuple):
    """Write the elements of a strided view at offset `at`, in row-major order."""

    at: int
    nbytes: int
    source: int
    source_at: int  #: of the region that contains the view
    source_nbytes: int
    dtype: str  #: torch's name of the dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  #: from the start of the region, in elements
    conj: bool = False  #: whether to negate the imaginary part
    neg: bool = False  #: whether to negate the value
    big_endian: bool = False  #: whether the region's elements are big-endian
    to: str | None = None  #: the dtype to cast to; None keeps the bits
    content: bytes | memoryview | None = None  #: the bytes of the region, if no source has them


class CrcRange(NamedTuple):
    """A range of the destination whose CRC-32 is computed after writing."""

    at: int
    nbytes: int


class Checksum(NamedTuple):
    """The zip CRC-32 that the bytes `[at, at + nbytes)` of the destination must have."""

    at: int
    nbytes: int
    crc32: int
    name: str  #: the name of the record, for messages
    source_at: int  #: the offset of the same bytes in the source
    source: int = 0


class SourceChecksum(NamedTuple):
    """The zip CRC-32 that a range of a source must have, if no copy covers the whole range."""

    source_at: int
    nbytes: int
    crc32: int
    name: str  #: the name of the record, for messages
    source: int = 0


class Proof(NamedTuple):
    """A checksum in a source for a range of it that holds a part of a storage."""

    nbytes: int
    crc32: int
    name: str  #: for the message
    source: int  #: which of the sources, counted from that of the storage; and where there
    source_at: int
    #: where the same bytes lie in the storage; None if they do not follow each other there
    at: int | None = None


class Check(NamedTuple):
    """A copied range of the destination, to verify by its checksum or against its source."""

    at: int
    nbytes: int
    source_at: int
    checksum: Checksum | None
    source: int = 0


class Stretch(NamedTuple):
    """A copied range of the destination, with the checksums of ranges in it, in order."""

    at: int
    end: int
    shift: int  #: from an offset here to that of the same byte in the source
    source: int
    checksums: Sequence[Checksum]

    def checks(self) -> Iterator[Check]:
        """What is verified by a checksum, and what lies between."""
        at, end, shift, source, checksums = self
        for checksum in checksums:
            start, nbytes = checksum[:2]
            if start > at:
                yield Check(at, start - at, at + shift, None, source)
            yield Check(start, nbytes, start + shift, checksum, source)
            at = start + nbytes
        if at < end:
            yield Check(at, end - at, at + shift, None, source)


class Plan(NamedTuple):
    """The operations that make a file."""

    #: `clone` (a copy of the source), `patch` (a copy with some bytes replaced) or `relay` (laid
    #: out anew)
    method: str
    nbytes: int  #: the size of the file
    copies: tuple[Copy, ...]  #: in the order of the destination, without overlaps
    writes: tuple[Write, ...]  #: over and between the copies
    #: of ranges that lie within one copy and outside the writes, in order
    checksums: tuple[Checksum, ...] = ()
    gathers: tuple[Gather, ...] = ()  #: between the copies, in order
    #: ranges whose CRC-32s `seal` needs, in order and without overlaps; outside of copies, gathers
    #: and writes there are zeros
    measures: tuple[CrcRange, ...] = ()
    #: CRC-32s of the measures → the last writes, outside of all measures, in places where nothing
    #: else is
    seal: Callable[[Sequence[int]], Sequence[Write]] | None = None
    source_checksums: tuple[SourceChecksum, ...] = ()  #: for ranges that no copy covers
    #: whether all bytes must be read here for checksums; otherwise a store may copy them itself
    reads_all: bool = False

    @property
    def keeps_length(self) -> bool:
        """Whether all bytes of the source keep their offsets."""
        return self.method != "relay"

    @property
    def is_clone(self) -> bool:
        """Whether the destination starts as a copy of a whole source, byte for byte."""
        return len(self.copies) == 1 and self.copies[0][:3] == (0, self.nbytes, 0)

    def checks(self) -> Iterator[Check]:
        """The checks of all copied bytes that no write replaces, in order."""
        return (check for stretch in self.stretches() for check in stretch.checks())

    def stretches(self) -> Iterator[Stretch]:
        """The copied ranges that no write replaces, in order."""
        cuts = sorted([(at, at + len(data)) for at, data in self.writes if data])
        sums, starts = self.checksums, [each.at for each in self.checksums]
        n = 0
        for source_at, nbytes, at, source in self.copies:
            shift, end = source_at - at, at + nbytes
            while n < len(cuts) and cuts[n][1] <= at:
                n += 1
            pieces = list[tuple[int, int]]()
            while n < len(cuts) and cuts[n][0] < end:
                pieces.append((at, cuts[n][0]))
                at = max(at, cuts[n][1])
                if at > end:  # the write continues in the next copy
                    break
                n += 1
            for start, stop in (*pieces, (at, end)):
                if start < stop:
                    inside = sums[bisect_left(starts, start) : bisect_left(starts, stop)]
                    yield Stretch(start, stop, shift, source, inside)


class Edit(NamedTuple):
    """Replace the bytes `[start, end)` of a source by `new`."""

    start: int
    end: int
    new: bytes | Plan  #: the bytes, or the plan that makes them from the old ones

    @property
    def growth(self) -> int:
        """The number of bytes it adds to the source."""
        new = len(self.new) if isinstance(self.new, bytes) else self.new.nbytes
        return new - (self.end - self.start)


def apply_edits(start: int, nbytes: int, edits: Iterable[Edit]) -> Plan:
    """Plan a file with these changes: as a patch if they keep all lengths.

    The source is the `nbytes` from `start` of the file that is copied from. Edits count from
    `start`; no two overlap.
    """
    edits = sorted(edits, key=lambda edit: edit.start)
    if all(_keeps_length(edit) for edit in edits):
        writes: list[Write] = []
        checksums: list[Checksum] = []
        for at, _, new in edits:
            if isinstance(new, bytes):
                writes.append(Write(at, new))
            else:
                writes += [Write(at + write.at, write.data) for write in new.writes]
                checksums += [each._replace(at=at + each.at) for each in new.checksums]
        method = "patch" if writes else "clone"
        return Plan(method, nbytes, (Copy(start, nbytes, 0),), tuple(writes), tuple(checksums))
    return _apply_moving(start, nbytes, edits)


def _keeps_length(edit: Edit) -> bool:
    if isinstance(edit.new, bytes):
        return len(edit.new) == edit.end - edit.start
    return edit.new.keeps_length


def _apply_moving(start: int, nbytes: int, edits: list[Edit]) -> Plan:
    """As `apply_edits`, if bytes after a change must move."""
    copies, writes, checksums = [], [], []
    done = at = 0  # in the source, in the destination
    for edit in (*edits, Edit(nbytes, nbytes, b"")):
        if edit.start > done:
            copies.append(Copy(start + done, edit.start - done, at))
            at += edit.start - done
        new = edit.new
        if isinstance(new, bytes):
            if new:
                writes.append(Write(at, new))
            at += len(new)
        else:
            copies += [copy._replace(at=at + copy.at) for copy in new.copies]
            writes += [Write(at + write.at, write.data) for write in new.writes]
            checksums += [each._replace(at=at + each.at) for each in new.checksums]
            at += new.nbytes
        done = edit.end
    return Plan("relay", at, tuple(copies), tuple(writes), tuple(checksums))


def apply_plan(plan: Plan, *contents: bytes) -> bytes:
    """Execute a plan of copies and writes in memory."""
    made = bytearray(plan.nbytes)
    for source_at, nbytes, at, source in plan.copies:
        made[at : at + nbytes] = contents[source][source_at : source_at + nbytes]
    for at, data in plan.writes:
        made[at : at + len(data)] = data
    return bytes(made)
