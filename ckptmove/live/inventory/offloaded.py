"""Find the weights that accelerate keeps outside of the model until a module runs.

In the model, such a tensor is on `meta`; a hook of accelerate knows where its data is. The hook is
recognized by its attributes, because accelerate may not be installed. Source: accelerate/hooks.py,
`AlignDevicesHook` and `SequentialHook`; accelerate/utils/offload.py, `PrefixedDataset` and
`OffloadedWeightsLoader`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...manifest.paths import Path, spell

CPU, DISK = "cpu (offloaded)", "disk (offloaded)"


class OffloadedData(NamedTuple):
    """Where the data of a tensor on `meta` is."""

    device: str  #: `cpu (offloaded)` or `disk (offloaded)`
    tensor: torch.Tensor | None = None  #: the tensor with the data, if it is in memory
    place: tuple[str, ...] = ()  #: its file or folder, and its name, on disk


class Offloads:
    """The hooks of a model's modules, and the weights that they hold."""

    def __init__(self, modules: Mapping[Path, nn.Module]) -> None:
        self._maps: dict[Path, Mapping[str, Any]] = {}
        self._devices: dict[Path, object] = {}
        for path, module in modules.items():
            for hook in _hooks(module):
                device = getattr(hook, "execution_device", None)
                if device is not None:
                    self._devices[path] = device
                weights = getattr(hook, "weights_map", None)
                if getattr(hook, "offload", False) and isinstance(weights, Mapping):
                    self._maps[path] = weights

    def of(self, path: Path) -> OffloadedData | None:
        """Where the data of a tensor on `meta` is, or None if unknown."""
        for n in range(len(path) - 1, -1, -1) if self._maps else ():
            weights = self._maps.get(path[:n])
            found = None if weights is None else _looked_up(weights, spell(path[n:]))
            if found is not None:
                return found
        return None

    def runs_on(self, path: Path) -> str | None:
        """The device to which a hook moves the inputs of a module; None without such a hook."""
        for n in range(len(path), -1, -1) if self._devices else ():
            device = self._devices.get(path[:n])
            if device is not None:
                number = isinstance(device, int)
                return f"cuda:{device}" if number else str(device)
        return None


def _hooks(module: nn.Module) -> Iterator[object]:
    todo = [vars(module).get("_hf_hook")]
    while todo:
        hook = todo.pop()
        several = getattr(hook, "hooks", None)
        if isinstance(several, (list, tuple)):
            todo += reversed(several)
        elif hook is not None:
            yield hook


def _looked_up(weights: Any, name: str) -> OffloadedData | None:
    """The entry in a hook's map of weights, or None; nothing is read from disk."""
    while hasattr(weights, "dataset") and hasattr(weights, "prefix"):
        weights, name = weights.dataset, f"{weights.prefix}{name}"
    index = getattr(weights, "index", None)
    loaded = getattr(weights, "state_dict", None) if isinstance(index, Mapping) else weights
    found = loaded.get(name) if isinstance(loaded, Mapping) else None
    if isinstance(found, torch.Tensor):
        return OffloadedData(CPU, found)
    if isinstance(index, Mapping) and name in index:
        file = index[name].get("safetensors_file")
        if file is not None:
            return OffloadedData(DISK, place=(str(file), str(index[name].get("weight_name", name))))
        return OffloadedData(DISK, place=(str(getattr(weights, "save_folder", "")), name))
    return None
