"""Check that model, optimizer and state belong together, and that modules register tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ...manifest.device import kind_of
from ...manifest.manifest import Role, Section
from ...manifest.paths import Path, spell
from ..tracing.program.source_lines import is_library, line_in
from ..tracing.program.syntax import line_of_attribute
from .holdings import HeldTensor, Holdings, Ownership
from .object_walk import hooks

_IN_HOOK = "let the hook read it from a buffer of the module"


class UnregisteredTensor(NamedTuple):
    """A tensor that `Module.to` and the state dict don't know."""

    name: str  #: of the tensor
    advice: str  #: the code to write instead
    kind: type  #: the class of the module that holds it
    attribute: str  #: the attribute of the module that holds it
    held: Ownership = Ownership.UNREGISTERED  #: how it is held
    untrained: bool = False  #: whether it gets a gradient, but no optimizer has it

    @property
    def line(self) -> str:
        """The line of the user's own class that sets the attribute; "" if there is none."""
        return line_of_attribute(self.kind, self.attribute)


def unregistered_tensors(found: Holdings) -> Iterator[UnregisteredTensor]:
    """Tensors that a model should register; without those that libraries set in each forward."""
    flat = {
        each.tensor.untyped_storage()._cdata
        for each in found.of(Ownership.PARAMETER)
        if getattr(each.tensor, "_is_flat_param", False)  # FSDP makes views of it
    }
    trained = {
        id(parameter)
        for each in found.optimizers.values()
        for group in each.param_groups
        for parameter in group["params"]
    }
    for each in found.of(Ownership.UNREGISTERED, Ownership.HOOK, Ownership.CLASS):
        if each.section is Section.OPTIMIZER:
            yield from _of_optimizer(each, found)
            continue
        plain = type(each.tensor) in (torch.Tensor, nn.Parameter)
        if flat and plain and each.tensor.untyped_storage()._cdata in flat:
            continue
        at = _module_at(each, found.modules)
        module = found.modules.get(at)
        if each.role is Role.RNG_STATE or module is None or _moves_itself(module):
            continue
        if is_copied_parameter(each.tensor):
            continue  # it is not moved, and is reported as a copy
        attribute = str(each.path[len(at)])
        advice = _advice(each, module, attribute)
        if advice is not None:
            learns = isinstance(each.tensor, nn.Parameter) and each.tensor.grad is not None
            held = vars(module).get(attribute, ())
            # A list with one module hides it on purpose. Code of other classes is not run.
            alone = type(held) in (list, tuple) and len(held) == 1
            missed = bool(trained) and learns and not alone and id(each.tensor) not in trained
            yield UnregisteredTensor(each.name, advice, type(module), attribute, each.held, missed)


def is_copied_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a copy of a trainable leaf, such as `nn.Parameter(...).to(device)`."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return hasattr(node.next_functions[0][0], "variable")


def _of_optimizer(each: HeldTensor, found: Holdings) -> Iterator[UnregisteredTensor]:
    for path, optimizer in found.optimizers.items():
        if each.path[: len(path)] == path:
            yield UnregisteredTensor(each.name, _IN_HOOK, type(optimizer), "", each.held)
            return


def _module_at(holding: HeldTensor, modules: Mapping[Path, nn.Module]) -> Path:
    """The path of the module that holds a tensor."""
    path = holding.path
    if not holding.module:
        return ()
    depths = range(len(path) - 1, 0, -1)
    named = (path[:n] for n in depths if path[:n] in modules)
    return next((each for each in named if spell(each) == holding.module), ())


def _moves_itself(module: nn.Module) -> bool:
    """Whether the class of a module overrides how it moves, like metrics."""
    apply = type(module)._apply
    return apply is not nn.Module._apply and not apply.__module__.startswith("torch.nn.modules.")


def _advice(holding: HeldTensor, module: nn.Module, attribute: str) -> str | None:
    """The code to write instead; None if a hook or each forward makes the tensor again."""
    if holding.held is Ownership.HOOK:
        return _IN_HOOK
    if holding.held is Ownership.CLASS:
        return f'self.register_buffer("{attribute}", …, persistent=False) in each of them'
    value = vars(module).get(attribute)
    if value is None:  # it is an attribute of a parameter
        owner = {**module._parameters, **module._buffers}.get(attribute)
        plain = type(owner) in (torch.Tensor, nn.Parameter)
        return "set it again after the model is moved" if plain else None
    kind = type(value)  # not isinstance, which asks the value for its __class__
    if issubclass(kind, torch.Tensor):
        if _is_set_by_hook(module, attribute):
            return None
        if value.grad_fn is not None:
            return "compute it in forward, from parameters that move with the model"
        if isinstance(value, nn.Parameter):
            return f'self.register_parameter("{attribute}", …)'
        if value.requires_grad:
            return f"self.{attribute} = nn.Parameter(…)"
        return f'self.register_buffer("{attribute}", …, persistent=False)'
    if issubclass(kind, functools.partial):
        return f"where the partial of self.{attribute} is made, give it what is on the device"
    of = "Dict" if issubclass(kind, dict) else "List"
    if issubclass(kind, nn.Module):
        return f'self.add_module("{attribute}", …)'
    contains = issubclass(kind, (dict, list, tuple, set))
    if holding.in_module:
        return f"make self.{attribute} an nn.Module{of}" if contains else "make it a submodule"
    trained = holding.tensor.requires_grad and holding.tensor.is_leaf
    if contains and (trained or isinstance(holding.tensor, nn.Parameter)):
        return f"make self.{attribute} an nn.Parameter{of}"
    return "register each as a buffer: self.register_buffer(name, …, persistent=False)"


