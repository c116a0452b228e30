"""What is wrong with a run, in the user's terms: plain data. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: How bad it is: not what was asked for, or right and slower than need be.
WRONG, SLOW = "wrong", "slow"


@dataclass(frozen=True)
class Verdict:
    """One thing that is wrong, and what to do about it.

    Attributes:
        cause: a stable name for programs, e.g. `cpu-only-build`.
        title: the root cause in a line.
        fix: what to do: a command or a line of code where there is one.
        evidence: what it was concluded from, a line each.
        severity: `wrong`: not what was asked for; `slow`: right, and slower than need be.
    """

    cause: str
    title: str
    fix: str
    evidence: tuple[str, ...] = ()
    severity: str = WRONG

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "cause": self.cause,
            "severity": self.severity,
            "title": self.title,
            "fix": self.fix,
            "evidence": list(self.evidence),
        }
