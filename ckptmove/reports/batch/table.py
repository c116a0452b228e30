"""One table of a tree: the format, devices and size of each checkpoint in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...display.blocks import Block, Table, Wrong
from ...display.phrases import plural
from ...display.text import LONGEST_REASON, one_line, printable, size
from .items import DONE, FAILED, REFUSED, Contents, Result

_HEAD = "item", "format", "device", "dtype", "tensors", "bytes"
_RIGHT = 4, 5
_MOST_DTYPES = 3


class InspectedItem(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the item, in the tree.
        format, devices, dtypes, tensors: what the item holds; `format` is empty if it can't be
            read. See `Contents`.
        nbytes: the size of all that belongs to it.
        reason: why it can't be read, or is not as it must be; empty if nothing is wrong.
        hint: what to do about it, or None.
        outcome: as a `Result` has it.
    """

    name: str
    format: str
    devices: Mapping[str, int]
    dtypes: Mapping[str, int]
    tensors: int
    nbytes: int
    reason: str
    hint: str | None
    outcome: str = DONE

    @classmethod
    def of(cls, result: Result, contents: Contents | None) -> InspectedItem:
        """Make the row of an item's result."""
        said = Contents("", {}, {}, 0) if contents is None else contents
        held = said.format, said.devices, said.dtypes, said.tensors
        return cls(result.name, *held, result.nbytes, result.reason, result.hint, result.outcome)

    @property
    def is_wrong(self) -> bool:
        """Whether it was refused or failed."""
        return self.outcome in (REFUSED, FAILED)

    @property
    def why(self) -> str:
        """The fault, in one line."""
        return one_line("", printable(self.reason), printable(self.hint or ""), LONGEST_REASON)

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row."""
        tensors = f"{self.tensors:,}" if self.format else ""
        return (
            self.name,
            self.format or ("not read" if self.is_wrong else ""),
            _devices(self.devices),
            _dtypes(self.dtypes),
            tensors,
            size(self.nbytes),
        )


class InspectedTree(NamedTuple):
    """The totals of the table, in bytes, except the numbers of items and tensors.

    Attributes:
        items: how many there are.
        unread: how many of them can't be read.
        formats: from a format to how many items have it.
        devices, dtypes: as of an item, of all of them.
        tensors: how many there are.
        nbytes: the size of all items.
    """

    items: int
    unread: int
    formats: Mapping[str, int]
    devices: Mapping[str, int]
    dtypes: Mapping[str, int]
    tensors: int
    nbytes: int

    @classmethod
    def of(cls, items: Sequence[InspectedItem]) -> InspectedTree:
        """Return the totals of these rows."""
        return cls(
            len(items),
            sum(not each.format for each in items),
            dict(Counter(each.format for each in items if each.format).most_common()),
            _sum(each.devices for each in items),
            _sum(each.dtypes for each in items),
            sum(each.tensors for each in items),
            sum(each.nbytes for each in items),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the last row."""
        return (
            f"total: {plural(self.items, 'item')}",
            plural(len(self.formats), "format"),
            ", ".join(f"{name} {size(n)}" for name, n in self.devices.items()),
            _dtypes(self.dtypes),
            f"{self.tensors:,}",
            size(self.nbytes),
        )


def page_table(items: Sequence[InspectedItem]) -> Table:
    """Return the whole table, with refused and failed items first."""
    order = sorted(items, key=lambda each: (not each.is_wrong, each.name))
    rows = [
        (Wrong(each.outcome) if each.is_wrong else each.outcome, *each.cells, each.why)
        for each in order
    ]
    total = ("", *InspectedTree.of(items).cells, "")
    return Table([*rows, total], ("outcome", *_HEAD, ""), right=[n + 1 for n in _RIGHT])


def table_of(items: Sequence[InspectedItem]) -> Iterator[Block]:
    """Return the table: a row for each item, with its fault below, and the totals."""
    if not items:
        return
    rows = [each.cells for each in items]
    details = {n: [each.why] for n, each in enumerate(items) if each.reason}
    total = InspectedTree.of(items).cells
    yield Table([*rows, total], _HEAD, right=_RIGHT, details=details)


def _devices(devices: Mapping[str, int]) -> str:
    """`cuda:0`, or `cuda:0 37.8 MB, cpu 5.2 kB`."""
    if len(devices) < 2:
        return "".join(devices)
    return ", ".join(f"{name} {size(n)}" for name, n in devices.items())


def _dtypes(dtypes: Mapping[str, int]) -> str:
    names = list(dtypes)
    more = f", {len(names) - _MOST_DTYPES:,} more" if len(names) > _MOST_DTYPES else ""
    return ", ".join(names[:_MOST_DTYPES]) + more


def _sum(each: Iterable[Mapping[str, int]]) -> dict[str, int]:
    counted = Counter[str]()
    for mapping in each:
        counted.update(mapping)
    return dict(sorted(counted.items(), key=lambda pair: (-pair[1], pair[0])))
