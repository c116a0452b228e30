"""The stack of a walk, divided by marks, with limits for the memory that a pickle may take."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence

from ...sources.budget import (
    COMPACT_BYTE,
    IDLE,
    ITEM,
    MOST_PER_BYTE,
    PER_STORAGE,
    STACKED,
    TUPLE_ITEM,
    Budget,
    Excess,
)
from ..nodes import Items, Node, Text
from .literals import Literals
from .rows import compact_row, memory_of

#: The most marks that are open at one time.
MOST_MARKS = 100_000
_SHORT = 16  # items of a short tuple
_LONGEST_ROW = 32  # more nodes than a sequence that is taken at once needs on the stack


class MarkedStack(Literals, ABC):
    """A stack. A MARK sets it aside, so no opcode can reach below it.

    Each node on the stack takes a word of memory. A finished row of plain values takes less, and is
    counted with its real size: a file may be a list of millions of zeros.
    """

    def __init__(self, data: bytes, base: int, gaps: Mapping[int, int], budget: Budget) -> None:
        super().__init__(data, base, gaps)
        self.budget = budget
        #: the bytes of memory that the pickle may take in addition to its length, and that it took
        self.room, self.spent = budget.room, 0
        self.allowed = 0  # the part of the room that named storages added
        self.named: set[str] = set()  # the storages that were named
        self.copied = 0  # what copies of recalled texts took
        #: the stacks that marks set aside, and how many nodes they have
        self.below: list[list[Node]] = []
        self.waiting = 0
        self.longest_row = self.room // STACKED
        self.dropped: list[Node] = []
        self.is_usual = True
        #: offsets of strings with several uses
        self.shared_texts: set[int] = set()

    def charge(self, nbytes: int) -> None:
        """Count the memory of a built object; Excess if so many bytes can't need the sum."""
        spent = self.spent = self.spent + nbytes
        if spent > self.room and spent > self.room + self.position:
            raise self.excess(spent)

    def allow_storage(self, name: str) -> None:
        """Add what a tensor may need to the room, for a storage with a new name."""
        if name in self.named:
            return
        self.named.add(name)
        if not self.budget.take_storages(1):
            return
        more = min(PER_STORAGE, MOST_PER_BYTE * self.position - self.allowed)
        self.allowed += more
        self.room += more

    def allow_storages(self, names: Sequence[str], places: Sequence[int]) -> bool:
        """Like `allow_storage` for each at its place; False if one is not new, or adds less."""
        allowed = range(self.allowed, self.allowed + PER_STORAGE * len(names), PER_STORAGE)
        if (
            any(
                MOST_PER_BYTE * at < more + PER_STORAGE
                for at, more in zip(places, allowed, strict=True)
            )
            or not self.named.isdisjoint(names)
            or len(set(names)) < len(names)
            or not self.budget.take_storages(len(names))
        ):
            return False
        self.named.update(names)
        self.allowed += PER_STORAGE * len(names)
        self.room += PER_STORAGE * len(names)
        return True

    def excess(self, spent: int) -> Excess:
        return self.budget.excess(spent, self.position, len(self.data))

    def can_copy(self, nbytes: int) -> bool:
        """Whether copies of texts take at most half of the room with this one; if so, count it."""
        copied = self.copied + nbytes
        if 2 * copied > self.room + self.position:
            return False
        self.copied = copied
        self.charge(nbytes)
        return True

    def fits_sequence(self, nbytes: int, *, pushed: int = 0, besides: int = 0) -> bool:
        """Whether opcodes that become compact nodes fit in; if so, count them.

        `pushed`: how many nodes they add to the stack; `besides`: what else they take. False if
        that comes near a limit: then the opcodes are run, and counted, one by one.
        """
        if len(self.below) > MOST_MARKS - _LONGEST_ROW:
            return False
        spent = self.spent + COMPACT_BYTE * nbytes + besides
        stacked = STACKED * (self.waiting + len(self.stack) + pushed + _LONGEST_ROW)
        if spent + stacked > self.room + self.position:
            return False
        self.spent = spent
        return True

    def check_row(self) -> None:
        """Check the size of the open stack: many opcodes of one or two bytes push a node."""
        room = (self.room + self.position - self.spent) // STACKED - self.waiting
        if len(self.stack) > room:
            raise self.excess(self.spent + STACKED * (len(self.stack) + self.waiting))
        self.longest_row = room

    def to_mark(self) -> list[Node]:
        items = self.stack
        stack = self.stack = self.below.pop()
        self.waiting -= len(stack)
        self.longest_row += len(stack)
        return items

    def row_to_mark(self) -> Items:
        """The items above the mark as a row, counted with the memory that it takes."""
        row = compact_row(self.to_mark(), may_empty=True)
        self.charge(TUPLE_ITEM * len(row) if len(row) <= _SHORT else memory_of(row))
        return row

    def loose_to_mark(self) -> list[Node]:
        """The nodes above the mark, counted one by one because they do not become a row."""
        items = self.to_mark()
        self.charge(ITEM * len(items))
        return items

    def op_mark(self) -> None:
        if len(self.below) >= MOST_MARKS:
            raise self.fault("the pickle nests marks absurdly")
        self.below.append(self.stack)
        self.waiting += len(self.stack)
        self.longest_row -= len(self.stack)
        self.stack = []

    def op_pop(self) -> None:
        self.charge(IDLE)
        self.is_usual = False
        if self.stack:
            self.dropped.append(self.stack.pop())
        else:
            self.loose_to_mark()

    def op_pop_mark(self) -> None:
        self.charge(IDLE)
        self.is_usual = False
        self.dropped += self.loose_to_mark()

    def op_dup(self) -> None:
        self.charge(IDLE)
        self.is_usual = False
        top = self.stack[-1]
        if isinstance(top, Text):
            self.shared_texts.add(top.at)
        self.push(top)
