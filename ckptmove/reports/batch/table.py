"""One table of a tree: what each checkpoint in it is, on which devices, and how large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...manifest.manifest import Manifest, Total
from ..display.blocks import Block, Table
from ..display.phrases import plural
from ..display.text import LONGEST_REASON, one_line, printable, size
from .items import Result

_HEAD = "item", "format", "device", "dtype", "tensors", "bytes"
_RIGHT = 4, 5
_MOST_DTYPES = 3


class Contents(NamedTuple):
    """What a checkpoint holds, in a few numbers.

    Attributes:
        format: its format.
        devices: the bytes of tensors by device, the largest first; `not stored` counts those whose
            format stores no devices.
        dtypes: the bytes of tensors by dtype, the largest first.
        tensors: how many there are.
        warnings: what is unusual about it, one sentence each.
    """

    format: str
    devices: Mapping[str, int]
    dtypes: Mapping[str, int]
    tensors: int
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, format: str) -> Contents:
        """What a manifest tells; each storage counts once."""
        return cls(
            format,
            _nbytes(manifest.devices),
            _nbytes(manifest.totals(lambda entry: entry.dtype)),
            sum(entry.part_of is None for entry in manifest.tensors),
            manifest.warnings,
        )


def _nbytes(totals: Mapping[str, Total]) -> dict[str, int]:
    return {name: total.nbytes for name, total in totals.items()}


class InspectedItem(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the item, in the tree.
        format, devices, dtypes, tensors: what the item holds; `format` is empty if it can't be
            read. See `Contents`.
        nbytes: the size of all that belongs to it.
        reason: why it can't be read, or is not as it must be; empty if nothing is wrong.
        hint: what to do about it, or None.
    """

    name: str
    format: str
    devices: Mapping[str, int]
    dtypes: Mapping[str, int]
    tensors: int
    nbytes: int
    reason: str
    hint: str | None

    @classmethod
    def of(cls, result: Result) -> InspectedItem:
        """The row of the result of an item."""
        said: Mapping[str, Any] = result.report or {}
        return cls(
            result.name,
            said.get("format", ""),
            said.get("devices", {}),
            said.get("dtypes", {}),
            said.get("tensors", 0),
            result.nbytes,
            result.reason,
            result.hint,
        )

    @property
    def why(self) -> str:
        """What is wrong with it, in one line."""
        return one_line("", printable(self.reason), printable(self.hint or ""), LONGEST_REASON)

    @property
    def cells(self) -> tuple[str, ...]:
        """Its cells in the table."""
        tensors = f"{self.tensors:,}" if self.format else ""
        return (
            self.name,
            self.format or "not read",
            _devices(self.devices),
            _dtypes(self.dtypes),
            tensors,
            size(self.nbytes),
        )


class InspectedTree(NamedTuple):
    """The totals of the table; bytes, but for the numbers of items and tensors.

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
        """The totals of these rows."""
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
        """Its cells below the table."""
        return (
            f"total: {plural(self.items, 'item')}",
            plural(len(self.formats), "format"),
            ", ".join(f"{name} {size(n)}" for name, n in self.devices.items()),
            _dtypes(self.dtypes),
            f"{self.tensors:,}",
            size(self.nbytes),
        )


def table_of(items: Sequence[InspectedItem]) -> Iterator[Block]:
    """The table, a row for each item with what is wrong with it below, and the totals."""
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
