"""The diagnosis that `doctor` and `trace` return: plain data."""

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
    """What is wrong with a model on a device, from `doctor` or `trace`.

    `print` shows it as `ckptmove doctor` does.

    Attributes:
        subject: what was looked at: the class of a model, or a script; "" for the machine alone.
        device: where everything should be.
        simulated: whether the device was simulated, with tensors without values.
        facts: what the machine and torch can do, as plain data.
        report: the manifest of the model after the last step, as `Manifest.to_json` gives it, or
            None.
        placed: where the modules of the model are, one line each.
        trace: what ran where, or None if nothing ran.
        verdicts: what is wrong, root causes first.
        notes: what else the user should know, one sentence each; also how a run ended that is not
            complete.
        complete: whether everything that was asked for was watched. If not, an empty `verdicts`
            proves little.
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
        """Whether nothing is wrong; findings that are only slow do not count."""
        return all(each.severity != WRONG for each in self.verdicts)

    def raise_if_wrong(self) -> None:
        """Raise if something is wrong.

        Raises:
            CheckFailed: something is wrong; the message names each root cause.
        """
        wrong = [each.title for each in self.verdicts if each.severity == WRONG]
        if wrong:
            raise CheckFailed("; ".join(wrong), path=self.subject or None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the same as `ckptmove doctor --json` prints."""
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
        """Build a diagnosis from the plain data of `to_json`, for example from another process.

        Raises:
            ValueError: the data does not have that form.
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
