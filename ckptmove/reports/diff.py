"""The report of a comparison: how much differs, then each difference; similar lines are merged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from ..errors import CheckFailed
from ..manifest.paths import spell
from .display import phrases
from .display.blocks import Block, Columns, PageBlock, Table, Wrong
from .display.groups import collapsed, pattern_of
from .display.phrases import plural
from .display.plain import Key, Seconds, derived, to_json
from .display.report import Report
from .display.text import cut, listed, printable, shape, size

_MOST_TOLD = 3  # names of what was not compared


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


#: A number, or as text what JSON has no number for.
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


_ALL = "(the whole object)"
_MOST_LINES = 15  # of a kind
_MOST_NAMED = 5  # things that were not compared
_LONGEST_VALUE = 60  # characters
_ABOUT_TENSORS = (
    *(Kind.CHANGED, Kind.ADDED, Kind.REMOVED, Kind.RENAMED, Kind.RESHAPED, Kind.RETYPED),
    Kind.MOVED,
)
_COUNTED = {
    Kind.VALUE: ("value", "values"),
    Kind.VALUE_ADDED: ("value added", "values added"),
    Kind.VALUE_REMOVED: ("value removed", "values removed"),
    Kind.TYPE: ("type", "types"),
    Kind.ORDER: ("order of keys", "orders of keys"),
    Kind.RECORD: ("record", "records"),
    Kind.RECORD_ADDED: ("record added", "records added"),
    Kind.RECORD_REMOVED: ("record removed", "records removed"),
    Kind.NOT_COMPARED: ("item not compared", "items not compared"),
    Kind.SHARED: ("alias added", "aliases added"),
    Kind.UNSHARED: ("alias removed", "aliases removed"),
}
_WORDS = {
    Kind.SHARED: "now shared",
    Kind.UNSHARED: "no longer shared",
    Kind.ORDER: "key order differs",
}


@dataclass(frozen=True)
class Diff(Report):
    """What differs between two checkpoints.

    Attributes:
        a, b: the checkpoints.
        a_format, b_format: their formats.
        tensors: the number of tensors that both have, under the same name or another.
        nbytes: the bytes of these in the first checkpoint, each byte counted once.
        differences: everything that differs.
        close: tensors that differ, but within the tolerance.
        cast: from `float32→bfloat16` to the number of tensors that were cast to be compared.
        devices_ignored: the number of differences in devices that were accepted.
        records: the number of other records (code and files) that both have and that were compared.
        ignored: differences in code, and things not compared, that were accepted.
        warnings: what the user should know, one sentence each.
        seconds: how long it took.
    """

    a: str
    b: str
    a_format: str
    b_format: str
    tensors: int
    nbytes: int
    differences: tuple[Difference, ...] = ()
    close: int = 0
    cast: Mapping[str, int] = field(default_factory=dict)
    devices_ignored: int = 0
    records: int = 0
    ignored: tuple[Difference, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: Seconds = field(default=0.0, compare=False)

    @derived(after="b_format")
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def only_not_compared(self) -> bool:
        """Whether nothing differs, but something could not be compared."""
        found = {each.kind for each in self.differences}
        return found == {Kind.NOT_COMPARED}

    @derived(after="nbytes")
    def counts(self) -> dict[Kind, int]:
        """The number of differences of each kind."""
        found = Counter(each.kind for each in self.differences)
        return {kind: found[kind] for kind in Kind if found[kind]}

    def of(self, kind: Kind | str) -> tuple[Difference, ...]:
        """Return the differences of one kind."""
        return tuple(each for each in self.differences if each.kind == kind)

    def raise_if_different(self) -> None:
        """Raise if the checkpoints differ.

        Raises:
            CheckFailed: the checkpoints differ.
        """
        if self.only_not_compared:
            raise CheckFailed(
                f"its tensors are those of {self.a}, but not compared: "
                + phrases.join_names([each.name for each in self.differences], _MOST_TOLD),
                path=self.b,
                hint="--ignore-code accepts that",
            )
        if self.differences:
            first = self.differences[0]
            more = len(self.differences) - 1
            where = "the whole object" if first.name == spell(()) else repr(first.name)
            raise CheckFailed(
                f"differs from {self.a}: {where} ({first.kind})"
                + (f", and {plural(more, 'more difference')}" if more else ""),
                path=self.b,
            )

    @derived(after="records")
    def code_ignored(self) -> int:
        """The number of `ignored` differences."""
        return len(self.ignored)

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show a summary, and then a row for whatever differs in the same way."""
        yield summary(self) if self.equal else Wrong(summary(self))
        if self.ignored:
            names = list(dict.fromkeys(each.name for each in self.ignored))
            names = [_ALL if name == spell(()) else name for name in names]
            yield f"  ignored  {listed(names, len(names)) if full else listed(names)}"
        for kind in self.counts:
            groups = _groups(self.of(kind), full)
            shown = groups if full else groups[:_MOST_LINES]
            rows = [_row(kind, group, full) for group in shown]
            details = {n: group[0].lines for n, group in enumerate(shown)}
            yield Table(rows, indent=2, details=details)
            if len(shown) < len(groups):
                more = plural(len(groups) - len(shown), "more line")
                yield f"  … and {more} of this kind; -v shows all"

    def page(self) -> Iterator[PageBlock]:
        """Show a summary, and a row for each difference, with its size drawn as a bar."""
        yield summary(self)
        yield f"{self.a} ({self.a_format}) → {self.b} ({self.b_format})"
        found = [*self.differences, *self.ignored]
        if found:
            rows = [_row(each.kind, [each], True) for each in found]
            most = [each.values and each.values.max_abs for each in found]
            drawn = [n if n is not None and isfinite(n) else None for n in most]
            sides = [_sides(each, row[3]) for row, each in zip(rows, found, strict=True)]
            kinds, names = [row[0] for row in rows], [row[1] for row in rows]
            head = ("difference", "name", "largest |Δ|", "first", "second", "")
            old, new, more = ([side[n] for side in sides] for n in range(3))
            columns = (kinds, names, drawn, old, new, more)
            yield Columns(head, columns, right=(2,), bars=(2,), what="differences")
        yield from self.remarks()


