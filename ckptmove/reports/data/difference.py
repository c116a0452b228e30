"""One difference between two checkpoints: plain data."""

from __future__ import annotations

from enum import Enum
from math import isfinite
from typing import Any, NamedTuple


class Kind(str, Enum):
    """The kind of a difference, from the first checkpoint to the second."""

    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    RENAMED = "renamed"
    RESHAPED = "reshaped"
    RETYPED = "retyped"
    MOVED = "moved"
    SHARED = "shared"
    UNSHARED = "unshared"
    VALUE = "value"
    VALUE_ADDED = "value added"
    VALUE_REMOVED = "value removed"
    TYPE = "type"
    ORDER = "order"
    RECORD = "record"
    RECORD_ADDED = "record added"
    RECORD_REMOVED = "record removed"
    NOT_COMPARED = "not compared"

    __str__ = str.__str__


class Values(NamedTuple):
    """How the elements of two tensors differ.

    Attributes:
        differing: the number of elements that differ.
        of: the number of elements.
        first: the index of the first element that differs.
        old, new: the values there, as text.
        max_abs: the largest absolute difference; None if the elements are not numbers, or none are
            finite.
        max_rel: the largest difference relative to a nonzero element of the first tensor, or None.
    """

    differing: int
    of: int
    first: tuple[int, ...]
    old: str
    new: str
    max_abs: float | None = None
    max_rel: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON; an infinite difference becomes text."""
        said = self._asdict() | {"first": list(self.first)}
        for key in ("max_abs", "max_rel"):
            if said[key] is not None and not isfinite(said[key]):
                said[key] = str(said[key])
        return said


class Difference(NamedTuple):
    """One thing that differs between two checkpoints.

    Attributes:
        kind: the kind of difference.
        name: where it is in the first checkpoint, or in the second if it was added.
        old, new: the value in each checkpoint: a name, shape, dtype, device, type or text. None
            where there is nothing.
        values: for a changed tensor, how its elements differ.
        names: for bytes or objects that are (or were) shared: all their names.
        lines: for a text record, some of the changed lines, as in a unified diff.
    """

    kind: Kind
    name: str
    old: Any = None
    new: Any = None
    values: Values | None = None
    names: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        said: dict[str, Any] = {"kind": str(self.kind), "name": self.name}
        if self.lines:
            said["lines"] = list(self.lines)
        if self.values is not None:
            said["values"] = self.values.to_json()
        elif self.names:
            said["names"] = list(self.names)
        elif self.kind is not Kind.ORDER:
            said |= {"old": self.old, "new": self.new}
        return said


def first_apart(old: bytes | str, new: bytes | str) -> int:
    """Where two texts, or runs of bytes, are first unlike, by halving."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[:middle] == new[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
