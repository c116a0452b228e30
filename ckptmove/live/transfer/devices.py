"""Devices as users name them, and the attributes of modules that name one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import get_worker_info

from ...display.phrases import first_line
from ...errors import DeviceError
from ...manifest.device import kind_of, parse
from ...manifest.manifest import Role, Section, TensorEntry
from ...manifest.other_records import NamedDevice
from ...manifest.paths import Path, spell
from ..inventory.holdings import HeldTensor, Naming, Ownership

_LONGEST_SAID = 120  # the most characters of torch's reason


def reachable(device: Any) -> torch.device:
    """The device that a user names, with its index, like the devices of tensors.

    Raises DeviceError if the device does not exist, or if torch can't use it here.
    """
    is_number = isinstance(device, int) and not isinstance(device, bool)
    if not is_number and not isinstance(device, torch.device):
        device = _torch_device(device)
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # each kind of device raises its own type
        why = first_line(error, _LONGEST_SAID).partition(". ")[0].rstrip(".")
        hint = "run `ckptmove doctor` to see which devices work, and why"
        if get_worker_info() is not None:
            hint = "this is a worker process of a DataLoader; move the batches in the training loop"
        raise DeviceError(f"'{device}' can't be used here: {why}", hint=hint) from error


def _torch_device(device: Any) -> torch.device:
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    tag = parse(device)  # raises an error if the name is wrong
    raise DeviceError(f"this torch has no device '{tag}'", hint="import the package that adds it")


#: The usual attribute names of device strings; others may mean where to offload.
_CALLED = ("device", "_device")


@dataclass
class Renaming:
    """The changes to attributes that name a device."""

    #: The attributes that are rewritten, each with its new device.
    going: list[tuple[Naming, str]] = field(default_factory=list)
    rewritten: list[NamedDevice] = field(default_factory=list)  #: the same, in the form of reports
    rewritten_to: list[str] = field(default_factory=list)  #: the new device of each of these
    #: The attributes that `values=True` would rewrite.
    rewritable: list[NamedDevice] = field(default_factory=list)
    #: The attributes that are not rewritten, although tensors left the device.
    unchanged: list[NamedDevice] = field(default_factory=list)
    staying: list[NamedDevice] = field(default_factory=list)  #: all attributes that are not changed

    def perform(self, undoing: Callable[[Callable[[], None]], None]) -> None:
        """Rewrite the attributes; `undoing` receives functions that undo it."""
        for naming, device in self.going:
            value = device if isinstance(naming.value, str) else torch.device(device)
            undoing(_setter(naming, naming.value))
            _setter(naming, value)()


def renaming(
    namings: Iterable[Naming], pairs: Iterable[tuple[HeldTensor, TensorEntry, str]], asked: bool
) -> Renaming:
    """Decide which attributes follow: those whose module moves completely to one other device.

    `pairs` has every tensor with its entry and target; `asked` means that optional attributes
    change, too.
    """
    went: dict[Path, set[tuple[str, str]]] = {}
    for each, entry, target in pairs:
        in_module = each.section is Section.MODEL and each.held is not Ownership.GRADIENT
        if in_module and each.role is not Role.RNG_STATE:
            for n in range(len(each.path)):
                went.setdefault(each.path[:n], set()).add((entry.device, target))
    found = Renaming()
    for naming in namings:
        value, path = str(naming.value), naming.path[:-1]
        while path and path not in went:
            path = path[:-1]
        always = naming.attribute == "_device" and _is_lightning(naming.module)
        ways = {
            (old, new) for old, new in went.get(path, ()) if always or value in (old, kind_of(old))
        }
        named = NamedDevice(
            naming.path,
            spell(naming.path),
            value,
            "str" if isinstance(naming.value, str) else "torch.device",
        )
        goes = {new for _, new in ways}
        leaves = any(old != new for old, new in ways)
        follows = len(goes) == 1 and goes != {value} and (leaves or always) and _is_certain(naming)
        if follows and (asked or always):
            (device,) = goes
            found.going.append((naming, device))
            found.rewritten.append(named)
            found.rewritten_to.append(device)
            continue
        found.staying.append(named)
        if follows:
            found.rewritable.append(named)
        elif leaves:
            found.unchanged.append(named)
    return found


def _is_certain(naming: Naming) -> bool:
    """Whether an attribute certainly names the device of its module."""
    return isinstance(naming.value, torch.device) or naming.attribute in _CALLED


def _is_lightning(module: nn.Module) -> bool:
    return any(kind.__name__ == "_DeviceDtypeModuleMixin" for kind in type(module).__mro__)


def _setter(naming: Naming, value: torch.device | str) -> Callable[[], None]:
    def set_it() -> None:
        vars(naming.module)[naming.attribute] = value

    return set_it
