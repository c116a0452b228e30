"""diff: what is not the same in two checkpoints."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from .. import formats
from ..contents.tensors import Recogniser
from ..drafts.differing import Difference, Held, Kind, can_cast, shared, unlike
from ..drafts.draft import Draft
from ..drafts.pairing import Pairs, pair
from ..drafts.shaping import named_by
from ..errors import CheckFailed, RefusedError, StrPath, UsageError
from ..in_place import settle
from ..runtime.bytewise import Comparison
from ..runtime.matching import renamed
from ..verifier import Progress

SCHEMA = 1


@dataclass(frozen=True)
class Diff:
    """What is not the same in two checkpoints.

    Attributes:
        a, b: the checkpoints.
        a_format, b_format: how they lie on disk.
        tensors: how many tensors both have, under the same name or another.
        nbytes: what those take in the first, each byte counted once.
        differences: all that is not the same.
        close: tensors that are not the same, but within the tolerance.
        cast: `float32→bfloat16` → how many tensors were cast to be compared.
        devices_ignored: how many differences in devices were let pass.
        warnings: what the user should know, a sentence each.
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
    warnings: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def counts(self) -> dict[Kind, int]:
        """How many differences of each kind there are."""
        found = Counter(each.kind for each in self.differences)
        return {kind: found[kind] for kind in Kind if found[kind]}

    def of(self, kind: Kind | str) -> tuple[Difference, ...]:
        """The differences of one kind."""
        return tuple(each for each in self.differences if each.kind == kind)

    def raise_if_different(self) -> None:
        """Do nothing if the checkpoints are equal.

        Raises:
            CheckFailed: they are not.
        """
        if self.differences:
            first = self.differences[0]
            more = len(self.differences) - 1
            raise CheckFailed(
                f"differs from {self.a}: {first.name!r} ({first.kind})"
                + (f", and {more:,} more differences" if more else ""),
                path=self.b,
            )

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, the same as `ckptmove diff --json` prints."""
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "a_format": self.a_format,
            "b_format": self.b_format,
            "equal": self.equal,
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "counts": {str(kind): count for kind, count in self.counts.items()},
            "differences": [each.to_json() for each in self.differences],
            "close": self.close,
            "cast": dict(self.cast),
            "devices_ignored": self.devices_ignored,
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
        }


def diff(
    a: StrPath,
    b: StrPath,
    *,
    select: str | Iterable[str] = (),
    atol: float = 0.0,
    rtol: float = 0.0,
    ignore_devices: bool = False,
    cast: bool = False,
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints of any formats, without unpickling them.

    Elements are compared by their bits, so that equal NaNs are equal; tensors by what they show,
    however they lie in their storages; everything else by what it is made of.

    Args:
        a: the first.
        b: the second.
        select: patterns on names, as `convert` takes them: only this is compared.
        atol, rtol: floating elements that differ by at most `atol` plus `rtol` times that of `a`
            count as equal, and so do two that are no numbers.
        ignore_devices: let pass that tensors, or values, name other devices.
        cast: where both have a floating tensor and of another dtype, compare that of `a` as
            torch casts it to the dtype of `b`.
        progress: called with the bytes compared since the last call.

    Raises:
        UsageError: a tolerance makes no sense.
        InputError: one of them can't be read.
        RefusedError: nothing in either is selected by a pattern.
    """
    started = time.monotonic()
    if not all(isfinite(each) and each >= 0 for each in (atol, rtol)):
        raise UsageError("a tolerance is a number from 0 on")
    patterns = (select,) if isinstance(select, str) else tuple(select)
    notes = [f"{os.fspath(path)}: {note}" for path in (a, b) for note in settle(path)]
    with formats.opened(a) as first, formats.opened(b) as second:
        old, new = first.draft(), second.draft()
        chosen = _chosen(old, new, patterns)
        pairs = pair(old, new, chosen=chosen, ignore_devices=ignore_devices, cast=cast)
        nbytes = sum(source.nbytes for draft in (old, new) for source in draft.sources)
        with Comparison(nbytes, atol, rtol, progress) as comparison:
            found = _Findings(comparison, cast, ignore_devices)
            found.compare(pairs)
        for source in (*old.sources, *new.sources):
            source.check_unchanged()
    return Diff(
        a=old.path,
        b=new.path,
        a_format=old.format,
        b_format=new.format,
        tensors=found.tensors,
        nbytes=found.nbytes,
        differences=tuple(sorted(found.differences, key=lambda each: list(Kind).index(each.kind))),
        close=found.close,
        cast=found.cast,
        devices_ignored=found.passed,
        warnings=(*notes, *_warnings(old), *_warnings(new)),
        seconds=time.monotonic() - started,
    )


