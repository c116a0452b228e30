"""One thing that differs between two checkpoints: its kind, its JSON, and how it shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from math import isfinite
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from ..display.plain import Key, to_json
from ..display.text import cut, first_names, printable, shape
from ..manifest.paths import spell
from .groups import collapse_names, pattern_of


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


#: A number, or a text for values that JSON numbers can't express.
_FINITE = Key(plain=lambda n: n if n is None or isfinite(n) else str(n), gives=float | str | None)


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
    max_abs: Annotated[float | None, _FINITE] = None
    max_rel: Annotated[float | None, _FINITE] = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON; an infinite difference becomes text."""
        return to_json(self)


def _has_names(difference: Difference) -> bool:
    return bool(difference.names) and difference.values is None


def _has_sides(difference: Difference) -> bool:
    said_otherwise = difference.values is not None or difference.names
    return not said_otherwise and difference.kind is not Kind.ORDER


_SIDE = Key(shown=_has_sides)


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
    old: Annotated[Any, _SIDE] = None
    new: Annotated[Any, _SIDE] = None
    values: Annotated[Values | None, Key(shown=attrgetter("values"))] = None
    names: Annotated[tuple[str, ...], Key(shown=_has_names)] = ()
    lines: Annotated[tuple[str, ...], Key(after="name", shown=attrgetter("lines"))] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return to_json(self)


ALL_OF_IT = "(the whole object)"


_LONGEST_VALUE = 60  # characters


_WORDS = {
    Kind.SHARED: "now shared",
    Kind.UNSHARED: "no longer shared",
    Kind.ORDER: "key order differs",
}


def groups_of_alike(found: Sequence[Difference], full: bool) -> list[list[Difference]]:
    """Group differences of the same kind whose names differ only in whole numbers."""
    if full:
        return [[each] for each in found]
    groups: dict[object, list[Difference]] = {}
    for each in found:
        label: list[object] = [pattern_of(each.name)[0]]
        if each.kind is Kind.RENAMED:
            label.append(pattern_of(str(each.new))[0])
        elif each.names:
            label += [pattern_of(name)[0] for name in each.names]
        elif each.kind in (Kind.ADDED, Kind.REMOVED):
            label.append(_dtype(each))
        elif each.kind is Kind.RECORD:
            label.append(each.name)
        else:
            label.append(json.dumps([each.old, each.new]))
        groups.setdefault(tuple(label), []).append(each)
    return list(groups.values())


def row_of(kind: Kind, group: Sequence[Difference], full: bool) -> tuple[str, str, str, str]:
    """Return the row of a group of differences: kind, name, count, and what differs."""
    first = group[0]
    count = f"×{len(group):,}" if len(group) > 1 else ""
    name = ALL_OF_IT if first.name == spell(()) else collapse_names(each.name for each in group)
    return _WORDS.get(kind, str(kind)), name, count, _what(kind, first, group, full)


def sides_of(each: Difference, what: str) -> tuple[str, str, str]:
    """Return what a page shows for the first checkpoint, for the second, and as a remark."""
    kind = each.kind
    if kind is Kind.VALUE:
        return _value(each.old, True), _value(each.new, True), ""
    if each.values is not None:
        where = f"; at {shape(each.values.first)}" if each.values.first else ""
        return each.values.old, each.values.new, what.rpartition("; ")[0] + where
    if kind is Kind.RENAMED or kind.endswith("added"):
        return "", what, ""
    if kind.endswith("removed"):
        return what, "", ""
    if kind in (Kind.RESHAPED, Kind.RETYPED, Kind.MOVED, Kind.TYPE):
        old, _, new = what.partition(" → ")
        return old, new, ""
    return "", "", " · ".join((what, *each.lines))


