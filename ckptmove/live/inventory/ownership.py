"""Check that model and optimizer, and state and parameters, belong together. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...device import kind_of
from ...manifest.manifest import Role
from ...manifest.paths import Path
from .holdings import Holdings, Ownership
from .unregistered import Unregistered, unregistered


class Misplaced(NamedTuple):
    """A gradient, or a tensor of an optimizer's state, that is not where it belongs."""

    name: str  #: of the tensor
    held: Ownership  #: which of them
    device: str  #: where it is, and where it belongs
    wanted: str
    role: Role | None = None  #: the optimizer's step, which belongs on the CPU; or None


Shaped = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class OwnershipReport:
    """What belongs together, and doesn't."""

    #: Parameters of optimizers that are not the model's, with their shapes.
    foreign: Sequence[Shaped] = ()
    #: Trainable parameters of the model that no optimizer has, if there is any.
    untrained: Sequence[Shaped] = ()
    misplaced: Sequence[Misplaced] = ()  #: state and gradients that are not where they belong
    unregistered: Sequence[Unregistered] = ()  #: tensors that stay behind when the model moves
    kind: str = "AdamW"  #: the class of the first optimizer
    shared: bool = False  #: whether some of the model's parameters are trained


def belonging(
    found: Holdings,
    *,
    fed: Callable[[torch.Tensor], bool] | None = None,
    call: Callable[[str], str] = str,
) -> OwnershipReport:
    """How what was found belongs together.

    Given `fed` (whether a parameter has, or had, a gradient), parameters count as foreign or
    untrained only where that shows that they should not be. `call` gives what to call a device.
    """
    foreign = [(each.name, each.tensor) for each in found.foreign]
    untrained = _untrained(found)
    if fed is not None:
        foreign = [(name, each) for name, each in foreign if not fed(each)]
        own = [each.tensor for each in found.of(Ownership.PARAMETER)]
        if any(map(fed, own)):
            untrained = [(name, each) for name, each in untrained if fed(each)]
        elif len(untrained) < len({id(each) for each in own if each.requires_grad}):
            untrained = []  # some are trained, so the others may be left alone on purpose
    wrong = [
        each._replace(device=call(each.device), wanted=call(each.wanted))
        for each in misplaced(found)
    ]
    kind = next((type(each).__name__ for each in found.optimizers.values()), "AdamW")
    hidden = list(unregistered(found))
    own_ones = {
        id(each.tensor) for each in found.of(Ownership.PARAMETER) if each.tensor.requires_grad
    }
    shared = len({id(each) for _, each in _untrained(found)}) < len(own_ones)
    return OwnershipReport(_shaped(foreign), _shaped(untrained), wrong, hidden, kind, shared)


def _shaped(named: Iterable[tuple[str, torch.Tensor]]) -> list[Shaped]:
    return [(name, tuple(each.shape)) for name, each in named]


def _untrained(found: Holdings) -> list[tuple[str, torch.Tensor]]:
    if not any(each.param_groups for each in found.optimizers.values()):
        return []
    trained = {
        id(parameter)
        for each in found.optimizers.values()
        for group in each.param_groups
        for parameter in group["params"]
    }
    others = {root[:1] for root in found.roots if root}
    left: dict[int, tuple[str, torch.Tensor]] = {}
    for each in found.of(Ownership.PARAMETER):
        wanted = each.tensor.requires_grad and each.path[:1] not in others
        if wanted and id(each.tensor) not in trained:
            left.setdefault(id(each.tensor), (each.name, each.tensor))
    return list(left.values())


def misplaced(found: Holdings) -> list[Misplaced]:
    """Gradients and state that are not where they belong: with their parameter, or on the CPU.

    A number on the CPU may serve parameters anywhere, unless the optimizer wants it with them.
    """
    owners: dict[Path, torch.Tensor] = {
        each.path: each.tensor
        for each in found.all
        if each.held not in (Ownership.STATE, Ownership.GRADIENT, Ownership.HYPERPARAMETER)
    }
    strict = {
        (path, id(parameter))
        for path, each in found.optimizers.items()
        for group in each.param_groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }
    wrong = []
    for each in found.of(Ownership.STATE, Ownership.GRADIENT):
        owner = owners.get(each.owner) if each.owner is not None else None
        if owner is None or owner.device.type == "meta":
            continue
        if each.role is None and each.tensor.device == owner.device:
            continue
        is_number = not each.tensor.dim() and each.tensor.device.type == "cpu"
        if is_number and not any((each.path[:n], id(owner)) in strict for n in (1, 2)):
            continue
        home = owner.device
        wanted = "cpu" if each.role is Role.STEP else str(home)
        here = str(each.tensor.device)
        if _indexed(here) != _indexed(wanted):
            wrong.append(Misplaced(each.name, each.held, here, wanted, each.role))
    return wrong


def _indexed(device: str) -> str:
    return device if ":" in device or kind_of(device) in ("cpu", "meta", "mps") else f"{device}:0"
