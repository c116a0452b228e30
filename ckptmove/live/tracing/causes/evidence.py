"""The evidence of a traced run, and which of it a cause explains already."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ....manifest.manifest import Manifest
from ....reports.events import Happening, Operand, Trace
from ...inventory.ownership import OwnershipReport
from .background import UNKNOWN_PROGRAM, Background

MOST_LINES = 5  # of evidence
UNKNOWN = OwnershipReport()
#: What torch says if an operation takes no tensor from another device, also no number.
_SAME = re.compile(r"Expected all tensors to be on the same device")
#: What torch says of operands on several devices, in any operation.
DEVICES = re.compile(
    r"Expected all tensors to be on the same device|indices should be either on cpu or on the same"
    r"|Input type \(.*\) and weight type \(.*\) should be the same|are on different devices"
    r"|Input and (parameter|hidden) tensors are not at the same device"
)
_INDICES = re.compile(r"indices should be either on cpu or on the same device")


@dataclass
class Evidence:
    """The facts to explain, and those that are explained."""

    device: str  #: where everything is meant to be
    manifest: Manifest  #: of the model and what trains it
    belonging: OwnershipReport  #: what belongs together
    trace: Trace | None  #: of the run, or None
    failed: str | None  #: the exception that ended it, in a line, or None
    known: Background = UNKNOWN_PROGRAM  #: of the program's code
    #: Of its tensors what made them, and at which line.
    origins: Mapping[str, str] = field(default_factory=dict)
    trained: bool = True  #: whether there is an optimizer of the model
    #: Names and lines whose symptoms are explained.
    explained: set[str] = field(default_factory=set)

    def happened(self, *kinds: str) -> list[Happening]:
        """The events of some kinds."""
        return [] if self.trace is None else self.trace.of(*kinds)

    def broken(self) -> list[Operand]:
        """The operands elsewhere of the operation that failed."""
        if self.trace is None or self.failed is None:
            return []
        operands = [each for each in self.trace.operands if each.shape]
        if len({each.device for each in operands}) < 2:
            # Some operations, such as `stack`, take no numbers from elsewhere either.
            operands = list(self.trace.operands) if _SAME.search(self.failed) else []
        if len({each.device for each in operands}) < 2 and not _INDICES.search(self.failed):
            return []
        away = [each for each in operands if self.is_away(each.device)]
        error = self.trace.error
        if error is not None and "index_put" in error.op and len(operands) > 2:
            _, *indices, _ = self.trace.operands
            away = [each for each in away if each not in indices]  # which may be on the CPU
        return away

    @property
    def often(self) -> int:
        """The count that an event has if it happens at every step that was watched."""
        return 1 if self.trace is None else max(1, self.trace.watched or self.trace.calls)

    @property
    def works(self) -> bool:
        """Whether a model ran, and nothing failed."""
        return self.trace is not None and self.trace.calls > 0 and self.failed is None

    def made_at(self, name: str) -> str:
        """The name of a tensor of the model, with what made it if that is known."""
        return f"{name}, made by {self.origins[name]}," if name in self.origins else name

    def is_away(self, device: str) -> bool:
        """Whether this is not the target device."""
        return device != self.device

    def explain(self, names: Iterator[str] | Sequence[str]) -> None:
        """Mark tensor names or code lines as explained, so that their symptoms are not reported."""
        self.explained.update(names)
