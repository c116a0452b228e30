"""validate: prove that a checkpoint is whole, equal to its source, loads, and trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import formats
from ..errors import CheckFailed, InputError, StrPath
from ..findings import Finding, Outcome, failed, passed, skipped
from ..in_place import settle
from ..verifier import Progress

SCHEMA = 1
CHECKS = ("container", "against", "reload", "model", "step", "trace")
_UNREADABLE = "it can't be read"


@dataclass(frozen=True)
class ValidationReport:
    """What was found.

    Attributes:
        source: the checkpoint.
        against: what it was compared with, or None.
        device: where it was loaded and run.
        simulated: whether that was a stand-in for a device that is not there.
        checks: what each check found, in order.
        warnings: what the user should know, a sentence each.
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
        return all(finding.outcome is not Outcome.FAILED for finding in self.checks)

    def raise_if_failed(self) -> None:
        """Raises CheckFailed, naming each check that failed."""
        found = [f"{each.check}: {each.title}" for each in self.checks if each.outcome is _FAILED]
        if found:
            raise CheckFailed("; ".join(found), path=self.source)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, the same as `ckptmove validate --json` prints."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "against": self.against,
            "device": self.device,
            "simulated": self.simulated,
            "ok": self.ok,
            "checks": [finding.to_json() for finding in self.checks],
            "warnings": list(self.warnings),
        }


_FAILED = Outcome.FAILED
