"""Made-up values of simulated tensors: every number is 1, and conditions follow from that."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ...live.tracing.source_lines import user_line

#: How often a line gets an answer before it gets another, since a loop may wait for that.
_PATIENT, _IMPATIENT = 256, 3


def _first(value: Any, *rest: Any) -> Any:
    return value


#: What operations make of values, by name.
_MEANING: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"{kind}_and": lambda a, b: bool(a and b) for kind in ("logical", "bitwise")},
    **{f"{kind}_or": lambda a, b: bool(a or b) for kind in ("logical", "bitwise")},
    **{f"{kind}_xor": lambda a, b: bool(a) != bool(b) for kind in ("logical", "bitwise")},
    **{f"{kind}_not": lambda a: not a for kind in ("logical", "bitwise")},
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf"), lambda a: False),
    "isfinite": lambda a: True,
    "mul": lambda a, b: bool(a and b),
    **dict.fromkeys(
        (
            *("all", "any", "alias", "amax", "amin", "clone", "detach", "expand", "index", "max"),
            *("min", "permute", "select", "slice", "squeeze", "unsqueeze", "view", "_to_copy"),
            *("_unsafe_view", "flatten", "reshape", "t", "transpose"),
        ),
        _first,
    ),
}


class Guesses:
    """Answers for the values of tensors that have none.

    Attributes:
        made_up: how many values were.
        where: the line that asked for the first.
    """

    def __init__(self) -> None:
        self.made_up = 0
        self.where = ""
        self._known = WeakTensorKeyDictionary()
        self._asked: dict[str, tuple[Any, int]] = {}

    def note(self, func: Any, args: Any, out: Any) -> None:
        """Remember what the outcome of an operation would be, if it is a condition."""
        if not isinstance(out, FakeTensor) or out.dtype is not torch.bool:
            return
        meaning = _MEANING.get(func._schema.name.rpartition("::")[2].removesuffix("_"))
        self._known.pop(out, None)
        if meaning is None:
            return
        operands = [self._of(each) for each in args if isinstance(each, (torch.Tensor, int, float))]
        if meaning is _first:
            operands = operands[:1]
        if operands and None not in operands:
            try:
                self._known[out] = bool(meaning(*operands))
            except TypeError:  # this form of it takes something else
                return

    def _of(self, value: Any) -> Any:
        """A value as it is known or guessed; None for a condition of which nothing is known."""
        if not isinstance(value, torch.Tensor):
            return value
        known = value.constant if isinstance(value, FakeTensor) else value
        if known is not None and known.numel() == 1:
            with _disable_current_modes():
                return known.item()
        return self._known.get(value) if value.dtype is torch.bool else 1

    def answer(self, tensor: torch.Tensor) -> Any:
        """A number that is asked for; another one if it is asked for again and again."""
        where = user_line(sys._getframe(1)) or "?"
        self.tell(where)
        known = self._of(tensor)
        found = bool(known) if tensor.dtype is torch.bool else 1
        before, times = self._asked.get(where, (found, 0))
        patience = _IMPATIENT if known is None else _PATIENT
        if before == found and times >= patience:
            self._asked.pop(where)
            found = not found
        else:
            self._asked[where] = found, times + 1
        if tensor.dtype is torch.bool:
            return bool(found)
        return float(found) if tensor.dtype.is_floating_point else int(found)

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """All values of a tensor, on the CPU."""
        self.tell(user_line(sys._getframe(1)))
        value = bool(self._known.get(tensor)) if tensor.dtype is torch.bool else 1
        with _disable_current_modes():
            return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")

    def tell(self, where: str) -> None:
        """Take note that values were made up for a line."""
        self.where = self.where or where
        self.made_up += 1
