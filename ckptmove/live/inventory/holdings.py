"""Find every tensor that a model in memory and its optimizers hold.

These are parameters, buffers, gradients, optimizer state, and tensors in plain attributes,
containers and closures of hooks. Nothing is copied and no value is read.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ...display.phrases import class_name
from ...errors import UsageError
from ...manifest.manifest import Role, Section
from ...manifest.other_records import Alias
from ...manifest.paths import Path, spell
from ...pickles.device_tags import names_device
from ...torch_pickle.sections.sections import Rng, is_rng_state
from .arguments import are_optimizers, check_others, optimizers_at
from .object_walk import (
    ListedObjects,
    Reach,
    ReachedTensor,
    attributes,
    besides,
    hooks,
    hooks_of,
    modules_of,
    name_of,
    with_tensors,
)

Optimizers = (
    torch.optim.Optimizer
    | Iterable[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer]
    | None
)
#: The named parameters of the functions that take other objects by any keyword.
_PARAMETERS = (
    *("optimizer", "scheduler", "batch"),
    *("to", "place", "device_map", "non_blocking", "values", "dry_run"),
)


class Ownership(str, Enum):
    """How a tensor is held."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    TRANSIENT = "buffer that is not saved"
    GRADIENT = "gradient"
    UNREGISTERED = "attribute"
    HOOK = "hook"
    CLASS = "class attribute"
    STATE = "optimizer state"
    HYPERPARAMETER = "hyper-parameter"
    FOREIGN = "parameter of the optimizer only"
    OTHER = "other"
    BATCH = "batch"

    __str__ = str.__str__


#: How a module holds registered tensors, which `Module.to` moves.
REGISTERED = (Ownership.PARAMETER, Ownership.BUFFER, Ownership.TRANSIENT)


#: The name under which a compiled model holds the original model.
COMPILED = "_orig_mod"


class HeldTensor(NamedTuple):
    """A tensor under a path."""

    path: Path  #: attribute names and keys, those of modules first
    tensor: torch.Tensor
    held: Ownership
    section: Section  #: the model, an optimizer, a scheduler or others
    role: Role | None = None  #: set if torch has a special rule for its device
    #: The dotted name of the module that holds it; "" for the model itself, or without a module.
    module: str = ""
    owner: Path | None = None  #: path of the parameter whose gradient or state it is, or None
    in_module: bool = False  #: whether a module that is not registered holds it

    @property
    def name(self) -> str:
        """The dotted name of the tensor."""
        return spell(self.path)


class Naming(NamedTuple):
    """A module's attribute that names a device."""

    path: Path
    module: nn.Module
    attribute: str
    value: torch.device | str


@dataclass
class Holdings:
    """The tensors of a model and of the objects that belong to it."""

    all: list[HeldTensor] = field(default_factory=list)  #: every tensor under every path
    aliases: list[Alias] = field(default_factory=list)  #: modules that are reached by a second path
    naming: list[Naming] = field(default_factory=list)  #: attributes that name a device
    #: Parameters of an optimizer that the model does not have.
    foreign: list[HeldTensor] = field(default_factory=list)
    full: bool = False  #: whether attributes hold more than is searched
    modules: dict[Path, nn.Module] = field(default_factory=dict)  #: every module under every path
    #: Paths of the outermost modules: `()` for the model.
    roots: list[Path] = field(default_factory=list)
    optimizers: dict[Path, torch.optim.Optimizer] = field(default_factory=dict)  #: by path
    as_written: bool = False  #: whether paths leave out the names that `torch.compile` adds

    def of(self, *held: Ownership) -> list[HeldTensor]:
        """The tensors that are held in one of these ways."""
        return [each for each in self.all if each.held in held]


