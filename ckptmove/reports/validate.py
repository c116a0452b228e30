"""The report of a validation: a checklist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..display.blocks import Block, Table, Wrong
from ..display.columns import PageBlock
from ..display.phrases import plural
from ..display.plain import Plain, derived_key
from ..display.report import Report
from ..errors import CheckFailed

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
#: The checks of a trial, in order.
TRIAL_CHECKS = ("model", "step", "trace")
#: The checks of a validation, in order.
ALL_CHECKS = ("container", "against", "reload", *TRIAL_CHECKS)
_ON_DEVICE = ("reload", *TRIAL_CHECKS)
_MARKS = {PASSED: "ok", FAILED: "FAILED", SKIPPED: "skipped"}
_MOST_DETAILS = 6  # lines of one check


@dataclass(frozen=True)
class Finding(Plain):
    """The result of one check of `validate`.

    Attributes:
        check: `container`, `against`, `reload`, `model`, `step` or `trace`.
        outcome: `passed`, `failed` or `skipped`.
        title: the result in one line.
        details: more about it, one line each; for a failure, its cause and fix.
        data: the same for programs: numbers, strings, lists and dicts of them.
    """

    check: str
    outcome: str
    title: str
    details: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialResult(Plain):
    """The result of a trial of a checkpoint on a device."""

    device: str  #: the device of the trial
    simulated: bool  #: whether this device was simulated, with tensors without values
    findings: Sequence[Finding]  #: one per check, in the order of `TRIAL_CHECKS`

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(each.outcome != FAILED for each in self.findings)

    def of(self, check: str) -> Finding:
        """Return the finding of a check."""
        return next(each for each in self.findings if each.check == check)


@dataclass(frozen=True)
class ValidationReport(Report):
    """What a validation found.

    Attributes:
        source: the checkpoint.
        against: what it was compared with, or None.
        device: where it was loaded and run.
        simulated: whether this device was simulated.
        checks: what each check found, in the order of `ALL_CHECKS`.
        warnings: what the user should know, one sentence each.
    """

    source: str
    against: str | None
    device: str
    simulated: bool
    checks: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()

    @derived_key(after="simulated")
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

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show a row for each check, with details below it, and then the verdict."""
        rows: list[tuple[str, str, str]] = []
        for each in self.checks:
            mark = _MARKS[each.outcome]
            rows.append((Wrong(mark) if each.outcome == FAILED else mark, each.check, each.title))
            shown = len(each.details) if full or each.outcome == FAILED else _MOST_DETAILS
            rows += [("", "", detail) for detail in each.details[:shown]]
            if shown < len(each.details):
                more = plural(len(each.details) - shown, "more line")
                rows.append(("", "", f"and {more}; -v shows all"))
        yield Table(rows, gap=1, widths=(7, 9))
        yield self._verdict()

    def page(self) -> Iterator[PageBlock]:
        """Show the verdict, and then the checks with all details."""
        *checks, verdict = self.blocks(full=True)
        yield from (verdict, *checks)
        yield from self.remarks()

    def _verdict(self) -> str:
        """Return a line with the failed checks, or otherwise the passed ones."""
        where = f"simulated {self.device}" if self.simulated else self.device
        failed = [each.check for each in self.checks if each.outcome == FAILED]
        passed = [each.check for each in self.checks if each.outcome == PASSED]
        verdict = f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(passed)}"
        if self.of("container").data.get("tensors") == 0:
            verdict += "; it holds no tensors"
        if self.warnings and not failed:
            verdict += f"; {plural(len(self.warnings), 'warning')}"
        anywhere = any(self.of(check).outcome != SKIPPED for check in _ON_DEVICE)
        place = f" on {where}" if anywhere else ""
        said = f"{self.source}{place}: {verdict}"
        return Wrong(said) if failed else said
