"""Find whether a program changes the tensors that it trains, or reads gradients of copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from ..program.source_lines import is_library, line_of, user_frame, variable
from .operations import COPIES, indexed, is_big
from .remembered import StorageNotes


class Read(NamedTuple):
    """A line that reads the `.grad` of a copy, which stays None: only what was copied has one."""

    name: str  #: the variable of the copy, or ""
    line: str  #: where it is read
    copied: str  #: where the copy was made, or ""


class Updates:
    """The changes of trained tensors: those that require gradients, and are not computed.

    Attributes:
        found: whether one was changed after a backward pass.
        reads: the lines that read the `.grad` of a copy of one on another device.
    """

    def __init__(self, line_of_node: Callable[[int], str]) -> None:
        """`line_of_node` maps the number of a node of autograd to its line."""
        self._line_of_node = line_of_node
        self._trained = StorageNotes()
        self._gradients = StorageNotes()
        self._computed = StorageNotes()  # from gradients: the number of the backward pass
        self.found = False
        self.reads: dict[tuple[str, str], Read] = {}  # by both lines

    def look(self, op: str, taken: Sequence[torch.Tensor], *, trained: bool) -> None:
        """See an operation; `trained` tells whether it runs after a backward pass, not within."""
        for each in taken if torch.is_grad_enabled() else ():
            if each.requires_grad and each.is_leaf:
                self._trained.note(each, True)
        if trained and op.endswith("_") and taken and self._trained.about(taken[0]):
            self.found = True

    def compute(
        self,
        op: str,
        taken: Sequence[torch.Tensor],
        made: Iterable[torch.Tensor],
        backwards: int,
        *,
        within: bool,
    ) -> None:
        """See an operation within the last of `backwards` passes, or after: `p = p - lr * g`, say.

        What is computed from gradients after it are new values, if a later pass still uses them;
        their copies are gradients.
        """
        if within or (op in COPIES and any(map(self._gradients.about, taken))):
            for each in made:
                self._gradients.note(each, True)
            return
        pass_of = [self._computed.about(each) for each in taken]
        self.found |= any(each is not None and each < backwards for each in pass_of)
        if any(each is not None for each in pass_of) or any(map(self._gradients.about, taken)):
            for each in made:
                if is_big(each) and not self._gradients.about(each):
                    self._computed.note(each, backwards)

    def set_values(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """See a frame that sets the `.data` of a tensor."""
        own = tensor.requires_grad and tensor.is_leaf
        self.found |= own and not is_library(frame.f_code.co_filename)  # `.to` of a module does it

    def read_gradient(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """See a frame that reads the `.grad` of a tensor, which is None."""
        node = first = tensor.grad_fn
        while node is not None and "Copy" in node.name():
            node = node.next_functions[0][0]
        source: Any = getattr(node, "variable", None)  # of a node of a tensor that is not computed
        if first is None or source is None or tensor.retains_grad:
            return
        users = user_frame(frame)
        if users is not None and indexed(source.device) != indexed(tensor.device):
            lines = line_of(users), self._line_of_node(first._sequence_nr())
            if lines not in self.reads:
                self.reads[lines] = Read(variable(users, tensor), *lines)
