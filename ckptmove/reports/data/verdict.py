"""A verdict: one thing that is wrong, and its fix. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: How bad it is: not what was asked for, or right and slower than need be.
WRONG, SLOW = "wrong", "slow"


@dataclass(frozen=True)
class Verdict:
    """One thing that is wrong, and how to fix it.

    Attributes:
        cause: a stable name for programs, for example `cpu-only-build`.
        title: the root cause in one line.
        fix: what to do: a command or a line of code where possible.
        evidence: the observations behind it, one line each.
        severity: `wrong`: not what was asked for; `slow`: correct, but slower than necessary.
    """

    cause: str
    title: str
    fix: str
    evidence: tuple[str, ...] = ()
    severity: str = WRONG

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "cause": self.cause,
            "severity": self.severity,
            "title": self.title,
            "fix": self.fix,
            "evidence": list(self.evidence),
        }
