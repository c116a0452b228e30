"""The memo of a pickle: memoized values by slot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..nodes import Node, Text

#: The value of a slot that was never filled.
UNFILLED = Text("", -1)
#: Bytes of a pickle for each slot of the row. Picklers number slots one by one, Python 2 from 1 on;
#: a relocation removes unused PUTs, which leaves gaps.
_SHARE = 5


class Memo:
    """Slots of the memo; slots that are numbered one by one take only a few bytes each."""

    def __init__(self) -> None:
        self.filled = 0
        #: how often a slot of the row was filled again, or was filled after it was skipped
        self.refilled = 0
        self._row: list[Node] = []
        self._others: dict[int, Node] = {}

    def get(self, slot: int) -> Node:
        """The node in a slot, or `UNFILLED`."""
        row = self._row
        return row[slot] if slot < len(row) else self._others.get(slot, UNFILLED)

    def put(self, slot: int, node: Node, nbytes: int) -> bool:
        """Fill a slot, `nbytes` into the pickle.

        True if the slots are filled in order, each once.
        """
        row, others = self._row, self._others
        if slot == len(row) and not others:
            self.filled += 1
            is_new = not row or row[-1] is not node
            row.append(node)
            return is_new
        if slot < len(row):
            self.filled += row[slot] is UNFILLED
            self.refilled += 1
            row[slot] = node
            return False
        before = others.pop(slot, UNFILLED) if others else UNFILLED
        self.filled += before is UNFILLED
        if slot > len(row) and slot * _SHARE > nbytes:
            others[slot] = node
            return False
        while len(row) < slot:
            row.append(others.pop(len(row), UNFILLED))
        row.append(node)
        return True

    def holds(self, pairs: tuple[tuple[int, Node], ...]) -> bool:
        """Whether each of these nodes is in its slot of the row."""
        row = self._row
        most = len(row)
        for slot, node in pairs:  # noqa: SIM110 (of the hottest loops: faster than a generator)
            if slot >= most or row[slot] is not node:
                return False
        return True

    def settle(self, slot: int, node: Node) -> None:
        """Put the node itself into a slot of the row, instead of what stood for it."""
        self._row[slot] = node

    @property
    def is_row(self) -> bool:
        """Whether all slots up to the last are filled, and no others."""
        return not self._others and self.filled == len(self._row)

    def memoize(self, nodes: list[Node]) -> None:
        """Fill the next slots of a row, as many MEMOIZE do."""
        self._row += nodes
        self.filled += len(nodes)

    @property
    def next_slot(self) -> int | None:
        """The slot that continues the row; None if there are others."""
        return None if self._others else len(self._row)

    def takes(self, slots: Sequence[int], nbytes: int) -> bool:
        """Whether these slots can be added to the end of the row in this order, with small gaps."""
        start = len(self._row)
        if self._others:
            return False
        if tuple(slots) == tuple(range(start, start + len(slots))):
            return True
        ascending = all(before < slot for before, slot in pairwise(slots))
        return ascending and start <= slots[0] and slots[-1] * _SHARE <= nbytes

    def take(self, slots: Sequence[int], nodes: list[Node]) -> None:
        """Fill slots for which `takes` was true."""
        row = self._row
        if slots and slots[-1] - len(row) + 1 != len(slots):
            for slot, node in zip(slots, nodes, strict=True):
                row += [UNFILLED] * (slot - len(row))
                row.append(node)
        else:
            row += nodes
        self.filled += len(slots)
