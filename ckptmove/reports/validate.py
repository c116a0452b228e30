"""What a validation found: a short checklist."""

from __future__ import annotations

from collections.abc import Iterator

from ..api.validate import ValidationReport
from ..phrases import counted
from .data.findings import FAILED, PASSED, SKIPPED
from .text import printable

_MARKS = {PASSED: "ok", FAILED: "FAILED", SKIPPED: "skipped"}
_MOST_DETAILS = 6  # lines of one check


def validation(report: ValidationReport, *, full: bool = False) -> Iterator[str]:
    """A line for each check, and under it what there is to be known.

    Args:
        report: what was found.
        full: whether to shorten nothing.
    """
    for finding in report.checks:
        yield printable(f"{_MARKS[finding.outcome]:<8}{finding.check:<10}{finding.title}")
        shown = len(finding.details) if full or finding.outcome == FAILED else _MOST_DETAILS
        for detail in finding.details[:shown]:
            yield printable(f"{'':18}{detail}")
        if shown < len(finding.details):
            more = counted(len(finding.details) - shown, "more line")
            yield f"{'':18}and {more}; -v shows all"
    where = f"simulated {report.device}" if report.simulated else report.device
    failed = [finding.check for finding in report.checks if finding.outcome == FAILED]
    verdict = f"failed: {', '.join(failed)}" if failed else "no check failed"
    if report.of("container").data.get("tensors") == 0:
        verdict += ", but it holds no tensors"
    place = "" if report.device == "auto" else f" on {where}"
    yield printable(f"{report.source}{place}: {verdict}")
