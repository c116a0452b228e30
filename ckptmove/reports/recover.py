"""The report of `recover`: what was done about each interrupted change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..display.report import Report
from ..display.text import size

_WHAT = {
    "nothing": "nothing to recover",
    "unchanged": "not changed by the interrupted in-place change; removed its journal",
    "rolled-back": "restored: undid an interrupted in-place change",
    "removed": "removed what a killed process had begun to write",
    "kept": "kept: a process may be writing it, or it is what was there before",
    "aborted": "removed invisible parts that a killed process had uploaded",
    "uploading": "kept its parts: a process is uploading it, or was 15 minutes ago",
}


class Recovered(NamedTuple):
    """What was done about one interrupted change in place.

    Attributes:
        path: the file.
        outcome: `nothing` (there was no journal), `unchanged` (the file had not been changed; the
            journal was removed), `rolled-back` (the file was restored), `removed` (it was a
            temporary file or folder of a killed process), `kept` (it may be one, or that of a
            process that still runs), `aborted` (invisible parts of an object were removed) or
            `uploading` (they were kept, as they may be completed).
        bytes_written: the bytes written to the file.
    """

    path: str
    outcome: str
    bytes_written: int = 0


@dataclass(frozen=True)
class RecoverReport(Report):
    """What was done about interrupted changes in place.

    Attributes:
        path: the file or folder.
        files: what was done to the file, or to each file in the folder that had a journal; and to
            temporary files.
    """

    path: str
    files: tuple[Recovered, ...]

    def blocks(self, *, full: bool = False) -> Iterator[str]:
        """Show what was done to each file."""
        if not self.files:
            yield f"{self.path}: {_WHAT['nothing']}"
        for each in self.files:
            written = f", {size(each.bytes_written)} written" if each.bytes_written else ""
            yield f"{each.path}: {_WHAT[each.outcome]}{written}"
