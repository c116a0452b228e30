"""Limit how much memory one file can make us allocate, in proportion to its size.

A file of a few bytes can ask for any amount of memory: an empty list takes one byte of a pickle and
hundreds in memory, and deflate shrinks some records a thousand times. Files of libraries stay far
below the limits here. Each kind also has a minimum, because small files may be dense.

One budget serves a whole file, with everything nested in it. A limit grows with the bytes read so
far, so that a file that is too dense is refused early.
"""

from __future__ import annotations

import sys
from mmap import mmap

from ..errors import CorruptError

#: Pickles that follow each other in the same bytes; of all bytes of a file together.
MOST_PICKLES = 10_000
#: The message for a file that needs more memory than there is.
NO_MEMORY = "needs more memory than this process can get"

_UNPACKED_FLOOR = 1 << 18  # bytes of all records that are packed more tightly than usual
_UNPACKED_SHARE = 32  # bytes for each stored one; a repetitive pickle of real tensors has ten
_CONTENT_FLOOR = 32 << 20  # bytes of tensors that are inflated in memory
_CONTENT_SHARE = 8  # for each stored byte
_KEY_ITEMS = 1 << 14  # items of tuples in keys that are larger than usual
_USUAL_KEY = 32
_SMALLEST = 8  # bytes of an object in an index, beyond the allowance of any pickle

#: The kinds of objects that a pickle builds, or memory that it needs.
CONTAINERS, TUPLES, TEXTS, PAIRS, NAMES, STORAGES, SCATTERED, IDLE, VALUES, BLOBS = range(10)

#: For each kind: the number that any file may have; bytes of pickles per further one; its name.
_SHARES: tuple[tuple[int, int, str], ...] = (
    (1 << 16, 16, "lists, dicts and objects"),  # a tensor has two or three objects in 90 bytes
    (1 << 17, 16, "tuples"),  # a tensor has four in 90 bytes
    (1 << 17, 12, "strings"),
    (1 << 17, 12, "keys"),
    (1 << 14, 64, "names"),  # each is pickled once
    (1 << 15, 56, "references to storages"),  # one in 90 bytes
    (1 << 16, 64, "memo slots out of order"),  # picklers fill them one by one, each once
    (1 << 14, 64, "opcodes without effect"),  # picklers write nearly none
    (1 << 20, 4, "values"),  # a tensor has fifteen in 90 bytes, a list one in two or more
    (1 << 14, 128, "checkpoints in bytes"),  # a pickle of a few numbers has fifty bytes
)


#: For each kind, the bytes of a pickle that allow one more.
SHARES = [share for _, share, _ in _SHARES]


class Budget:
    """Counts how many more objects of each kind a file may build."""

    def __init__(self) -> None:
        self._walked = 0  # bytes of pickles
        self._used = [0] * len(_SHARES)
        self._unpacked = _UNPACKED_FLOOR
        self._content = _CONTENT_FLOOR
        self._key_items = _KEY_ITEMS
        self._following = MOST_PICKLES - 1

    def rooms(self) -> list[int]:
        """Return, for each kind, how many the next pickle may have, regardless of its length."""
        walked = self._walked
        pairs = zip(_SHARES, self._used, strict=True)
        return [floor + walked // share - used for (floor, share, _), used in pairs]

    def allow_small_objects(self, nbytes: int) -> None:
        """Allow a pickle of this size to consist of small objects, as an index of items does."""
        for kind in (CONTAINERS, TUPLES, PAIRS):
            self._used[kind] -= nbytes // _SMALLEST

    def take(self, walked: int, used: list[int]) -> None:
        """Count the objects built from a pickle, and its bytes."""
        self._walked += walked
        self._used = [before + now for before, now in zip(self._used, used, strict=True)]

    def take_key(self, items: int) -> bool:
        """Whether tuples in a key may have this many items; unusual numbers are counted."""
        self._key_items -= max(0, items - _USUAL_KEY)
        return self._key_items >= 0

    def follow(self) -> bool:
        """Whether a pickle that follows another may be read; if so, count it."""
        self._following -= 1
        return self._following >= 0

    def unpack(self, stored_nbytes: int, nbytes: int) -> bool:
        """Whether a record to parse may be inflated; if so, count it."""
        self._unpacked -= max(0, nbytes - stored_nbytes * _UNPACKED_SHARE)
        return self._unpacked >= 0

    def may_unpack(self, stored_nbytes: int, nbytes: int) -> bool:
        """Whether a record to parse may be inflated; does not count it."""
        return nbytes - stored_nbytes * _UNPACKED_SHARE <= self._unpacked

    def inflate(self, stored_nbytes: int, nbytes: int) -> bool:
        """Whether the bytes of a tensor may be inflated in memory; if so, count them."""
        self._content -= max(0, nbytes - stored_nbytes * _CONTENT_SHARE)
        return self._content >= 0


class Boundless(Budget):
    """No limits, for pickles that are our own."""

    def rooms(self) -> list[int]:
        return [sys.maxsize] * len(_SHARES)


def reserve(nbytes: int) -> None:
    """Raise MemoryError unless this process can allocate this much memory.

    A library in C or Rust may end the process if an allocation fails.
    """
    try:
        mmap(-1, max(1, nbytes)).close()
    except (OSError, OverflowError):
        raise MemoryError(NO_MEMORY) from None


class Excess(CorruptError):
    """Raised if a file would make us build far more than its bytes can need."""


def excess(kind: int) -> Excess:
    """Return the error for a pickle that has too many objects of a kind."""
    return Excess(
        f"the pickle has far more {_SHARES[kind][2]} than one of its length can need: it would "
        "take too much memory"
    )
