"""What was done about interrupted changes, a line a file."""

from __future__ import annotations

from collections.abc import Iterator

from ..verbs.recover import RecoverReport
from .text import printable, size

_WHAT = {
    "nothing": "nothing to recover",
    "unchanged": "as it was: an interrupted change in place left it so; removed its journal",
    "rolled-back": "as it was: rolled back an interrupted change in place",
}


def recovery(report: RecoverReport) -> Iterator[str]:
    """What became of each file."""
    if not report.files:
        yield printable(f"{report.path}: {_WHAT['nothing']}")
    for each in report.files:
        written = f", {size(each.bytes_written)} written" if each.bytes_written else ""
        yield printable(f"{each.path}: {_WHAT[each.outcome]}{written}")
