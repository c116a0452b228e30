"""The stack of a walk, which marks divide, and what a pickle may make us put on it."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping

from ...sources.budget import (
    IDLE,
    ITEM,
    MOST_PER_BYTE,
    PER_STORAGE,
    STACKED,
    Budget,
    Excess,
    excess,
)
from ..nodes import Items, Node, Text
from .literals import Literals
from .rows import memory_of, packed

#: Marks that wait for their end.
MOST_MARKS = 100_000


class MarkedStack(Literals, ABC):
    """A stack. A MARK sets it aside, so no opcode can reach below it.

    What lies on it takes a word of memory for each node. A row that is closed takes less if it is
    of plain values, and is counted as what it takes: a file may be a list of millions of zeros.
    """

    def __init__(self, data: bytes, base: int, gaps: Mapping[int, int], budget: Budget) -> None:
        super().__init__(data, base, gaps)
        self.budget = budget
        #: bytes of memory that the pickle may take beside its own, and that it took
        self.room, self.spent = budget.room, 0
        self.allowed = 0  # of the room, for storages that were named
        #: what marks set aside, and how many nodes these are
        self.below: list[list[Node]] = []
        self.waiting = 0
        self.longest_row = self.room // STACKED
        self.dropped: list[Node] = []
        #: offsets of strings that have several uses
        self.shared_texts: set[int] = set()

    def charge(self, nbytes: int) -> None:
        """Count the memory of what is built; Excess if it is more than so many bytes can need."""
        spent = self.spent = self.spent + nbytes
        if spent > self.room and spent > self.room + self.position:
            raise self.excess(spent)

    def allow_storage(self) -> None:
        """Have the budget grow by what a tensor may need, for a storage that was just named."""
        more = min(PER_STORAGE, MOST_PER_BYTE * self.position - self.allowed)
        self.allowed += more
        self.room += more

    def excess(self, spent: int) -> Excess:
        return excess(spent, self.position, len(self.data))

    def has_half(self, nbytes: int) -> bool:
        """Whether with so much memory half of what there is is left; if so, it is counted."""
        fits = 2 * (self.spent + nbytes) <= self.room + self.position
        self.spent += fits * nbytes
        return fits

    def check_row(self) -> None:
        """Check what is on the stack before it is closed: many opcodes of a byte or two push."""
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
        """What a container holds from now on, counted as the memory that it takes."""
        row = packed(self.to_mark())
        self.charge(memory_of(row))
        return row

    def loose_to_mark(self) -> list[Node]:
        """What does not become a row, counted one by one."""
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
        if self.stack:
            self.dropped.append(self.stack.pop())
        else:
            self.loose_to_mark()

    def op_pop_mark(self) -> None:
        self.charge(IDLE)
        self.dropped += self.loose_to_mark()

    def op_dup(self) -> None:
        self.charge(IDLE)
        top = self.stack[-1]
        if isinstance(top, Text):
            self.shared_texts.add(top.at)
        self.push(top)
