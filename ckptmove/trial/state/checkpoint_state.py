"""Read a checkpoint for a trial: state dicts, optimizers, and the device of each tensor.

Tensors are on the CPU, memory-mapped from the file. In a simulation, they are on `meta`, without
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ... import formats
from ...errors import StrPath
from ...formats.loading import object_in
from ...manifest.device import kind_of
from ...manifest.manifest import Manifest, Role, Section, TensorEntry
from ...manifest.paths import Path, spell
from ...runtime.opaque import Opaque
from ...runtime.storages import Restoring
from .loaders import devices_of


class State(NamedTuple):
    """A part of a checkpoint."""

    path: Path
    content: Mapping[Any, Any]

    @property
    def name(self) -> str:
        """Its dotted name."""
        return spell(self.path)


@dataclass
class SavedCheckpoint:
    """A checkpoint that was read."""

    manifest: Manifest
    states: Sequence[State]
    optimizers: Sequence[State]
    #: Whether its format stores the devices of tensors.
    says_devices: bool
    entries: Mapping[Path, TensorEntry] = field(repr=False, default_factory=dict)

    def label(self, path: Path) -> str | None:
        """The device that a tensor is tagged with, if known."""
        entry = self.entries.get(path)
        if entry is None or entry.role is Role.UNTAGGED or not self.says_devices:
            return None
        return entry.device

    def is_average(self, state: State) -> bool:
        """Whether a state dict holds averages of a model's weights (EMA)."""
        return self._sections.get(state.path) == {Section.EMA}

    @cached_property
    def _sections(self) -> dict[Path, set[Section]]:
        """The kinds of weights in each state dict: of a model, or averages (EMA)."""
        found: dict[Path, set[Section]] = {state.path: set() for state in self.states}
        for path, entry in self.entries.items():
            if entry.section in (Section.MODEL, Section.EMA):
                for n in range(len(path)):
                    if path[:n] in found:
                        found[path[:n]].add(entry.section)
        return found

    def is_step(self, path: Path) -> bool:
        """Whether torch keeps this tensor on the CPU, wherever its parameter is."""
        entry = self.entries.get(path)
        return entry is not None and entry.role is Role.STEP

    def usual_device(self) -> str:
        """The device that most bytes are on."""
        return next(iter(devices_of(self.manifest)), "cpu") if self.says_devices else "cpu"


def read(path: StrPath, *, values: bool = True) -> SavedCheckpoint:
    """Read a checkpoint.

    Raises:
        InputError: it can't be read.
    """
    with (
        formats.pause_collection(),
        # the caller has already checked the targets of links
        formats.open_checkpoint(path, follow_links=True) as found,
    ):
        manifest = found.manifest
        says_devices = found.carries.devices
        loaded = object_in(found, Restoring("cpu" if values else "meta"))
    states, optimizers = _found(loaded)
    entries = {entry.path: entry for entry in manifest.tensors}
    return SavedCheckpoint(manifest, states, optimizers, says_devices, entries)


def _found(root: object) -> tuple[list[State], list[State]]:
    """The state dicts and optimizers in an object, the outermost first."""
    states: list[State] = []
    optimizers: list[State] = []
    met: set[int] = set()
    todo: list[State] = []

    def later(path: Path, value: object) -> None:
        if isinstance(value, Opaque) and isinstance(value.state, Mapping):
            if {"_parameters", "_buffers", "_modules"} <= value.state.keys():
                states.append(State(path, dict(_of_module(value))))
                return
            value = value.state
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and id(value) not in met:
            met.add(id(value))
            todo.append(State(path, value))

    later((), root)
    keep: list[object] = []  # keeps objects alive, so that no `id()` is used again
    for state in todo:
        content = state.content
        keep.append(content)
        if is_optimizer(content):
            optimizers.append(state)
            continue
        if any(isinstance(v, torch.Tensor) and isinstance(k, str) for k, v in content.items()):
            states.append(state)
        for key, value in content.items():
            later((*state.path, key), value)
    return states, optimizers


def is_optimizer(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping is an optimizer's state dict."""
    groups = value.get("param_groups")
    return (
        isinstance(value.get("state"), Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) for group in groups)
    )


def _of_module(root: Opaque) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict of a module that was pickled whole, with torch's names."""
    todo: list[tuple[str, Opaque]] = [("", root)]
    met: set[int] = set()
    while todo:
        prefix, module = todo.pop()
        if id(module) in met or not isinstance(module.state, Mapping):
            continue
        met.add(id(module))
        state: Mapping[Any, Any] = module.state
        passing = state.get("_non_persistent_buffers_set") or ()
        for part in ("_parameters", "_buffers"):
            for key, value in (state.get(part) or {}).items():
                if isinstance(value, torch.Tensor) and key not in passing:
                    yield f"{prefix}{key}", value
        children = state.get("_modules") or {}
        for key, child in reversed(list(children.items())):
            if isinstance(child, Opaque):
                todo.append((f"{prefix}{key}.", child))


# -- devices ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placing:
    """The devices of a checkpoint's tensors after loading it for a device.

    If no tensor is stored on the device, `map_location` loads all tensors onto it. Otherwise each
    tensor stays on its stored device, so that tensors on other devices are found.
    """

    wanted: str
    #: Whether tensors stay on their stored devices.
    at_its_word: bool

    def is_elsewhere(self, label: str | None) -> bool:
        """Whether a tensor stays on another device."""
        return self.at_its_word and label is not None and label != self.wanted


def placing(saved: SavedCheckpoint, wanted: str) -> Placing:
    """Decide how a checkpoint is loaded for a device."""
    there = saved.says_devices and wanted in devices_of(saved.manifest)
    return Placing(wanted, there and kind_of(wanted) != "cpu")
