"""The evidence of a traced run, and which of its symptoms are explained already."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ....manifest.manifest import Manifest
from ....reports.events import Happening, Operand, Trace
from ...inventory.ownership import OwnershipReport
from .background import UNKNOWN_PROGRAM, Background

MOST_LINES = 5  # the most lines of evidence in a verdict
UNKNOWN = OwnershipReport()
#: torch's text if an operation takes no tensor from another device, not even a single number.
_SAME = re.compile(r"Expected all tensors to be on the same device")
#: torch's texts about operands on several devices, for all operations.
DEVICES = re.compile(
    r"Expected all tensors to be on the same device|indices should be either on cpu or on the same"
    r"|Input type \(.*\) and weight type \(.*\) should be the same|are on different devices"
    r"|Input and (parameter|hidden) tensors are not at the same device"
)
_INDICES = re.compile(r"indices should be either on cpu or on the same device")


@dataclass
class Evidence:
    """The facts to explain, and the names and lines that are explained already."""

    device: str  #: the target device, where everything should be
    manifest: Manifest  #: of the model and its optimizers
    belonging: OwnershipReport  #: which tensors belong together
    trace: Trace | None  #: the recording of the run, or None
    failed: str | None  #: the exception that ended the run, in one line, or None
    known: Background = UNKNOWN_PROGRAM  #: facts about the program's code
    #: The names of the model's tensors → the code and line that made them.
    origins: Mapping[str, str] = field(default_factory=dict)
    trained: bool = True  #: whether the model has an optimizer
    #: Names and lines whose symptoms are explained.
    explained: set[str] = field(default_factory=set)

    def happened(self, *kinds: str) -> list[Happening]:
        """The events of some kinds."""
        return [] if self.trace is None else self.trace.of(*kinds)

    def broken(self) -> list[Operand]:
        """The operands on another device of the operation that failed."""
        if self.trace is None or self.failed is None:
            return []
        operands = [each for each in self.trace.operands if each.shape]
        if len({each.device for each in operands}) < 2:
            # Some operations, such as `stack`, don't take single numbers from another device.
            operands = list(self.trace.operands) if _SAME.search(self.failed) else []
        if len({each.device for each in operands}) < 2 and not _INDICES.search(self.failed):
            return []
        away = [each for each in operands if self.is_away(each.device)]
        error = self.trace.error
        if error is not None and "index_put" in error.op and len(operands) > 2:
            _, *indices, _ = self.trace.operands
            away = [each for each in away if each not in indices]  # indices may be on the CPU
        return away

    @property
    def often(self) -> int:
        """The count of an event that happens at every watched step."""
        return 1 if self.trace is None else max(1, self.trace.watched or self.trace.calls)

    @property
    def works(self) -> bool:
        """Whether a model ran, and nothing failed."""
        return self.trace is not None and self.trace.calls > 0 and self.failed is None

    def made_at(self, name: str) -> str:
        """The name of a tensor of the model, with the code that made it, if known."""
        return f"{name}, made by {self.origins[name]}," if name in self.origins else name

    def is_away(self, device: str) -> bool:
        """Whether this is not the target device."""
        return device != self.device

    def explain(self, names: Iterator[str] | Sequence[str]) -> None:
        """Mark tensor names or code lines as explained, so that their symptoms are not reported."""
        self.explained.update(names)
