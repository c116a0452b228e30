"""Check all arguments except the model: optimizers in any form, and other keywords."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...display.phrases import class_name
from ...errors import UsageError
from ...manifest.paths import Path
from .object_walk import has_no_tensors

_LONGEST_SAID = 40  # the most characters of a value in a message


def optimizers_at(given: Any, path: Path) -> dict[Path, torch.optim.Optimizer]:
    """Optimizers by their paths; `given` is one, several, or a mapping by name.

    Raises UsageError for other objects.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping) and {"state", "param_groups"} <= given.keys():
        hint = "pass the optimizer itself"
        raise UsageError("a state dict is not a torch.optim.Optimizer", hint=hint)
    several: dict[Path, Any]
    single = isinstance(given, (torch.Tensor, nn.Module, str, bytes, type, torch.optim.Optimizer))
    if isinstance(given, Mapping):
        several = {(*path, str(name)): each for name, each in given.items()}
    elif single or not isinstance(given, Iterable):
        several = {path: given}
    else:
        each_one = list(given)
        several = {(*path, n): each for n, each in enumerate(each_one)}
        several = {path: each_one[0]} if len(each_one) == 1 else several
    for each in several.values():
        if isinstance(each, type) or not isinstance(getattr(each, "param_groups", None), list):
            raise UsageError(
                f"{class_name(each)} is not a torch.optim.Optimizer",
                hint="pass the optimizer itself, or a list of optimizers",
            )
    return several


def are_optimizers(value: object) -> bool:
    """Whether a value is an optimizer, or a collection of optimizers only."""
    several: Sequence[object] = [value]
    if isinstance(value, (list, tuple)):
        several = value
    elif isinstance(value, dict):
        several = list(value.values())
    return bool(several) and all(isinstance(each, torch.optim.Optimizer) for each in several)


def check_others(
    others: Mapping[str, object], taken: Collection[object], parameters: Sequence[str]
) -> None:
    """Refuse keywords that name a part of the model, and objects without tensors or modules."""
    for name, value in others.items():
        if name in taken:
            raise UsageError(
                f"{name!r} is also the name of a part of the model",
                hint="use another keyword",
            )
        if has_no_tensors(value):
            close = difflib.get_close_matches(name, parameters, 1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise UsageError(
                f"{name}={_short(value)} holds neither a tensor nor a module",
                hint=f"{meant}keywords name other objects of the model: ema=averages, "
                "scaler=scaler",
            )


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= _LONGEST_SAID else f"{said[:_LONGEST_SAID]}…"
