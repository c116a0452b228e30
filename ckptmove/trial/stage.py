"""The stage of a trial on a real device; `stage_fake` simulates one."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..display.phrases import text_of
from .model.factory import BuiltModel
from .model.inputs import CallArguments
from .state import checkpoint_state
from .state.checkpoint_state import Placing, SavedCheckpoint, State
from .state.state_dict_fit import Fit, loaded_into

_MISMATCH = re.compile(r"same device|different devices|FakeTensor Device Propagation")


def is_mismatch(error: BaseException) -> bool:
    """Whether an exception says that an operation got tensors on several devices."""
    return _MISMATCH.search(text_of(error)) is not None


class Stage:
    """A device, and the ways to move a model, its optimizer and a batch there.

    Attributes:
        name: the device as the user names it.
        device: the device of the tensors.
        values: whether tensors have values.
    """

    values = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device(name)

    def context(self) -> AbstractContextManager[Any]:
        """A context that is active during the trial."""
        return nullcontext()

    def read(self, path: str) -> SavedCheckpoint:
        """Read a checkpoint.

        Raises:
            InputError: it can't be read.
        """
        return checkpoint_state.read(path)

    def build(self, make: Callable[[], BuiltModel], nbytes: int) -> BuiltModel:
        """Build the model on the CPU; its checkpoint has `nbytes` bytes."""
        return make()

    def load(self, module: torch.nn.Module, fit: Fit) -> None:
        """Load the state into the model, as torch does.

        Raises:
            RuntimeError: the model refuses the state.
        """
        loaded_into(module, fit)

    def move(self, module: torch.nn.Module, away: Container[str] = ()) -> None:
        """Move a model to the device, like `Module.to`. A simulation leaves the keys in `away`."""
        module.to(self.device)

    def optimizer_state(
        self, state: State, saved: SavedCheckpoint, to: Placing
    ) -> Mapping[Any, Any]:
        """The state of an optimizer, each tensor on the device where loading would leave it.

        On loading, torch moves all tensors except `step` to the devices of the parameters.
        """
        content: dict[Any, Any] = {}
        for key, slots in state.content["state"].items():
            if not isinstance(slots, Mapping):
                content[key] = slots
                continue
            content[key] = {
                slot: self.slot(value, saved.label((*state.path, "state", key, slot)), slot)
                for slot, value in slots.items()
            }
        groups = [
            {key: self.hyper(value) if key != "params" else value for key, value in group.items()}
            for group in state.content["param_groups"]
        ]
        return {**state.content, "state": content, "param_groups": groups}

    def hyper(self, value: Any) -> Any:
        """A copy of a hyper-parameter of an optimizer; a tensor stays on its device."""
        return value.clone() if isinstance(value, torch.Tensor) else value

    def slot(self, value: Any, label: str | None, slot: str) -> Any:
        """A copy of one value of an optimizer's state, on the device where it belongs."""
        if not isinstance(value, torch.Tensor):
            return value
        on_host = label in (None, "cpu")
        return value.clone() if on_host else value.to(self.device, copy=True)

    def batch(self, batch: CallArguments) -> CallArguments:
        """The batch on the device."""
        return batch.to(self.device)

    def excuse(self, error: BaseException) -> str | None:
        """Why the simulation caused an exception; None if the model or the user's code did."""
        return None

    def call(self, text: str) -> str:
        """A text in which the device has the name that the user knows."""
        return text
