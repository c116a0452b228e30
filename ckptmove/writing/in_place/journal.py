"""The journal of a change in place: everything needed to undo it at any point. No I/O.

    "ckptmove-undo-1\\n"  16 bytes; all numbers below are little-endian
    size of the file      8
    its inode number      8
    its tail             32: SHA-256 of its last 64 KiB before the change
    changes               8: the number of changes, and for each
        at, nbytes       16
        old, new         nbytes each
    seal                 32: SHA-256 of everything above

The journal is beside the file, and synced before the first change. Until then it has another name:
a journal under that name was never finished, and its file is untouched. Hence a journal under its
final name with a broken seal is damaged, and may be the only way to undo a change.

A complete journal may belong to another file: the file may have been replaced since, or the journal
may have come with a copy of the file. It belongs to the file if the inode number, the size and the
tail agree, and if each byte to change has the old or the new value; an interrupted change leaves a
mixture. The tail of a zip holds the checksums of its records, so it differs between files of the
same layout. The number of the device is not part of it, because it may change when the machine
restarts. Some file systems (FAT, some FUSE) also assign new inode numbers at a restart; then an
interrupted change is not undone, and its journal is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ...errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from ...plans.plan import Write

MAGIC = b"ckptmove-undo-"  # of every version
TAIL_NBYTES = 1 << 16

_MAGIC = b"ckptmove-undo-1\n"
_HEAD = struct.Struct("<16sQQ32sQ")
_CHANGE = struct.Struct("<QQ")
_SEAL_NBYTES = 32
_BLOCK = 512  # bytes compared at once: the smallest write of a disk
HEAD_NBYTES = _HEAD.size

Read = Callable[[int, int], bytes]  # offset, nbytes → bytes


class Change(NamedTuple):
    """Old and new bytes at an offset of a file, of equal length."""

    at: int
    old: bytes
    new: bytes


class Journal(NamedTuple):
    """The changes to one file, with the data that identifies the file."""

    nbytes: int  #: the size of the file, which does not change
    inode: int  #: its number in its file system
    tail: bytes  #: the digest of its last `TAIL_NBYTES` before the change
    changes: tuple[Change, ...]  #: in order, without overlaps

    @classmethod
    def of(cls, nbytes: int, inode: int, writes: Iterable[Write], read: Read) -> Journal:
        """Make the journal of planned writes to a file, which `read` reads."""
        changes = tuple(_changes(writes, read))
        for left, right in pairwise(changes):  # else it could not be read back
            assert left.at + len(left.old) <= right.at
        return cls(nbytes, inode, _tail(nbytes, read), changes)

    @property
    def changed_nbytes(self) -> int:
        """How many bytes the changes replace."""
        return sum(len(change.new) for change in self.changes)

    def parts(self) -> list[bytes]:
        """Return what the journal on disk consists of, without a copy of the old and new bytes."""
        parts = [_HEAD.pack(_MAGIC, self.nbytes, self.inode, self.tail, len(self.changes))]
        for change in self.changes:
            parts += (_CHANGE.pack(change.at, len(change.old)), change.old, change.new)
        return [*parts, _digest(*parts)]

    def to_bytes(self) -> bytes:
        """Return the journal as the bytes on disk."""
        return b"".join(self.parts())

    @classmethod
    def from_bytes(cls, data: bytes) -> Journal:
        """Parse the bytes of `to_bytes`. Raises UnsupportedError if another version wrote them."""
        nbytes, inode, tail, count = _unpack_head(data)
        body = data[:-_SEAL_NBYTES]
        if _digest(body) != data[-_SEAL_NBYTES:]:
            raise _damaged()
        try:
            changes, at, end = [], _HEAD.size, 0
            for _ in range(count):
                start, length = _CHANGE.unpack_from(body, at)
                at += _CHANGE.size
                old, new = body[at : at + length], body[at + length : at + 2 * length]
                if start < end or start + length > nbytes or len(new) != length:
                    raise CorruptError("its journal is invalid")
                changes.append(Change(start, old, new))
                at, end = at + 2 * length, start + length
        except struct.error as error:
            raise CorruptError("its journal is invalid") from error
        if at != len(body):
            raise CorruptError("its journal is invalid")
        return cls(nbytes, inode, tail, tuple(changes))

    def to_undo(self, nbytes: int, read: Read) -> list[Change]:
        """Return the changes that were made, partly or completely, to a file of `nbytes`.

        Raises CorruptError if the journal does not belong to the file.
        """
        if nbytes != self.nbytes:
            raise _stranger()
        made = []
        for change in self.changes:
            now = read(change.at, len(change.old))
            if now != change.old:
                if now != change.new and not _is_mixture(now, change):
                    raise _stranger()
                made.append(change)
        if _tail(nbytes, read, self.changes) != self.tail:
            raise _stranger()
        return made


def check_head(head: bytes, journal_nbytes: int, nbytes: int, inode: int) -> None:
    """Check the first `HEAD_NBYTES` of a journal before reading the rest; it may be a trap.

    `nbytes` and `inode` are those of the file beside it. Raises CorruptError if the journal belongs
    to another file, or is larger than a journal of this file can be.
    """
    journaled_nbytes, journaled_inode, _, count = _unpack_head(head)
    if journaled_inode != inode:
        raise CorruptError("is not the file that its journal belongs to")
    if journaled_nbytes != nbytes:
        raise _stranger()
    most = _HEAD.size + min(count, nbytes) * _CHANGE.size + 2 * nbytes + _SEAL_NBYTES
    if journal_nbytes > most:  # changes do not overlap
        raise _damaged()


def _unpack_head(data: bytes) -> tuple[int, int, bytes, int]:
    """Return the size of the file, its inode number, its tail, and the number of changes."""
    magic = data[: len(_MAGIC)]
    if magic != _MAGIC and magic.startswith(MAGIC) and magic.endswith(b"\n"):
        raise UnsupportedError("its journal was written by another version of ckptmove")
    if magic != _MAGIC or len(data) < _HEAD.size:
        raise _damaged()
    _, nbytes, inode, tail, count = _HEAD.unpack_from(data)
    return nbytes, inode, tail, count


def _changes(writes: Iterable[Write], read: Read) -> Iterator[Change]:
    """Yield the changes that writes make: runs of differing blocks, trimmed at both ends."""
    for at, new in sorted(writes):
        old = read(at, len(new))
        blocks = range(0, len(new), _BLOCK)
        differ = [n for n in blocks if old[n : n + _BLOCK] != new[n : n + _BLOCK]]
        first = 0
        for n, start in enumerate(differ):
            if n + 1 == len(differ) or differ[n + 1] != start + _BLOCK:
                yield _trimmed(at, old, new, differ[first], min(start + _BLOCK, len(new)))
                first = n + 1


def _trimmed(at: int, old: bytes, new: bytes | memoryview, start: int, end: int) -> Change:
    while old[start] == new[start]:
        start += 1
    while old[end - 1] == new[end - 1]:
        end -= 1
    return Change(at + start, old[start:end], bytes(new[start:end]))


def _is_mixture(now: bytes, change: Change) -> bool:
    return len(now) == len(change.old) and all(
        byte in (old, new) for byte, old, new in zip(now, change.old, change.new, strict=True)
    )


def _tail(nbytes: int, read: Read, changes: Iterable[Change] = ()) -> bytes:
    """Return the digest of a file's tail before the changes."""
    start = max(0, nbytes - TAIL_NBYTES)
    tail = bytearray(read(start, nbytes - start))
    for change in changes:
        skip = max(0, start - change.at)
        if skip < len(change.old):
            at = change.at + skip - start
            tail[at : at + len(change.old) - skip] = change.old[skip:]
    return _digest(tail)


def _digest(*parts: bytes | bytearray) -> bytes:
    import hashlib  # imported only here: it is slow, and most files have no journal

    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _damaged() -> CorruptError:
    return CorruptError("its journal is damaged")


def _stranger() -> CorruptError:
    return CorruptError("is not in the state that its journal describes")