def summary(diff: Diff) -> str:
    """`equal: 102 tensors, 37.9 MB`, or how many differences there are of each kind."""
    notes = []
    if diff.close:
        notes.append(f"{diff.close:,} within the tolerance")
    notes += [f"{count:,} compared as {cast}" for cast, count in diff.cast.items()]
    if diff.devices_ignored:
        notes.append(f"{diff.devices_ignored:,} device differences ignored")
    if diff.ignored:
        notes.append(f"{plural(len(diff.ignored), 'difference')} in code ignored")
    note = f" ({', '.join(notes)})" if notes else ""
    known = f"{plural(diff.tensors, 'tensor')}, {size(diff.nbytes)}"
    if diff.records:
        known += f", {plural(diff.records, 'other record')}"
    if diff.equal:
        if not diff.tensors:
            return f"equal apart from tensors: no tensors compared{note}"
        return f"equal: {known}{note}"
    if diff.only_not_compared:
        names = listed([each.name for each in diff.differences], _MOST_NAMED)
        return f"tensors equal: {known}; not compared: {names}{note}"
    parts: list[str] = []
    for kind, count in diff.counts.items():
        if kind in _ABOUT_TENSORS:
            what = f"{count:,} {kind}" if parts else f"{plural(count, 'tensor')} {kind}"
        else:
            what = f"{count:,} {_COUNTED[kind][count != 1]}"
        parts.append(what)
    return f"different: {', '.join(parts)}{note}"


def _groups(found: Sequence[Difference], full: bool) -> list[list[Difference]]:
    """Differences of the same kind whose names differ only in whole numbers."""
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


def _row(kind: Kind, group: Sequence[Difference], full: bool) -> tuple[str, str, str, str]:
    first = group[0]
    count = f"×{len(group):,}" if len(group) > 1 else ""
    name = _ALL if first.name == spell(()) else collapsed(each.name for each in group)
    return _WORDS.get(kind, str(kind)), name, count, _what(kind, first, group, full)


def _sides(each: Difference, what: str) -> tuple[str, str, str]:
    """What a page shows side by side, of the first checkpoint and the second, and what besides."""
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
        return _changed([each.values for each in group if each.values is not None], first)
    if kind is Kind.RENAMED:
        return f"→ {collapsed(str(each.new) for each in group)}"
    if kind in (Kind.ADDED, Kind.REMOVED):
        said = [each.old or each.new for each in group]
        shapes = {tuple(each["shape"]) for each in said}
        return f"{_dtype(first)} {shape(shapes.pop()) if len(shapes) == 1 else 'of several shapes'}"
    if first.names:
        others = [collapsed(each.names[n] for each in group) for n in range(1, len(first.names))]
        return listed(others, len(others)) if full else listed(others)
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
    """The kind and sizes of a record; for bytes, where they first differ."""
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
    """Two values as text; long ones from where they differ."""
    mine, other = _value(old, full), _value(new, full)
    if mine == other and not full:
        texts = _value(old, True), _value(new, True)
        at = first_apart(*texts)
        start = max(0, at - _LONGEST_VALUE // 3)
        mine, other = (f"…{text[start : start + _LONGEST_VALUE]}" for text in texts)
    return f"{mine} → {other}"


def _dtype(difference: Difference) -> str:
    return str((difference.old or difference.new)["dtype"])


def _changed(values: Sequence[Values], difference: Difference) -> str:
    """How many elements changed, by how much, and the first one."""
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
    """Where two texts, or runs of bytes, are first unlike, by halving."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[:middle] == new[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
