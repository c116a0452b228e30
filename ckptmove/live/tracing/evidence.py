"""The evidence of a traced run, and which of it a cause explains already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...manifest.manifest import Manifest
from ...reports.events import Happening, Operand, Trace
from ..inventory.ownership import OwnershipReport

MOST_LINES = 5  # of evidence
UNKNOWN = OwnershipReport()


@dataclass
class Evidence:
    """The facts to explain, and those that are explained."""

    device: str  #: where everything is meant to be
    manifest: Manifest  #: of the model and what trains it
    belonging: OwnershipReport  #: what belongs together
    trace: Trace | None  #: of the run, or None
    failed: str | None  #: the exception that ended it, in a line, or None
    variable: str = ""  #: what the user calls the model, or ""
    #: Names and lines whose symptoms are explained.
    explained: set[str] = field(default_factory=set)

    def happened(self, *kinds: str) -> list[Happening]:
        """The events of some kinds."""
        return [] if self.trace is None else self.trace.of(*kinds)

    def broken(self) -> list[Operand]:
        """The operands elsewhere of the operation that failed."""
        if self.trace is None or self.failed is None:
            return []
        devices = {each.device for each in self.trace.operands if each.shape}
        if len(devices) < 2:
            return []
        return [each for each in self.trace.operands if each.shape and self.is_away(each.device)]

    @property
    def often(self) -> int:
        """The count that an event has if it happens at every step."""
        return 1 if self.trace is None else max(1, self.trace.steps or self.trace.calls)

    @property
    def works(self) -> bool:
        """Whether a model ran, and nothing failed."""
        return self.trace is not None and self.trace.calls > 0 and self.failed is None

    def is_away(self, device: str) -> bool:
        """Whether this is not the target device."""
        return device != self.device

    def explain(self, names: Iterator[str] | Sequence[str]) -> None:
        """Mark tensor names or code lines as explained, so that their symptoms are not reported."""
        self.explained.update(names)
