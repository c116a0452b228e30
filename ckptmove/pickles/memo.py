"""The memo of a pickle: memoized values by slot."""

from __future__ import annotations

from .nodes import Node, Text

#: What is in a slot that was never filled.
UNFILLED = Text("", -1)
#: Bytes of a pickle for each slot of the row. Picklers number slots one by one, Python 2 from 1 on;
#: a relocation leaves out those that nobody recalls, so that there are gaps.
_SHARE = 5


class Memo:
    """Slots, most of which picklers number one by one: these take but a few bytes each."""

    def __init__(self) -> None:
        self.filled = 0
        self._row: list[Node] = []
        self._others: dict[int, Node] = {}

    def get(self, slot: int) -> Node:
        """What is in a slot, or `UNFILLED`."""
        row = self._row
        return row[slot] if slot < len(row) else self._others.get(slot, UNFILLED)

    def put(self, slot: int, node: Node, nbytes: int) -> bool:
        """Fill a slot, `nbytes` into the pickle; True if it is in a row, and so takes little."""
        row, others = self._row, self._others
        if slot == len(row) and not others:
            self.filled += 1
            row.append(node)
            return True
        if slot < len(row):
            self.filled += row[slot] is UNFILLED
            row[slot] = node
            return True
        before = others.pop(slot, UNFILLED) if others else UNFILLED
        self.filled += before is UNFILLED
        if slot > len(row) and slot * _SHARE > nbytes:
            others[slot] = node
            return False
        while len(row) < slot:
            row.append(others.pop(len(row), UNFILLED))
        row.append(node)
        return True
