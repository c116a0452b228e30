"""What a conversion did, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..api.convert import ConvertReport
from ..manifest.paths import spell
from ..phrases import counted
from .relocate import what_stays
from .text import listed, printable, size, table

_MOST_FILES = 10


def conversion(report: ConvertReport, *, full: bool = False) -> Iterator[str]:
    """What was written, what was left out, and what became of shared bytes.

    Args:
        report: what was done.
        full: whether to shorten nothing.
    """
    if report.left_out:
        yield printable(f"left out: {_listed(report.left_out, full)}")
    for loss in report.dropped:
        yield printable(f"dropped: {loss.name}, which {loss.why}")
    if report.renamed:
        yield f"renamed {counted(report.renamed, 'key')}"
    for cast, count in report.cast.items():
        yield f"{cast}: {counted(count, 'tensor')}"
    yield from _weights(report)
    yield from _shared(report, full)
    yield from what_stays(report.kept, full=full)
    yield from _written(report, full)


def _weights(report: ConvertReport) -> Iterator[str]:
    """Whose weights were taken, and whose are there too."""
    taken = report.weights
    if taken is None:
        return
    line = f"weights: {_whose(taken)}"
    others = taken["others"]
    if others:
        line += f"; also in the file: {listed([_whose(each) for each in others])}"
    kinds = {each["section"] for each in others} - {taken["section"]}
    yield printable(line + "".join(f"; --weights {kind} selects them" for kind in sorted(kinds)))


def _whose(weights: Mapping[str, Any]) -> str:
    count, section = weights["tensors"], weights["section"]
    kind = "" if section in ("model", weights["name"]) else f"{section}, "
    name = "all of it" if weights["name"] == spell(()) else weights["name"]
    return f"{name} ({kind}{counted(count, 'tensor')})"


def _shared(report: ConvertReport, full: bool) -> Iterator[str]:
    if report.shared:
        pairs = [f"{name} (in {owner})" for name, owner in report.shared.items()]
        yield printable(f"written once (shared bytes): {_listed(pairs, full)}")
    if report.duplicates:
        yield printable(f"also written under: {_listed(report.duplicates, full)}")


def _listed(names: Sequence[str], full: bool) -> str:
    return listed(names, len(names)) if full else listed(names)


def _files(report: ConvertReport, full: bool) -> Iterator[str]:
    """The files of a folder, and their sizes."""
    files = [(name, size(nbytes)) for name, nbytes in report.files.items()]
    if len(files) > 1:
        shown = files if full else files[:_MOST_FILES]
        yield from table(shown, right=[1])
        if len(shown) < len(files):
            yield f"and {counted(len(files) - len(shown), 'more file')}"


def _written(report: ConvertReport, full: bool) -> Iterator[str]:
    nbytes = sum(report.files.values())
    several = f" in {len(report.files):,} files" if len(report.files) > 1 else ""
    what = f"{counted(report.tensors, 'tensor')}, {size(nbytes)}{several}"
    if not report.written:
        yield from _files(report, full)
        yield printable(f"would write {report.destination} as {report.format}: {what}")
        return
    yield printable(
        f"wrote {report.destination} as {report.format}: {what} in {report.seconds:.2f} s, verified"
    )
