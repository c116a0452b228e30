"""What is the matter with a model on a device: what `trace` and `doctor` come to. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import CheckFailed
from .events import Trace
from .verdict import WRONG, Verdict

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA = 1


@dataclass(frozen=True)
class Diagnosis:
    """What is the matter. Those that ckptmove gives show themselves, as `ckptmove doctor` does.

    Attributes:
        subject: what was looked at: a model's class, a script; or "" for the machine alone.
        device: where everything is meant to be.
        simulated: whether that device was played by tensors without values.
        facts: what the machine and torch are like, as plain data.
        report: the model's manifest after the last step, as `Manifest.to_json` gives it, or None.
        placed: where the model's modules are, a line each.
        trace: what ran where, or None where nothing ran.
        verdicts: what is wrong, root causes first.
        notes: what else should be said, a sentence each; how a run ended, if it is not complete.
        complete: whether everything that was asked for was watched. If not, that nothing is wrong
            means little.
        not_simulated: whether it is incomplete because the simulation could not continue.
    """

    subject: str
    device: str
    simulated: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    placed: tuple[str, ...] = ()
    trace: Trace | None = None
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = True
    not_simulated: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; what is merely slow is not."""
        return all(each.severity != WRONG for each in self.verdicts)

    def raise_if_wrong(self) -> None:
        """Do nothing if nothing is wrong.

        Raises:
            CheckFailed: something is; it names each root cause.
        """
        wrong = [each.title for each in self.verdicts if each.severity == WRONG]
        if wrong:
            raise CheckFailed("; ".join(wrong), path=self.subject or None)

    def to_json(self) -> dict[str, Any]:
        """As plain data, the same as `ckptmove doctor --json` prints."""
        return {
            "schema": SCHEMA,
            "subject": self.subject,
            "device": self.device,
            "simulated": self.simulated,
            "ok": self.ok,
            "complete": self.complete,
            "not_simulated": self.not_simulated,
            "unplayed": self.not_simulated,  # its former name
            "verdicts": [each.to_json() for each in self.verdicts],
            "facts": dict(self.facts),
            "report": None if self.report is None else dict(self.report),
            "placed": list(self.placed),
            "trace": None if self.trace is None else self.trace.to_json(),
            "notes": list(self.notes),
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave, as another process tells it.

        Raises:
            ValueError: this is nothing that it gives.
        """
        try:
            found = cls(
                subject=data["subject"],
                device=data["device"],
                simulated=data["simulated"],
                facts=data["facts"],
                report=data["report"],
                placed=tuple(data["placed"]),
                trace=None if data["trace"] is None else Trace.of_json(data["trace"]),
                verdicts=tuple(
                    Verdict(**{**each, "evidence": tuple(each["evidence"])})
                    for each in data["verdicts"]
                ),
                notes=tuple(data["notes"]),
                complete=data["complete"],
                not_simulated=data["not_simulated"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no diagnosis: {error!r}") from error
        texts = (found.subject, found.device, *found.placed, *found.notes)
        texts += tuple(text for each in found.verdicts for text in (each.title, each.fix))
        switches = (found.simulated, found.complete, found.not_simulated)
        mappings = (found.facts, {} if found.report is None else found.report)
        for values, kind in ((texts, str), (switches, bool), (mappings, Mapping)):
            if not all(isinstance(each, kind) for each in values):
                raise ValueError(f"no diagnosis: {values!r}")
        return found
