"""Collapse tensors whose names differ only in numbers, so that a large model fits a screen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..display.phrases import show_name
from ..display.text import cut, shape, size
from ..manifest.manifest import Manifest, TensorEntry

_MOST_GROUPS = 40  # more lines than this are collapsed by block
_MOST_SPANS = 6
_LONGEST_KEY = 40  # characters of one key of a name
#: A key that is a whole number of at most nine digits.
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")

_Parts = tuple[str | None, ...]  # a name, with None for each number


@dataclass
class Group:
    """Tensors shown as one line."""

    parts: _Parts  #: the common name, with None for each number
    numbers: list[set[int]]  #: for each None, the numbers found
    entries: list[TensorEntry] = field(default_factory=list)  #: the tensors

    def row(self, manifest: Manifest) -> tuple[str, str, str, str, str, str, str]:
        """Name, count, shape, dtype, device, bytes and a remark."""
        first, count = self.entries[0], len(self.entries)
        shapes = {entry.shape for entry in self.entries}
        return (
            self.name(),
            f"×{count:,}" if count > 1 else "",
            shape(first.shape) if len(shapes) == 1 else f"{len(shapes):,} shapes",
            first.dtype,
            manifest.device_of(first),
            size(sum(entry.nbytes for entry in self.entries)),
            self._remark(manifest),
        )

    def name(self) -> str:
        """`layers.{0..79}.weight`."""
        numbers = iter(self.numbers)
        return show_name(".".join(_spans(next(numbers)) if p is None else p for p in self.parts))

    def _remark(self, manifest: Manifest) -> str:
        """Return a note if the bytes of the line are not bytes of the file."""
        sizes = [(e, manifest.storages[e.storage].nbytes) for e in self.entries if e.storage]
        if any(entry.nbytes > nbytes for entry, nbytes in sizes):
            return "expanded"
        shared = [entry.shared_with[0] for entry in self.entries if entry.shared_with]
        if not shared:
            return ""
        if len(self.entries) > 1:
            return "shares storages"
        return f"shared with {cut(show_name(shared[0]), 40)}"


def groups_of(manifest: Manifest, *, full: bool = False) -> list[Group]:
    """Return the lines of a summary, in the order of the first tensor of each.

    Tensors share a line if their names differ only in whole numbers, and section, dtype and device
    are the same; if that makes too many lines and not `full`, by block: the name up to the first
    number.
    """
    groups = _collapse(manifest.tensors, whole_names=True)
    if len(groups) > _MOST_GROUPS and not full:
        groups = _collapse(manifest.tensors, whole_names=False)
    return groups


def _collapse(entries: Iterable[TensorEntry], *, whole_names: bool) -> list[Group]:
    groups: dict[tuple[object, ...], Group] = {}
    for entry in entries:
        name = entry.name
        if len(name) > _LONGEST_KEY:
            name = ".".join([cut(key, _LONGEST_KEY) for key in name.split(".")])
        if not whole_names and (first := _NUMBER.search(name)):
            name = f"{name[: first.end()]}.*"
        label = _NUMBER.sub("0", name), entry.section, entry.dtype, entry.device
        group = groups.get(label)
        if group is None:
            parts = tuple(None if _is_number(key) else key for key in name.split("."))
            group = groups[label] = Group(parts, [set() for part in parts if part is None])
        for seen, number in zip(group.numbers, _NUMBER.findall(name), strict=True):
            seen.add(int(number))
        group.entries.append(entry)
    return list(groups.values())


def _is_number(key: str) -> bool:
    """Whether a key is a whole number of at most nine digits."""
    return _NUMBER.fullmatch(key) is not None


def pattern_of(name: str) -> tuple[_Parts, list[int]]:
    """Return a name with None for each key that is a number, and the numbers."""
    keys = [cut(key, _LONGEST_KEY) for key in name.split(".")]
    numbers = list(map(_is_number, keys))
    parts = tuple(None if n else key for key, n in zip(keys, numbers, strict=True))
    return parts, [int(key) for key, n in zip(keys, numbers, strict=True) if n]


def collapse_names(names: Iterable[str]) -> str:
    """`layers.{0..79}.weight`: names that differ in whole numbers only, as one."""
    found = [pattern_of(name) for name in names]
    columns = iter(set(column) for column in zip(*(n for _, n in found), strict=True))
    return show_name(".".join(_spans(next(columns)) if p is None else p for p in found[0][0]))


def _spans(numbers: set[int]) -> str:
    """`{0..4,6..31}`: each run of numbers, as shells write it."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(numbers) == 1:
        return str(runs[0][0])
    spans = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    if len(spans) > _MOST_SPANS:
        spans = [*spans[: _MOST_SPANS - 1], "…", spans[-1]]
    return "{" + ",".join(spans) + "}"
