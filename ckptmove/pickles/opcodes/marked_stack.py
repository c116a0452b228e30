"""The stack of a walk, divided by marks, with limits for the memory that a pickle may take."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping

from ...sources.budget import IDLE, SHARES, VALUES, Budget, excess
from ..nodes import Items, Node, Text
from .literals import Literals
from .rows import packed, words

#: The most marks that are open at one time.
MOST_MARKS = 100_000


class MarkedStack(Literals, ABC):
    """A stack. A MARK sets it aside, so no opcode can reach below it.

    Each node on the stack takes a word of memory. A finished row of plain values takes less, and is
    counted with its real size: a file may be a list of millions of zeros.
    """

    def __init__(self, data: bytes, base: int, gaps: Mapping[int, int], budget: Budget) -> None:
        super().__init__(data, base, gaps)
        self.budget = budget
        self.rooms = budget.rooms()
        self.used = [0] * len(self.rooms)
        #: the stacks that marks set aside, and how many nodes they have
        self.below: list[list[Node]] = []
        self.waiting = 0
        self.longest_row = self.rooms[VALUES]
        self.dropped: list[Node] = []
        #: offsets of strings with several uses
        self.shared_texts: set[int] = set()

    def count(self, kind: int, number: int = 1) -> None:
        """Count built objects; CorruptError if there are more than so many bytes can need."""
        used = self.used[kind] = self.used[kind] + number
        if used > self.rooms[kind] and used > self.rooms[kind] + self.position // SHARES[kind]:
            raise excess(kind)

    def fits(self, kind: int, number: int = 1) -> bool:
        """Count built objects; return whether so many bytes can need as many."""
        used = self.used[kind] = self.used[kind] + number
        room = self.rooms[kind]
        return used <= room or used <= room + self.position // SHARES[kind]

    def check_row(self) -> None:
        """Check the size of the open stack: many opcodes of one or two bytes push a node."""
        room = self.rooms[VALUES] + self.position // SHARES[VALUES] - self.used[VALUES]
        room -= self.waiting
        if len(self.stack) > room:
            raise excess(VALUES)
        self.longest_row = room

    def to_mark(self) -> list[Node]:
        items = self.stack
        stack = self.stack = self.below.pop()
        self.waiting -= len(stack)
        self.longest_row += len(stack)
        return items

    def row_to_mark(self) -> Items:
        """The items above the mark as a row, counted with the memory that it takes."""
        row = packed(self.to_mark())
        self.count(VALUES, words(row))
        return row

    def loose_to_mark(self) -> list[Node]:
        """The nodes above the mark, counted one by one because they do not become a row."""
        items = self.to_mark()
        self.count(VALUES, len(items))
        return items

    def op_mark(self) -> None:
        if len(self.below) >= MOST_MARKS:
            raise self.fault("the pickle nests marks absurdly")
        self.below.append(self.stack)
        self.waiting += len(self.stack)
        self.longest_row -= len(self.stack)
        self.stack = []

    def op_pop(self) -> None:
        self.count(IDLE)
        if self.stack:
            self.dropped.append(self.stack.pop())
        else:
            self.loose_to_mark()

    def op_pop_mark(self) -> None:
        self.count(IDLE)
        self.dropped += self.loose_to_mark()

    def op_dup(self) -> None:
        self.count(IDLE)
        top = self.stack[-1]
        if isinstance(top, Text):
            self.shared_texts.add(top.at)
        self.push(top)
