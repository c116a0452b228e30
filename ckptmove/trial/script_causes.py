"""Explain what a script left out: models never called, optimizers without state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..display.phrases import join_names
from ..live.tracing.program.source_lines import is_a
from ..live.tracing.recording.host_copies import PendingCopies
from ..runtime.environment.evidence import CUDA_VARIABLE

_MOST = 8  # models that are reported


def models_never_called(
    variables: Mapping[str, Any], called: Sequence[nn.Module], call: Callable[[str], str]
) -> Iterator[str]:
    """A line for each model among a script's variables that was not called.

    `call` gives the displayed name of a device. Parts of other models are left out.
    """
    parts = {id(part) for each in called for part in each.modules()}
    models: dict[str, nn.Module] = {}
    for name, value in variables.items():
        known = id(value) in parts or any(value is each for each in models.values())
        if is_a(value, nn.Module) and not known and not name.startswith("_"):
            models[name] = value
    inner = {id(part) for each in models.values() for part in each.modules() if part is not each}
    found = [(name, each) for name, each in models.items() if id(each) not in inner]
    for name, model in found[:_MOST]:
        tensors = chain(model.parameters(), model.buffers())
        where = list(dict.fromkeys(call(str(each.device)) for each in tensors))
        if where:
            kind = type(model).__name__
            yield f"{name} ({kind}) is on {join_names(where)}; it was never called"


def optimizers_without_state(variables: Mapping[str, Any]) -> Iterator[str]:
    """A line for each optimizer among a script's variables that has no state yet."""
    for name, value in variables.items():
        if is_a(value, torch.optim.Optimizer) and not any(value.state.values()):
            kind = type(value).__name__
            yield (
                f"{name} ({kind}) has no state: torch makes it at the first step, on the device of "
                f"each parameter; before that, there is nothing to move or to save"
            )


def unchecked(pending: PendingCopies, device: torch.device, visible: str | None) -> Iterator[str]:
    """A line for each thing in a run on a device that was not checked.

    `visible` is what `CUDA_VISIBLE_DEVICES` was before the script ran.
    """
    if pending.unjudged:
        yield (
            "not checked: whether the host waits before NumPy reads memory after the copy at "
            f"{pending.unjudged} (non_blocking=True)"
        )
    now = os.environ.get(CUDA_VARIABLE, "")
    first = now.partition(",")[0].strip()
    hides = first.isdecimal() and int(first) > (device.index or 0)
    if device.type == "cuda" and now != visible and hides:
        yield (
            f"not checked: the script sets {CUDA_VARIABLE}={now}; where there is no GPU {first}, "
            "torch then finds none, and the script runs on the CPU"
        )
