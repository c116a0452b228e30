"""Remember the optimizers that took a step, and which parameters had a gradient."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from ..program.source_lines import line_in, variable
from ..program.syntax import assigned_at, calls_of
from .history import History, StateLoad

_MOST_TRAINED = 8  # the most parameters whose variables are looked up


class TrainedTensor(NamedTuple):
    """A tensor that an optimizer trains, and its variable."""

    tensor: weakref.ref[torch.Tensor]
    name: str


class SteppingOptimizers:
    """The optimizers that took a step in a run.

    Attributes:
        line: the code that made the latest optimizer, and its line.
        loaded_early: where that optimizer loaded its state, if its parameters were elsewhere then;
            or None.
        variables: trained tensors that a variable of the user's code holds.
    """

    def __init__(self, history: History) -> None:
        """`history` tells which lines made optimizers and loaded their state."""
        self._history = history
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        self._fed: dict[int, weakref.ref[torch.Tensor]] = {}  # by id, as it is read at each step
        self.line = ""
        self.loaded_early: StateLoad | None = None
        self.variables: list[TrainedTensor] = []

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        return [each for ref in self._known if (each := ref()) is not None]

    def know(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module], frame: FrameType | None
    ) -> None:
        """Remember an optimizer that takes a step, and which parameters have a gradient."""
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        if not any(ref() is optimizer for ref in self._known):
            self._known.append(weakref.ref(optimizer))
            self._note_lines_of(optimizer, frame)
            for each in trained[:_MOST_TRAINED]:
                name = "" if frame is None else variable(frame, each)
                self.variables += [TrainedTensor(weakref.ref(each), name)] if name else []
        own = (each for model in models for each in model.parameters())
        for each in itertools.chain(trained, own):
            if each.grad is not None and not self._was_fed(each):
                self._fed[id(each)] = weakref.ref(each)

    def _note_lines_of(self, optimizer: torch.optim.Optimizer, frame: FrameType | None) -> None:
        name = "" if frame is None else variable(frame, optimizer)
        assigned = "" if frame is None or not name else code_that_makes(frame, name)
        made = self.line = self._history.told_of(optimizer) or assigned
        loaded = self._history.state_loaded(optimizer)
        line = "" if loaded is None else loaded.line
        if frame is not None and name and loaded is None:
            file = frame.f_code.co_filename
            line = next((line_in(file, at) for at in calls_of(file, f"{name}.load_state_dict")), "")
        if made and line:
            self.line += f", which loads its state at {line}"
        where = {str(p.device) for group in optimizer.param_groups for p in group["params"]}
        self.loaded_early = loaded if loaded and loaded.device not in where else None

    def fed(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has a gradient, or had one when an optimizer took a step."""
        return parameter.grad is not None or self._was_fed(parameter)

    def _was_fed(self, parameter: torch.Tensor) -> bool:
        found = self._fed.get(id(parameter))
        return found is not None and found() is parameter


def code_that_makes(frame: FrameType, owner: str) -> str:
    """The code that gives a variable its value, and its line; "" if there is none."""
    made = assigned_at(frame, owner)
    return "" if made is None else f"{made[0]} at {line_in(frame.f_code.co_filename, made[1])}"