def _chosen(old: Draft, new: Draft, patterns: Sequence[str]) -> set[str] | None:
    """The names that are to be compared, or None for all."""
    if not patterns:
        return None
    names: list[set[str]] = []
    unheard: list[set[str]] = []
    for draft in (old, new):
        recogniser = Recogniser(draft.graph.ids)
        found, missed = named_by(draft.graph.root, recogniser, patterns, draft.sections)
        names.append(found)
        unheard.append(set(missed))
    for text in patterns:
        if all(text in missed for missed in unheard):
            raise RefusedError(
                f"nothing in either is called {text!r}", hint="ckptmove inspect lists names"
            )
    both = names[0] | names[1]
    return both if "" in names[0] and "" in names[1] else both - {""}


class _Findings:
    """What comes out of a comparison, piece by piece."""

    def __init__(self, comparison: Comparison, cast: bool, ignore_devices: bool) -> None:
        self.comparison = comparison
        self.may_cast = cast
        self.ignore_devices = ignore_devices
        self.differences: list[Difference] = []
        self.cast: dict[str, int] = {}
        self.tensors = self.nbytes = self.close = self.passed = 0
        self.counted: set[object] = set()

    def compare(self, pairs: Pairs) -> None:
        """Compare the bytes of all tensors, and see which of the rest have but another name."""
        self.differences += pairs.differences
        self.passed += pairs.passed
        for old, new in pairs.both:
            self.values(old, new)
        matched = list(renamed(pairs.old, pairs.new, self.comparison, cast=self.may_cast))
        for old, new in matched:
            self.rename(old, new)
        self.differences += shared([*pairs.both, *matched])
        gone = {id(held) for both in matched for held in both}
        for kind, tensors in ((Kind.REMOVED, pairs.old), (Kind.ADDED, pairs.new)):
            for held in tensors:
                if id(held) not in gone:
                    self.alone(kind, held)

    def values(self, old: Held, new: Held) -> None:
        """Compare the bytes of two tensors of the same name."""
        self.count(old)
        dtypes = old.tensor.dtype, new.tensor.dtype
        if old.shown is None or new.shown is None or old.tensor.shape != new.tensor.shape:
            return
        if dtypes[0] != dtypes[1]:
            if not (self.may_cast and can_cast(*dtypes)):
                return
            self.note_cast(*dtypes)
        found = self.comparison.compare(old.shown, new.shown)
        if found.values is not None:
            self.differences.append(
                Difference(Kind.CHANGED, old.name, *dtypes, values=found.values)
            )
        elif found.close:
            self.close += 1

    def rename(self, old: Held, new: Held) -> None:
        """Two tensors of the same bytes under different names."""
        self.count(old)
        self.differences.append(Difference(Kind.RENAMED, old.name, old.name, new.name))
        for kind, mine, other in unlike(old.tensor, new.tensor):
            if kind is Kind.MOVED and self.ignore_devices:
                self.passed += 1
            elif kind is Kind.RETYPED:
                self.note_cast(mine, other)
            else:
                name = f"{old.name}.requires_grad" if kind is Kind.VALUE else old.name
                self.differences.append(Difference(kind, name, mine, other))

    def alone(self, kind: Kind, held: Held) -> None:
        """A tensor that only one of them has."""
        what = {"dtype": held.tensor.dtype, "shape": list(held.tensor.shape)}
        pair = (what, None) if kind is Kind.REMOVED else (None, what)
        self.differences.append(Difference(kind, held.name, *pair))

    def note_cast(self, old: str, new: str) -> None:
        """Count a tensor that was cast."""
        self.cast[f"{old}→{new}"] = self.cast.get(f"{old}→{new}", 0) + 1

    def count(self, held: Held) -> None:
        """Count a tensor that both have, and its bytes once."""
        self.tensors += 1
        if held.shown is not None and held.extent not in self.counted:
            self.counted.add(held.extent)
            self.nbytes += held.tensor.nbytes


def _warnings(draft: Draft) -> list[str]:
    parts = [f"{loss.name} is not compared" for loss in draft.losses]
    return [f"{draft.path}: {text}" for text in (*draft.warnings, *parts)]
