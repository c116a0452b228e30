"""Have torch itself load a checkpoint, and look where its tensors land."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ..findings import Finding, failed, passed, skipped

_BY_TORCH_LOAD = ("torch-zip", "torch-legacy", "torch-tar")
_MOST_NAMED = 5


def device_here(wanted: str) -> str | None:
    """The device that is meant, or None if this machine doesn't have it.

    `auto` is the first accelerator, else the CPU.
    """
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if wanted == "auto":
        return "cpu" if accelerator is None else f"{accelerator.type}:0"
    if wanted in ("cpu", "meta"):
        return wanted
    kind, _, index = wanted.partition(":")
    if accelerator is None or accelerator.type != kind:
        return None
    return wanted if int(index or 0) < torch.accelerator.device_count() else None


def reloaded(path: str, format: str, device: str) -> Finding:
    """Whether torch loads a checkpoint onto a device, and all of it lands there."""
    here = device_here(device)
    if here is None:
        return skipped("reload", f"there is no {device} on this machine")
    try:
        how, found = _load(path, format, here)
    except pickle.UnpicklingError as error:
        why = str(error).split("\n", 1)[0]
        return skipped("reload", f"torch.load(weights_only=True) refuses it: {why}")
    except Exception as error:  # whatever torch raises is the finding
        return failed("reload", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if how is None:
        return skipped("reload", f"torch has no loader for {format} that runs nothing of it")
    tensors = list(tensors_in(found))
    stray = [name for name, tensor in tensors if str(tensor.device) != str(torch.device(here))]
    if stray:
        named = ", ".join(stray[:_MOST_NAMED])
        return failed("reload", f"{len(stray):,} tensors are not on {here}", named, by=how)
    return passed(
        "reload", f"{how} put all {len(tensors):,} tensors on {here}", by=how, device=here
    )


def _load(path: str, format: str, device: str) -> tuple[str | None, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old formats, and of what they hold
        if format in _BY_TORCH_LOAD:
            mapped = format == "torch-zip"
            loaded = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
            return f"torch.load(weights_only=True{', mmap=True' if mapped else ''})", loaded
        if format == "torchscript":
            script = torch.jit.load(path, map_location=device)
            return "torch.jit.load", dict(script.state_dict())
        if format == "safetensors":
            from safetensors.torch import load_file

            return "safetensors.torch.load_file", load_file(path, device=device)
    return None, None


def tensors_in(root: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in dicts, lists, tuples and the attributes of tensors, and its name."""
    met: set[int] = set()
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, torch.Tensor):
            yield name or "(root)", value
            continue
        if id(value) in met:
            continue
        met.add(id(value))
        prefix = f"{name}." if name else ""
        if isinstance(value, dict):
            todo += [(f"{prefix}{key}", each) for key, each in reversed(value.items())]
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += [(f"{prefix}{n}", each) for n, each in enumerate(value)][::-1]
