"""What was done about interrupted changes, a line a file."""

from __future__ import annotations

from collections.abc import Iterator

from ..api.recover import RecoverReport
from .text import printable, size

_WHAT = {
    "nothing": "nothing to recover",
    "unchanged": "not changed by the interrupted in-place change; removed its journal",
    "rolled-back": "restored: undid an interrupted in-place change",
}


def recovery(report: RecoverReport) -> Iterator[str]:
    """What became of each file."""
    if not report.files:
        yield printable(f"{report.path}: {_WHAT['nothing']}")
    for each in report.files:
        written = f", {size(each.bytes_written)} written" if each.bytes_written else ""
        yield printable(f"{each.path}: {_WHAT[each.outcome]}{written}")