def _what(kind: Kind, first: Difference, group: Sequence[Difference], full: bool) -> str:
    if kind is Kind.CHANGED:
        return _value_changes([each.values for each in group if each.values is not None], first)
    if kind is Kind.RENAMED:
        return f"→ {collapse_names(str(each.new) for each in group)}"
    if kind in (Kind.ADDED, Kind.REMOVED):
        said = [each.old or each.new for each in group]
        shapes = {tuple(each["shape"]) for each in said}
        return f"{_dtype(first)} {shape(shapes.pop()) if len(shapes) == 1 else 'of several shapes'}"
    if first.names:
        others = [
            collapse_names(each.names[n] for each in group) for n in range(1, len(first.names))
        ]
        return first_names(others, len(others)) if full else first_names(others)
    if kind is Kind.ORDER:
        return ""
    if kind in (Kind.RECORD, Kind.RECORD_ADDED, Kind.RECORD_REMOVED):
        return _record(first)
    if kind is Kind.NOT_COMPARED:
        return _not_compared(first)
    if kind is Kind.RESHAPED:
        return f"{shape(first.old)} → {shape(first.new)}"
    if kind in (Kind.RETYPED, Kind.MOVED, Kind.TYPE):
        return f"{first.old} → {first.new}"
    if kind in (Kind.VALUE_ADDED, Kind.VALUE_REMOVED):
        return _value(first.old if first.new is None else first.new, full)
    return _both(first.old, first.new, full)


def _record(difference: Difference) -> str:
    """Return the kind and sizes of a record; for bytes, the place of the first difference."""
    old, new = difference.old, difference.new
    said = old or new
    if old is None or new is None:
        return f"{said['of']}, {said['nbytes']:,} bytes"
    text = f"{said['of']}, {old['nbytes']:,} → {new['nbytes']:,} bytes"
    if difference.lines:
        return text
    return f"{text}; at {old['at']:,}: {old['hex'] or 'the end'} → {new['hex'] or 'the end'}"


def _not_compared(difference: Difference) -> str:
    if difference.old is not None and difference.new is not None:
        return str(difference.old)
    which = "second" if difference.old is None else "first"
    return f"only the {which} format can store it"


def _both(old: object, new: object, full: bool) -> str:
    """Return two values as text; long ones are shown from the first difference."""
    mine, other = _value(old, full), _value(new, full)
    if mine == other and not full:
        texts = _value(old, True), _value(new, True)
        at = first_apart(*texts)
        start = max(0, at - _LONGEST_VALUE // 3)
        mine, other = (f"…{text[start : start + _LONGEST_VALUE]}" for text in texts)
    return f"{mine} → {other}"


def _dtype(difference: Difference) -> str:
    return str((difference.old or difference.new)["dtype"])


def _value_changes(values: Sequence[Values], difference: Difference) -> str:
    """Say how many elements changed, by how much, and the first one."""
    first = values[0]
    dtype = difference.new if difference.old == difference.new else f"as {difference.new}"
    differing, of = (sum(each[n] for each in values) for n in (0, 1))  # type: ignore[misc]
    parts = [f"{dtype}, {differing:,} of {of:,}"]
    for word, known in (
        ("max abs", [each.max_abs for each in values if each.max_abs is not None]),
        ("max rel", [each.max_rel for each in values if each.max_rel is not None]),
    ):
        if known:
            parts.append(f"{word} {max(known):.3g}")
    where = f"at {shape(first.first)} " if first.first else ""
    return f"{', '.join(parts)}; {where}{first.old} → {first.new}"


def _value(term: object, full: bool) -> str:
    text = json.dumps(term, ensure_ascii=False)
    if isinstance(term, dict) and term.keys() == {"$", "of", "args"} and term["$"] == "call":
        args = ", ".join(_value(each, full) for each in term["args"])
        text = f"{str(term['of']).replace(':', '.')}({args})"
    if isinstance(term, dict) and term.keys() == {"$", "nbytes", "at", "hex"}:
        text = f"{term['nbytes']:,} bytes, {term['hex'] or 'the end'} at {term['at']:,}"
    return printable(text if full else cut(text, _LONGEST_VALUE))


def first_apart(old: bytes | str, new: bytes | str) -> int:
    """Find by bisection where two texts or byte strings first differ."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[:middle] == new[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
