"""The report of `salvage`: what is left of each tensor of a broken checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ..display.blocks import Block, Table, Wrong
from ..display.phrases import plural
from ..display.plain import Seconds, derived_key
from ..display.report import Report
from ..display.text import shape, size

_MOST_SHOWN = 12


class Fate(str, Enum):
    """What is left of a tensor."""

    WHOLE = "whole"
    UNPROVEN = "unproven"
    PART = "in part"
    DAMAGED = "damaged"
    LOST = "lost"

    __str__ = str.__str__


_MEANING = {
    Fate.WHOLE: "all bytes, proven by a checksum",
    Fate.UNPROVEN: "all bytes, but no checksum proves them or their names",
    Fate.PART: "some bytes are missing",
    Fate.DAMAGED: "all bytes, but some of them are wrong",
    Fate.LOST: "no bytes",
}


class SalvagedTensor(NamedTuple):
    """What is left of one tensor.

    Attributes:
        name: its name in the broken checkpoint.
        fate: `whole` (all bytes are there, and a checksum proves them), `unproven` (all are there,
            and no checksum proves them), `in part`, `damaged` (all are there, and a checksum says
            that some are wrong) or `lost`.
        dtype, shape: as the broken checkpoint says; empty if it does not.
        nbytes: how many bytes it should have.
        present_nbytes: how many of them are there, at most.
        written: whether it is in the new checkpoint.
        why: why it is not whole.
    """

    name: str
    fate: Fate
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    present_nbytes: int
    written: bool
    why: str = ""


@dataclass(frozen=True)
class SalvageReport(Report):
    """What could be read of a broken checkpoint, and where it was written.

    Attributes:
        source: the broken checkpoint.
        destination: the new checkpoint.
        report: the file in which this report is, beside it; None if it was not written.
        format: the format of the broken checkpoint.
        damage: the likely cause: an interrupted upload, a full disk, two writers; may be empty.
        tensors: what is left of each tensor that is named.
        names_proven: whether a checksum proves the names, shapes and dtypes of the tensors.
        names_complete: whether all data that names tensors could be read.
        written: whether the new checkpoint was written; False after a dry run, or if nothing is
            left.
        shared: from the name of a tensor to the name under which its shared bytes are written.
        warnings: what the user should know, one sentence each.
        bytes_written: the size of the new checkpoint.
        seconds: how long it took.
    """

    source: str
    destination: str
    report: str | None
    format: str
    damage: str
    tensors: tuple[SalvagedTensor, ...]
    names_proven: bool
    names_complete: bool
    written: bool
    shared: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    bytes_written: int = 0
    seconds: Seconds = field(default=0.0, compare=False)

    @derived_key(after="names_complete")
    def complete(self) -> bool:
        """Whether everything was recovered and proven."""
        return (
            self.names_complete
            and self.names_proven
            and all(each.fate is Fate.WHOLE and each.written for each in self.tensors)
        )

    @derived_key(after="complete")
    def counts(self) -> Mapping[str, int]:
        """How many tensors there are of each fate."""
        found = {str(fate): 0 for fate in Fate}
        for each in self.tensors:
            found[str(each.fate)] += 1
        return found

    @property
    def shortfall(self) -> str:
        """Say in a few words why the new checkpoint is not complete; empty if it is."""
        if self.complete:
            return ""
        if not self.names_complete:
            return "not all of its tensors are known by name"
        lost = sum(not each.written for each in self.tensors)
        if lost:
            return f"{lost:,} of {plural(len(self.tensors), 'tensor')} could not be recovered"
        inexact = sum(each.fate in (Fate.PART, Fate.DAMAGED) for each in self.tensors)
        if inexact:
            return f"missing or wrong bytes in {plural(inexact, 'tensor')}"
        return "no checksum proves that its tensors are right"

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show the likely cause, how much is left, and the tensors that are not whole."""
        if self.damage:
            yield f"{self.source}: it looks like {self.damage}"
        rows = []
        for fate in Fate:
            same = [each for each in self.tensors if each.fate is fate]
            if same:
                there = sum(each.present_nbytes for each in same)
                of = sum(each.nbytes for each in same)
                said = size(of) if there == of else f"{size(there)} of {size(of)}"
                rows.append((str(fate), f"{len(same):,}", said, _MEANING[fate]))
        yield Table(rows, head=("", "tensors", "size", ""), right=[1, 2])
        yield from _broken_tensors(self.tensors, full=full)
        if self.written:
            kept = sum(each.written for each in self.tensors)
            yield (
                f"wrote {self.destination}: {plural(kept, 'tensor')}, {size(self.bytes_written)} "
                f"in {self.seconds:.2f} s"
            )
        if self.report is not None:
            yield f"wrote {self.report}: this report as JSON"
        if self.shortfall:
            yield Wrong(f"not the whole checkpoint: {self.shortfall}")


def _broken_tensors(tensors: Sequence[SalvagedTensor], *, full: bool) -> Iterator[Block]:
    """Return the tensors that are neither whole nor unproven, or are not written."""
    right = Fate.WHOLE, Fate.UNPROVEN
    bad = [each for each in tensors if each.fate not in right or not each.written]
    shown = bad if full else bad[:_MOST_SHOWN]
    rows = [
        (
            str(each.fate),
            each.name,
            f"{each.dtype}{shape(each.shape)}" if each.dtype else "",
            f"{size(each.present_nbytes)} of {size(each.nbytes)}" if each.nbytes else "",
            each.why,
        )
        for each in shown
    ]
    if rows:
        yield Table(rows, right=[3])
    if len(shown) < len(bad):
        yield f"and {plural(len(bad) - len(shown), 'more tensor')}"