def _is_set_by_hook(module: nn.Module, attribute: str) -> bool:
    """Whether a hook, such as that of weight_norm or pruning, sets an attribute at each run."""
    return any(
        attribute in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))
        for hook in hooks(module)
    )


class MisplacedTensor(NamedTuple):
    """A gradient, or a tensor of an optimizer's state, that is on the wrong device."""

    name: str  #: of the tensor
    held: Ownership  #: a gradient, or state
    device: str  #: its device; `wanted` is the right one
    wanted: str
    role: Role | None = None  #: the optimizer's step, which belongs on the CPU; or None


Shaped = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class OwnershipReport:
    """Which tensors do not belong together, or are on the wrong device."""

    #: Parameters of optimizers that the model does not have, with their shapes.
    foreign: Sequence[Shaped] = ()
    #: Trainable parameters of the model that no optimizer has; empty without an optimizer.
    untrained: Sequence[Shaped] = ()
    misplaced: Sequence[MisplacedTensor] = ()  #: state and gradients on the wrong device
    unregistered: Sequence[UnregisteredTensor] = ()  #: tensors that model.to does not move
    kind: str = "AdamW"  #: the class of the first optimizer
    #: Attributes that are copies of parameters, each with the line that made it, or "".
    copied: Sequence[tuple[str, str]] = ()
    shared: bool = False  #: whether some of the model's parameters are trained
    #: Modules whose class has its own code to move them: the path, and the method with its line.
    own_moves: Sequence[tuple[str, str]] = ()


def belonging(
    found: Holdings,
    *,
    fed: Callable[[torch.Tensor], bool] | None = None,
    call: Callable[[str], str] = str,
    line: Callable[[int], str] = lambda number: "",
) -> OwnershipReport:
    """Which tensors are foreign, untrained, misplaced or unregistered.

    `fed` tells whether a parameter has, or had, a gradient; with it, parameters count as foreign or
    untrained only if gradients show an error. `call` returns the displayed name of a device, `line`
    the line that made an autograd node, from its number.
    """
    foreign = [(each.name, each.tensor) for each in found.foreign]
    untrained = _untrained(found)
    if fed is not None:
        foreign = [(name, each) for name, each in foreign if not fed(each)]
        own = [each.tensor for each in found.of(Ownership.PARAMETER)]
        if any(map(fed, own)):
            untrained = [(name, each) for name, each in untrained if fed(each)]
        elif len(untrained) < len({id(each) for each in own if each.requires_grad}):
            untrained = []  # some are trained; perhaps the others are frozen on purpose
    wrong = [
        each._replace(device=call(each.device), wanted=call(each.wanted))
        for each in misplaced_tensors(found)
    ]
    kind = next((type(each).__name__ for each in found.optimizers.values()), "AdamW")
    hidden = list(unregistered_tensors(found))
    own_ones = {
        id(each.tensor) for each in found.of(Ownership.PARAMETER) if each.tensor.requires_grad
    }
    shared = len({id(each) for _, each in _untrained(found)}) < len(own_ones)
    copied = [
        (each.name, line(each.tensor.grad_fn._sequence_nr()))  # type: ignore[union-attr]
        for each in found.of(Ownership.UNREGISTERED)
        if is_copied_parameter(each.tensor)
    ]
    shapes = _shaped(foreign), _shaped(untrained)
    moves = [
        (spell(path) if path else "", method)
        for path, each in found.modules.items()
        if (method := own_move(each))
    ]
    return OwnershipReport(*shapes, wrong, hidden, kind, copied, shared, moves)


def own_move(module: nn.Module) -> str:
    """The method of a user's class that moves its modules, with its line; "" for torch's own."""
    for name in ("to", "cuda", "_apply"):
        method = getattr(type(module), name)
        code = getattr(method, "__code__", None)
        if method is getattr(nn.Module, name) or code is None or is_library(code.co_filename):
            continue
        return f"{method.__qualname__} at {line_in(code.co_filename, code.co_firstlineno)}"
    return ""


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


def misplaced_tensors(found: Holdings) -> list[MisplacedTensor]:
    """Gradients and state that are not on their parameter's device, or not on the CPU as required.

    A single number may stay on the CPU, unless the optimizer is capturable or fused.
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
            wrong.append(MisplacedTensor(each.name, each.held, here, wanted, each.role))
    return wrong


def _indexed(device: str) -> str:
    return device if ":" in device or kind_of(device) in ("cpu", "meta", "mps") else f"{device}:0"
