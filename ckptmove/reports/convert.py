"""The report of a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..display.blocks import Block, Table
from ..display.phrases import plural, show_name, which_loading_runs
from ..display.plain import Seconds
from ..display.report import Report
from ..display.text import first_names, size
from ..errors import CheckFailed
from ..manifest.paths import spell
from ..placement.move_totals import Kept
from .device_values import what_stays

_MOST_FILES = 10


class Loss(NamedTuple):
    """Something that the target format cannot store.

    Attributes:
        name: where it is; `--drop` matches this name.
        why: what it is, and why it cannot be stored.
    """

    name: str
    why: str


@dataclass(frozen=True)
class ConvertReport(Report):
    """What a conversion did, or would do.

    Attributes:
        source: the checkpoint.
        destination: the new checkpoint.
        source_format, format: the formats of the two.
        written: whether it was written; False after a dry run.
        files: from each file of the new checkpoint to its size in bytes.
        tensors: the number of tensors in these files.
        left_out: names that were not selected, without names below them.
        weights: the chosen weights, if the weights of one model were requested: `name`, `section`,
            `tensors`, and `others`, the same for the other weights in the file; otherwise None.
        dropped: entries that the target cannot store, each with the reason.
        shared: from the name of a tensor to the name under which its shared bytes are written.
        duplicates: names under which shared bytes are written again.
        cast: from `float32→bfloat16` to the number of tensors.
        renamed: the number of keys with a new name.
        kept: tensors that `to` matches and that stay, with the reason.
        parts: for a folder, from each checkpoint in it to its new files.
        pickles: for a folder, copied files that may be pickles, each with the reason why it is not
            converted; without files that the caller asked to copy. The exit code is then 1.
        unknown_callables: callables not known to be harmless that loading the new checkpoint would
            import; empty for formats that run nothing, such as safetensors.
        warnings: what the user should know, one sentence each.
        nbytes: the size of the source.
        bytes_written: the size of the new checkpoint.
        seconds: how long it took.
    """

    source: str
    destination: str
    source_format: str
    format: str
    written: bool
    files: Mapping[str, int]
    tensors: int
    left_out: tuple[str, ...] = ()
    weights: Mapping[str, Any] | None = None
    dropped: tuple[Loss, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    cast: Mapping[str, int] = field(default_factory=dict)
    renamed: int = 0
    kept: tuple[Kept, ...] = ()
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pickles: tuple[Loss, ...] = ()
    unknown_callables: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    nbytes: int = 0
    bytes_written: int = 0
    seconds: Seconds = field(default=0.0, compare=False)

    @property
    def failure(self) -> CheckFailed | None:
        """Return the error for a folder in which pickles remain; None without pickles."""
        if not self.pickles:
            return None
        names = [each.name for each in self.pickles]
        what = "stays a pickle" if len(names) == 1 else "stay pickles"
        hint = f"--keep-files '{names[0]}' accepts that"
        return CheckFailed(f"{first_names(names, 3)} {what}", path=self.source, hint=hint)

    def remarks(self) -> list[str]:
        """Return the warnings, and that the file names unknown callables."""
        return [*self.warnings, *which_loading_runs(self.unknown_callables)]

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show what was written and left out, and how shared bytes were written."""
        if self.left_out:
            yield f"left out: {_join_names(self.left_out, full)}"
        for loss in self.dropped:
            yield f"dropped: {show_name(loss.name)}, which {loss.why}"
        if self.renamed:
            yield f"renamed {plural(self.renamed, 'key')}"
        for cast, count in self.cast.items():
            yield f"{cast}: {plural(count, 'tensor')}"
        yield from _weights(self)
        yield from _shared_lines(self, full)
        yield from what_stays(self.kept, full=full)
        yield from _parts(self)
        for pickle in self.pickles:
            yield f"not converted: {pickle.name} {pickle.why}"
        yield from _result_blocks(self, full)


def _weights(report: ConvertReport) -> Iterator[str]:
    """Return lines about the chosen weights, and the other models in the file."""
    taken = report.weights
    if taken is None:
        return
    line = f"weights: {_whose(taken)}"
    others = taken["others"]
    if others:
        line += f"; also in the file: {first_names([_whose(each) for each in others])}"
    kinds = {each["section"] for each in others} - {taken["section"]}
    yield line + "".join(f"; --weights {kind} selects them" for kind in sorted(kinds))


def _whose(weights: Mapping[str, Any]) -> str:
    count, section = weights["tensors"], weights["section"]
    kind = "" if section in ("model", weights["name"]) else f"{section}, "
    name = "all of it" if weights["name"] == spell(()) else show_name(weights["name"])
    return f"{name} ({kind}{plural(count, 'tensor')})"


def _shared_lines(report: ConvertReport, full: bool) -> Iterator[str]:
    if report.shared:
        pairs = [f"{name} (in {owner})" for name, owner in report.shared.items()]
        yield f"written once (shared bytes): {_join_names(pairs, full)}"
    if report.duplicates:
        yield f"also written under: {_join_names(report.duplicates, full)}"


def _parts(report: ConvertReport) -> Iterator[Block]:
    """Return lines about each checkpoint of a folder, if there are several."""
    if len(report.parts) > 1:
        rows = [(name, "→", _first_of(files)) for name, files in report.parts.items()]
        yield Table(rows)
    if any(list(files) == [f"{name}.safetensors"] for name, files in report.parts.items()):
        yield (
            "no library resumes from an optimizer in safetensors: --format torch-zip converts the "
            "folder back, --keep-files copies such files"
        )


def _first_of(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} more"


def _join_names(names: Sequence[str], full: bool) -> str:
    return first_names(names, len(names)) if full else first_names(names)


def _files(report: ConvertReport, full: bool) -> Iterator[Block]:
    files = [(name, size(nbytes)) for name, nbytes in report.files.items()]
    if len(files) > 1:
        shown = files if full else files[:_MOST_FILES]
        yield Table(shown, right=[1])
        if len(shown) < len(files):
            yield f"and {plural(len(files) - len(shown), 'more file')}"


def _result_blocks(report: ConvertReport, full: bool) -> Iterator[Block]:
    nbytes = sum(report.files.values())
    several = f" in {len(report.files):,} files" if len(report.files) > 1 else ""
    what = f"{plural(report.tensors, 'tensor')}, {size(nbytes)}{several}"
    if not report.written:
        yield from _files(report, full)
        yield f"would write {report.destination} as {report.format}: {what}"
        return
    yield (
        f"wrote {report.destination} as {report.format}: {what} in {report.seconds:.2f} s, verified"
    )
