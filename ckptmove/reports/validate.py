"""The report of a validation: a checklist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import CheckFailed
from ..phrases import plural
from .data.findings import FAILED, PASSED, SKIPPED, Finding
from .text import printable

SCHEMA = 1


@dataclass(frozen=True)
class ValidationReport:
    """What a validation found.

    Attributes:
        source: the checkpoint.
        against: what it was compared with, or None.
        device: where it was loaded and run.
        simulated: whether this device was simulated.
        checks: what each check found, in the order of `CHECKS`.
        warnings: what the user should know, one sentence each.
    """

    source: str
    against: str | None
    device: str
    simulated: bool
    checks: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(each.outcome != FAILED for each in self.checks)

    def of(self, check: str) -> Finding:
        """Return what one check found."""
        return next(each for each in self.checks if each.check == check)

    def raise_if_failed(self) -> None:
        """Raise if a check failed.

        Raises:
            CheckFailed: a check failed; the message names each one that did.
        """
        found = [f"{each.check}: {each.title}" for each in self.checks if each.outcome == FAILED]
        if found:
            raise CheckFailed("; ".join(found), path=self.source)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the same as `ckptmove validate --json` prints."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "against": self.against,
            "device": self.device,
            "simulated": self.simulated,
            "ok": self.ok,
            "checks": [each.to_json() for each in self.checks],
            "warnings": list(self.warnings),
        }


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
            more = plural(len(finding.details) - shown, "more line")
            yield f"{'':18}and {more}; -v shows all"
    where = f"simulated {report.device}" if report.simulated else report.device
    failed = [finding.check for finding in report.checks if finding.outcome == FAILED]
    verdict = f"failed: {', '.join(failed)}" if failed else "no check failed"
    if report.of("container").data.get("tensors") == 0:
        verdict += ", but it holds no tensors"
    place = "" if report.device == "auto" else f" on {where}"
    yield printable(f"{report.source}{place}: {verdict}")
