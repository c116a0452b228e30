"""The stage of a trial on a real device; `stage_fake` simulates one."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..reports.display.phrases import text_of
from .model.factory import Built
from .model.inputs import Batch
from .state.checkpoint_state import Placing, Saved, State
from .state.state_dict_fit import Fit, loaded_into

_MISMATCH = re.compile(r"same device|different devices|FakeTensor Device Propagation")


def is_mismatch(error: BaseException) -> bool:
    """Whether an operation was given tensors of several devices."""
    return _MISMATCH.search(text_of(error)) is not None


class Stage:
    """A device, and how a model, its optimizer and a batch get there.

    Attributes:
        name: the device, as the user calls it.
        device: the device that tensors are on.
        values: whether tensors have values.
    """

    values = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device(name)

    def entered(self) -> AbstractContextManager[Any]:
        """A context that is active during the trial."""
        return nullcontext()

    def build(self, make: Callable[[], Built], nbytes: int) -> Built:
        """The model, on the CPU, of a checkpoint of so many bytes."""
        return make()

    def load(self, module: torch.nn.Module, fit: Fit) -> None:
        """Have the model load its state, as torch does.

        Raises:
            RuntimeError: it won't.
        """
        loaded_into(module, fit)

    def moved(self, module: torch.nn.Module, away: Container[str] = ()) -> None:
        """Bring a model to the device, as `Module.to` does, but not what is said to be `away`."""
        module.to(self.device)

    def optimizer_state(self, state: State, saved: Saved, to: Placing) -> Mapping[Any, Any]:
        """The state of an optimizer, with each tensor where loading it would leave it.

        torch moves all but `step` to the parameters when it loads them.
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
        """One hyper-parameter of an optimizer, which stays where it is."""
        return value.clone() if isinstance(value, torch.Tensor) else value

    def slot(self, value: Any, label: str | None, slot: str) -> Any:
        """One value of an optimizer's state."""
        if not isinstance(value, torch.Tensor):
            return value
        on_host = label in (None, "cpu")
        return value.clone() if on_host else value.to(self.device, copy=True)

    def batch(self, batch: Batch) -> Batch:
        """The batch on the device."""
        return batch.to(self.device)

    def excuse(self, error: BaseException) -> str | None:
        """Why an exception says nothing of the model; None if it does."""
        return None

    def call(self, text: str) -> str:
        """A text that may speak of the device."""
        return text