def holdings(
    model: nn.Module,
    optimizer: Optimizers = None,
    scheduler: object = None,
    batch: object = None,
    others: Mapping[str, object] | None = None,
    *,
    parameters: Sequence[str] = _PARAMETERS,
    as_written: bool = False,
) -> Holdings:
    """Find everything that a model, and the objects that belong to it, hold.

    With `as_written`, paths leave out the names that `torch.compile` adds.
    Raises UsageError if an argument is of the wrong kind, or holds nothing that can be on a device.
    """
    if not isinstance(model, nn.Module):
        is_file = isinstance(model, (str, os.PathLike))
        hint = "for files, use ckptmove.inspect" if is_file else "pass the model itself"
        raise UsageError(f"{class_name(model)} is not a torch.nn.Module", hint=hint)
    others = {name: each for name, each in (others or {}).items() if each is not None}
    models = {name: each for name, each in others.items() if isinstance(each, nn.Module)}
    found = Holdings(optimizers=optimizers_at(optimizer, ("optimizer",)), as_written=as_written)
    for name in [name for name, each in others.items() if are_optimizers(each)]:
        found.optimizers.update(optimizers_at(others.pop(name), (name,)))
    known = ListedObjects([model, *models.values()], found.optimizers.values())
    _of_model(model, (), known, found)
    taken = {each.path[0] for each in found.all}.union(model._modules.keys())
    check_others(others, taken, parameters)
    own = len(found.all)
    for name, module in models.items():
        _of_model(module, (name,), known, found)
    found.all, rest = found.all[:own], found.all[own:]
    names = _names([*found.all, *rest])
    for name, value in others.items():
        if name not in models:
            scheduling = isinstance(value, torch.optim.lr_scheduler.LRScheduler)
            section = Section.SCHEDULER if scheduling else Section.OTHER
            rest += _of_object(value, name, section, names, known)
    names = _names([*found.all, *rest])
    for path, each in found.optimizers.items():
        _of_optimizer(each, path, names, known, found)
    if scheduler is not None:
        found.all += _of_object(scheduler, "scheduler", Section.SCHEDULER, names, known)
    found.all += rest
    reach = Reach()
    for at in reach.tensors_in(batch, ("batch",)):
        found.all.append(HeldTensor(at.path, at.tensor, Ownership.BATCH, Section.OTHER, at.role))
    found.full = found.full or reach.full
    return found


def _names(held: Iterable[HeldTensor]) -> dict[int, Path]:
    """The path of each tensor, by `id()`, that names it in an optimizer's state."""
    several: tuple[dict[int, Path], ...] = ({}, {}, {})
    for each in held:
        if each.held is not Ownership.GRADIENT:
            of_model = each.section is Section.MODEL
            rank = 0 if each.held is Ownership.PARAMETER else 1 if of_model else 2
            several[rank].setdefault(id(each.tensor), each.path)
    first, second, third = several
    return {**third, **second, **first}


def original_model(model: nn.Module) -> nn.Module:
    """The original model, if this one is a result of `torch.compile`; else the model itself."""
    found = dict(model._modules.items()).get(COMPILED)  # a script module has no plain dict there
    return model if found is None else found


# -- optimizers ------------------------------------------------------------------------------------


