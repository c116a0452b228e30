"""What the checks of `validate` found: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
#: The checks of a trial, in order.
CHECKS = ("model", "step", "trace")


@dataclass(frozen=True)
class Finding:
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

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "check": self.check,
            "outcome": self.outcome,
            "title": self.title,
            "details": list(self.details),
            "data": dict(self.data),
        }


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial of a checkpoint on a device.

    Attributes:
        device: the device of the trial.
        simulated: whether this device was simulated, with tensors without values.
        findings: one a check, in the order of `CHECKS`.
    """

    device: str
    simulated: bool
    findings: Sequence[Finding]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(each.outcome != FAILED for each in self.findings)

    def of(self, check: str) -> Finding:
        """The finding of a check."""
        return next(each for each in self.findings if each.check == check)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "device": self.device,
            "simulated": self.simulated,
            "findings": [each.to_json() for each in self.findings],
        }
