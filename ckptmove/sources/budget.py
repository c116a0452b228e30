"""Limit how much memory one file can make us allocate, in proportion to its size.

A file of a few bytes can ask for any amount of memory: an empty list takes one byte of a pickle and
hundreds in memory, and deflate shrinks some records a thousand times. So each thing that a pickle
builds has a price, which is what it takes of memory until its file is listed; and a file has a
budget, with everything nested in it, that grows with the bytes read so far. So a file that is too
dense is refused early. What takes long has a price too: a hundred bytes for each microsecond.

What libraries write stays far below, since picklers write what is equal once. For a file that
does not, and that one trusts, one sets `CKPTMOVE_MAX_MEMORY`.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from mmap import mmap

from ..errors import CorruptError, UsageError

#: Pickles that follow each other in the same bytes; of all bytes of a file together.
MOST_PICKLES = 10_000
#: What to say of a file for which the memory does not suffice.
NO_MEMORY = "needs more memory than this process can get"
#: The environment variable that allows a file to take more, such as 2G.
VARIABLE = "CKPTMOVE_MAX_MEMORY"

_FLOOR = 110_000_000  # bytes of memory for any file
_UNPACKED_FLOOR = 1 << 18  # bytes of records that are packed more tightly than usual, together
_UNPACKED_SHARE = 32  # bytes for each stored one; a repetitive pickle of real tensors has ten
_CONTENT_FLOOR = 32 << 20  # bytes of tensors that are inflated in memory
_CONTENT_SHARE = 8  # for each stored byte
_KEY_ITEMS = 1 << 14  # of the tuples in keys that are larger than usual
_USUAL_KEY = 32
_SHARE_OF_INDEX = 32  # bytes of memory for each of an index, which is all small objects

#: Prices, in bytes of memory: of a list, dict, set or object, a tuple, a string without its
#: characters, a key with its value, a value or an item of a row that is no array.
CONTAINER, TUPLE, TEXT, PAIR, ITEM = 320, 200, 64, 100, 16
#: Of a value on the stack, a name, a reference to a storage, a memo slot out of order, an opcode
#: without effect, and bytes that may be a checkpoint, which are opened.
STACKED, NAME, STORAGE, SLOT, IDLE, BLOB = 8, 4000, 300, 120, 100, 10_000
#: Of a plain tensor, for each of its bytes in the pickle: it is one compact node.
TENSOR_BYTE = 6
#: By how much a storage that is named for the first time makes the budget grow: a tensor has some
#: thirty nodes of its own, of its module and its optimizer. Together, for each byte of the pickle.
PER_STORAGE, MOST_PER_BYTE = 4000, 48

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", re.IGNORECASE)


@cache
def _size(said: str) -> int:
    """The bytes that a size such as 2G stands for."""
    found = _SIZE.fullmatch(said.strip())
    if found is None:
        raise UsageError(
            f"{VARIABLE}={said!r:.40} is not a size", hint=f"for example {VARIABLE}=2G"
        )
    return int(found[1]) * _UNITS[found[2].upper()]


def _floor() -> int:
    """How many bytes of memory any file may take."""
    return max(_FLOOR, _size(os.environ.get(VARIABLE) or "0"))


class Budget:
    """How much more memory may be taken for a file."""

    def __init__(self) -> None:
        self._room = _floor()
        self._unpacked = _UNPACKED_FLOOR
        self._content = _CONTENT_FLOOR
        self._key_items = _KEY_ITEMS
        self._following = MOST_PICKLES - 1

    @property
    def room(self) -> int:
        """How many bytes of memory the next pickle may take, and one more for each of its own."""
        return self._room

    def allow_small_objects(self, nbytes: int) -> None:
        """Have a pickle of so many bytes consist of small objects, as an index of items does."""
        self._room += nbytes * _SHARE_OF_INDEX

    def take(self, walked: int, spent: int) -> None:
        """Count the memory that a pickle took, and the bytes of its own."""
        self._room += walked - spent

    def take_key(self, items: int) -> bool:
        """Whether tuples in a key may have so many items; those of an unusual one are counted."""
        self._key_items -= max(0, items - _USUAL_KEY)
        return self._key_items >= 0

    def follow(self) -> bool:
        """Whether a pickle that follows another may be read; if so, that is counted."""
        self._following -= 1
        return self._following >= 0

    def unpack(self, stored_nbytes: int, nbytes: int) -> bool:
        """Whether a record that is to be parsed may be inflated; if so, that is counted."""
        self._unpacked -= max(0, nbytes - stored_nbytes * _UNPACKED_SHARE)
        return self._unpacked >= 0

    def may_unpack(self, stored_nbytes: int, nbytes: int) -> bool:
        """Whether a record that is to be parsed may be inflated; nothing is counted."""
        return nbytes - stored_nbytes * _UNPACKED_SHARE <= self._unpacked

    def inflate(self, stored_nbytes: int, nbytes: int) -> bool:
        """Whether the bytes of a tensor may be inflated in memory; if so, that is counted."""
        self._content -= max(0, nbytes - stored_nbytes * _CONTENT_SHARE)
        return self._content >= 0


class Boundless(Budget):
    """No limits, for pickles that are our own."""

    @property
    def room(self) -> int:
        """Without end."""
        return sys.maxsize


def reserve(nbytes: int) -> None:
    """Raise MemoryError unless this process can get so much memory.

    A library that is not written in Python may end the process where it can't get it.
    """
    try:
        mmap(-1, max(1, nbytes)).close()
    except (OSError, OverflowError):
        raise MemoryError(NO_MEMORY) from None


class Excess(CorruptError):
    """A file would make us build far more than its bytes can need: no more of it is read."""


def excess(spent: int, walked: int, nbytes: int) -> Excess:
    """The error for a pickle of so many bytes, which took so much memory for those walked."""
    about = max(spent, spent * nbytes // max(1, walked)) / 1e6
    return Excess(
        f"the pickle is far denser than what libraries write: its {nbytes:,} bytes would take some "
        f"{about:,.0f} MB of memory",
        hint=f"if you trust it: {VARIABLE}={_rounded(about)}",
    )


def _rounded(megabytes: float) -> str:
    """A size that suffices, with some to spare."""
    return f"{int(megabytes * 1.25 / 1024) + 1}G"