def optimizers_of(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """One or several optimizers as a list; raises UsageError for other objects."""
    return list(optimizers_at(optimizer, ()).values())


def has_optimizer(model: nn.Module) -> bool:
    """Whether an optimizer anywhere in this process trains parameters of a model."""
    own = {id(each) for each in model.parameters()}
    return any(
        id(parameter) in own
        for each in gc.get_objects()
        if issubclass(type(each), torch.optim.Optimizer)
        for group in vars(each).get("param_groups", ())
        for parameter in group["params"]
    )


# -- the model -------------------------------------------------------------------------------------


def _of_model(model: nn.Module, start: Path, known: ListedObjects, found: Holdings) -> None:
    modules = list(modules_of(model, start))
    if found.as_written:
        modules = [(tuple(k for k in path if k != COMPILED), each) for path, each in modules]
    reach = Reach(known.objects)
    met: dict[int, Path] = {}
    holding: set[int] | None = None
    found.roots.append(start)
    for path, module in modules:
        found.modules[path] = module
        _of_module(module, path, found)
        first = met.setdefault(id(module), path)
        if first is not path and _is_again(path, met, found):
            holding = with_tensors(modules) if holding is None else holding
            if id(module) in holding:
                found.aliases.append(Alias(spell(path), spell(first)))
    shared: set[tuple[type, str]] = set()
    for path, module in modules:  # after registered tensors, whose views these may be
        if met[id(module)] is path:
            _hidden(module, path, reach, known.registered, found)
            _shared(module, path, reach, shared, found)
    found.full = found.full or reach.full


def _is_again(path: Path, met: Mapping[int, Path], found: Holdings) -> bool:
    """Whether a module is reached again by itself, not only because its parent is."""
    above = found.modules.get(path[:-1])
    return above is None or met[id(above)] == path[:-1]


def _of_module(module: nn.Module, path: Path, found: Holdings) -> None:
    place = spell(path) if path else ""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        own = (*path, name)
        found.all.append(
            HeldTensor(own, parameter, Ownership.PARAMETER, Section.MODEL, module=place)
        )
        found.all += _gradient(own, parameter, place)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            saved = name not in module._non_persistent_buffers_set
            held = Ownership.BUFFER if saved else Ownership.TRANSIENT
            found.all.append(HeldTensor((*path, name), buffer, held, Section.MODEL, module=place))


def _gradient(path: Path, tensor: torch.Tensor, place: str) -> list[HeldTensor]:
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is None:
        return []
    own = (*path, "grad")
    return [HeldTensor(own, gradient, Ownership.GRADIENT, Section.MODEL, None, place, path)]


def _hidden(
    module: nn.Module, path: Path, reach: Reach, registered: Set[int], found: Holdings
) -> None:
    """Find tensors that are not in the state dict, and that `Module.to` does not move."""
    place = spell(path) if path else ""

    def add(value: object, at: Path, held: Ownership) -> None:
        for each in reach.tensors_in(value, at):
            if id(each.tensor) not in registered:
                found.all += _unregistered(each, held, place)

    for name, value in attributes(module):
        kind = type(value)  # not isinstance, which asks the value for its __class__
        if issubclass(kind, torch.device) or (
            issubclass(kind, str) and names_device(cast("str", value))
        ):
            named = cast("torch.device | str", value)
            found.naming.append(Naming((*path, name), module, name, named))
        else:
            add(value, (*path, name), Ownership.UNREGISTERED)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            if own := besides(tensor):
                add(own, (*path, name), Ownership.UNREGISTERED)
            for key, hook in hooks_of(tensor):
                add(hook, (*path, name, key), Ownership.HOOK)
    for hook in hooks(module):
        add(hook, (*path, f"hook {name_of(hook)}"), Ownership.HOOK)


def _shared(
    module: nn.Module, path: Path, reach: Reach, met: set[tuple[type, str]], found: Holdings
) -> None:
    """Find tensors in attributes of a class, which all its modules share."""
    place = spell(path) if path else ""
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        for name, value in list(vars(kind).items()):
            holds = issubclass(type(value), (torch.Tensor, list, tuple, dict))
            if not holds or (kind, name) in met or name in vars(module):
                continue
            met.add((kind, name))
            for each in reach.tensors_in(value, (*path, name)):
                found.all += _unregistered(each, Ownership.CLASS, place)


def _unregistered(each: ReachedTensor, held: Ownership, place: str) -> list[HeldTensor]:
    role = Role.RNG_STATE if _is_rng_state(each.tensor, each.path) else each.role
    own = HeldTensor(
        each.path, each.tensor, held, Section.MODEL, role, place, in_module=each.in_module
    )
    return [own, *_gradient(each.path, each.tensor, place)]


def _is_rng_state(tensor: torch.Tensor, path: Path) -> bool:
    if tensor.dtype is not torch.uint8 or tensor.is_nested:  # some nested tensors have no shape
        return False
    return is_rng_state(tuple(tensor.shape), path[-1], Rng.UNKNOWN)


# -- tensors of optimizers -------------------------------------------------------------------------


def _of_optimizer(
    optimizer: torch.optim.Optimizer,
    path: Path,
    names: Mapping[int, Path],
    known: ListedObjects,
    found: Holdings,
) -> None:
    reach = Reach(known.objects)
    groups: dict[int, Mapping[str, Any]] = {}
    owners = dict(names)
    for n, group in enumerate(optimizer.param_groups):
        where = (*path, "param_groups", n)
        for k, parameter in enumerate(group["params"]):
            groups[id(parameter)] = group
            if id(parameter) in owners:
                continue
            own = (*where, "params", k)
            owners[id(parameter)] = own
            foreign = HeldTensor(own, parameter, Ownership.FOREIGN, Section.OPTIMIZER)
            found.foreign.append(foreign)
            found.all += [foreign, *_gradient(own, parameter, "")]
        rest = {key: value for key, value in group.items() if key != "params"}
        for inner, tensor in reach.within(rest, where):
            first = owners.get(id(group["params"][0])) if group["params"] else None
            held, role = Ownership.HYPERPARAMETER, Role.HYPERPARAMETER
            found.all.append(HeldTensor(inner, tensor, held, Section.OPTIMIZER, role, "", first))
    for key, slots in optimizer.state.items():
        owner = owners.get(id(key)) if isinstance(key, torch.Tensor) else None
        named = (spell(owner),) if owner is not None else (_key(key),)
        for inner, tensor in _in_state(slots, (*path, "state", *named), reach):
            slot = str(inner[len(path) + 2]) if len(inner) > len(path) + 2 else ""
            on_cpu = owner is not None and stays_on_cpu(optimizer, groups.get(id(key), {}), slot)
            step = Role.STEP if on_cpu else None
            state = HeldTensor(inner, tensor, Ownership.STATE, Section.OPTIMIZER, step, "", owner)
            found.all.append(state)
    for name, hook in hooks_of(optimizer):
        for inner, tensor in reach.within(hook, (*path, name)):
            if id(tensor) not in owners:
                found.all.append(HeldTensor(inner, tensor, Ownership.HOOK, Section.OPTIMIZER))
    found.full = found.full or reach.full


def _in_state(slots: object, path: Path, reach: Reach) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors that an optimizer keeps for a parameter."""
    if type(slots) is not dict:
        yield from reach.within(slots, path)
        return
    for slot, each in slots.items():
        if type(each) is torch.Tensor and not vars(each):
            yield (*path, slot), each
        else:
            yield from reach.within(each, (*path, slot))


def _key(key: object) -> str:
    return key if isinstance(key, str) else "a tensor that is no parameter"


def stays_on_cpu(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], slot: str) -> bool:
    """Whether torch keeps a tensor of the state on the CPU, on whatever device its parameter is.

    Source: torch/optim/optimizer.py, `_get_scalar_dtype`; and each optimizer's `_init_group`.
    """
    kind = type(optimizer).__name__
    if kind == "ASGD":
        return False
    if slot == "mu_product":
        return not group.get("capturable")
    flags = ("fused",) if kind == "Adagrad" else ("capturable", "fused")
    return slot == "step" and not any(group.get(flag) for flag in flags)


def _of_object(
    value: object, name: str, section: Section, names: Mapping[int, Path], known: ListedObjects
) -> list[HeldTensor]:
    """The tensors in the attributes of any other object, except parameters."""
    kinds = (Mapping, list, tuple, set, torch.Tensor)
    inside = value if isinstance(value, kinds) else getattr(value, "__dict__", value)
    role = Role.HYPERPARAMETER if section is Section.SCHEDULER else None
    return [
        HeldTensor(each.path, each.tensor, Ownership.OTHER, section, role or each.role)
        for each in Reach(known.objects).tensors_in(inside, (name,))
        if id(each.tensor) not in names
    ]
