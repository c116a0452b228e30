"""The report of a comparison: how much differs, then each difference; similar lines are merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite

from ..display import phrases
from ..display.blocks import Block, Table, Wrong
from ..display.columns import Columns, PageBlock
from ..display.phrases import plural
from ..display.plain import Seconds, derived_key
from ..display.report import Report
from ..display.text import first_names, size
from ..errors import CheckFailed
from ..manifest.paths import spell
from .difference import ALL_OF_IT, Difference, Kind, groups_of_alike, row_of, sides_of

_MOST_TOLD = 3  # most names of entries that were not compared


_MOST_LINES = 15  # of a kind
_MOST_NAMED = 5  # most entries that were not compared
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

    @derived_key(after="b_format")
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def only_not_compared(self) -> bool:
        """Whether nothing differs, but something could not be compared."""
        found = {each.kind for each in self.differences}
        return found == {Kind.NOT_COMPARED}

    @derived_key(after="nbytes")
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

    @derived_key(after="records")
    def code_ignored(self) -> int:
        """The number of `ignored` differences."""
        return len(self.ignored)

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show a summary, then a row for each group of similar differences."""
        yield summary(self) if self.equal else Wrong(summary(self))
        if self.ignored:
            names = list(dict.fromkeys(each.name for each in self.ignored))
            names = [ALL_OF_IT if name == spell(()) else name for name in names]
            yield f"  ignored  {first_names(names, len(names)) if full else first_names(names)}"
        for kind in self.counts:
            groups = groups_of_alike(self.of(kind), full)
            shown = groups if full else groups[:_MOST_LINES]
            rows = [row_of(kind, group, full) for group in shown]
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
            rows = [row_of(each.kind, [each], True) for each in found]
            most = [each.values and each.values.max_abs for each in found]
            drawn = [n if n is not None and isfinite(n) else None for n in most]
            sides = [sides_of(each, row[3]) for row, each in zip(rows, found, strict=True)]
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
        names = first_names([each.name for each in diff.differences], _MOST_NAMED)
        return f"tensors equal: {known}; not compared: {names}{note}"
    parts: list[str] = []
    for kind, count in diff.counts.items():
        if kind in _ABOUT_TENSORS:
            what = f"{count:,} {kind}" if parts else f"{plural(count, 'tensor')} {kind}"
        else:
            what = f"{count:,} {_COUNTED[kind][count != 1]}"
        parts.append(what)
    return f"different: {', '.join(parts)}{note}"
