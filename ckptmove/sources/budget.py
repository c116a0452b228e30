"""Limit how much memory one file can make us allocate, in proportion to its size.

A file of a few bytes can ask for any amount of memory: an empty list takes one byte of a pickle and
hundreds in memory, and deflate shrinks some records a thousand times. So each object that a pickle
builds has a price: the memory that it takes in the verb that needs most for it, which is mostly
`convert`, or half of what `diff` needs for two. A file has one budget, together with everything
nested in it. It grows with the bytes read so far: a file that is too dense is refused early.

The sum of all prices is limited, so no mixture of objects takes more than one kind of them. Prices
are measured: `tests/sources/test_budget.py`. For a dense file that a user trusts, the environment
variable `CKPTMOVE_MAX_MEMORY` raises the limit.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from mmap import mmap

from ..errors import CorruptError, InputError, UsageError

#: Pickles that follow each other in the same bytes; of all bytes of a file together.
MOST_PICKLES = 10_000
#: The message for a file that needs more memory than there is.
NO_MEMORY = "needs more memory than this process can get"
#: The environment variable that allows a file to take more, such as 2G.
VARIABLE = "CKPTMOVE_MAX_MEMORY"

_FLOOR = 128_000_000  # bytes of memory for any file
_UNPACKED_FLOOR = 1 << 18  # bytes of all records that are packed more tightly than usual
_UNPACKED_SHARE = 32  # bytes for each stored one; a repetitive pickle of real tensors has ten
_CONTENT_FLOOR = 32 << 20  # bytes of tensors that are inflated in memory
_CONTENT_SHARE = 8  # for each stored byte
_KEY_ITEMS = 1 << 14  # items of tuples in keys that are larger than usual
_USUAL_KEY = 32
_SHARE_OF_INDEX = 32  # bytes of memory for each of an index, which is all small objects

#: Prices in bytes of memory: of a list, dict or set; of an object that a call makes; of a tuple; of
#: a string in addition to its characters; of an item of a row that is no array, and of a set.
CONTAINER, CALL, TUPLE, TEXT, ITEM, MEMBER = 500, 900, 560, 236, 120, 460
#: Of an item of a short tuple; of a value of bytes; of an integer of more than 64 bits.
TUPLE_ITEM, BYTES, LONG = 24, 450, 700
#: Of a key with its value, and in addition of a key that is no text.
PAIR, OTHER_KEY = 146, 300
#: Of a short dict of numbers whose keys others share, of each of its pairs, and of each character
#: of its keys, which JSON repeats.
RECORD, FIELD, KEY_CHARACTER = 300, 100, 2
#: Of a value on the stack, a name, a reference to a storage, a memo slot out of order, an opcode
#: without effect, and bytes that may be a checkpoint and are opened.
STACKED, NAME, STORAGE, SLOT, IDLE, BLOB = 8, 4000, 450, 400, 400, 8000
#: Of an opcode that appends to what is not empty, at least: since protocol 1, a pickler appends a
#: thousand at once.
APPEND = 160
#: Of each byte of opcodes that become one compact node, such as those of a plain tensor.
COMPACT_BYTE = 6
#: How much a storage with a new name adds to the budget, for the tensor, its module and its
#: optimizer; and the most that all of them add, for each byte of the pickle.
PER_STORAGE, MOST_PER_BYTE = 7000, 140

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", re.IGNORECASE)


@cache
def _size(said: str) -> int:
    """Return the number of bytes that a size such as 2G stands for."""
    found = _SIZE.fullmatch(said.strip())
    if found is None:
        raise UsageError(
            f"{VARIABLE}={said!r:.40} is not a size", hint=f"for example {VARIABLE}=2G"
        )
    return int(found[1]) * _UNITS[found[2].upper()]


def _floor() -> int:
    """Return the bytes of memory that any file may take."""
    return max(_FLOOR, _size(os.environ.get(VARIABLE) or "0"))


class Budget:
    """Counts how much more memory a file may take."""

    def __init__(self) -> None:
        self._room = _floor()
        self._excess: tuple[str, str] | None = None  # the first error, and its hint
        self._unpacked = _UNPACKED_FLOOR
        self._content = _CONTENT_FLOOR
        self._key_items = _KEY_ITEMS
        self._following = MOST_PICKLES - 1
        self._storages: int | None = None  # how many may add to the budget, if that is known

    @property
    def room(self) -> int:
        """The bytes of memory that the next pickle may take, in addition to its length."""
        return self._room

    def allow_small_objects(self, nbytes: int) -> None:
        """Allow a pickle of this size to consist of small objects, as an index of items does."""
        self._room += nbytes * _SHARE_OF_INDEX

    def hold_storages(self, records: int) -> None:
        """Let no more storages add to the budget than the zips of the file have records."""
        self._storages = (self._storages or 0) + records

    def take_storages(self, count: int) -> bool:
        """Whether so many more storages may add to the budget; if so, count them."""
        if self._storages is None:
            return True
        if self._storages < count:
            return False
        self._storages -= count
        return True

    def take(self, walked: int, spent: int) -> None:
        """Count the memory that a pickle took, and its bytes."""
        self._room += walked - spent

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count what is read within, unless it is faulty: it is then read again."""
        before = self.__dict__.copy()
        try:
            yield
        except Excess:  # again at once, without another walk
            raise
        except InputError:
            self.__dict__.update(before)
            raise

    @contextmanager
    def without_counting(self) -> Iterator[None]:
        """Do not count what is read within, which is read again, unless it is too dense."""
        before = self.__dict__.copy()
        yield
        self.__dict__.update(before)

    def excess(self, spent: int, walked: int, nbytes: int) -> Excess:
        """Return the error for a pickle of `nbytes` that spent so much memory on those walked.

        All that is read of the file after that gets the same error.
        """
        if self._excess is None:
            about = max(spent, spent * nbytes // max(1, walked)) / 1e6
            self._excess = (
                f"the pickle is far denser than what libraries write: its {nbytes:,} bytes would "
                f"take some {about:,.0f} MB of memory",
                f"if you trust it: {VARIABLE}={_rounded(about)}",
            )
        message, hint = self._excess
        return Excess(message, hint=hint)

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

    @property
    def room(self) -> int:
        """No end."""
        return sys.maxsize


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


def _rounded(megabytes: float) -> str:
    """Return a size that suffices, with some to spare."""
    return f"{int(megabytes * 1.25 / 1024) + 1}G"
