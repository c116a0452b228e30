"""Find tensors that are not registered with their module, and the code to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...manifest.manifest import Role, Section
from ...manifest.paths import Path, spell
from .holdings import HeldTensor, Holdings, Ownership
from .object_walk import hooks

_IN_HOOK = "let the hook read it from a buffer of the module"


class Unregistered(NamedTuple):
    """A tensor that `Module.to` and the state dict don't know of."""

    name: str  #: of the tensor
    advice: str  #: what to write instead
    kind: type  #: the class of the module that holds it
    attribute: str  #: the module's attribute through which it does
    held: Ownership = Ownership.UNREGISTERED  #: how


def unregistered(found: Holdings) -> Iterator[Unregistered]:
    """Tensors that a model should register; not those that libraries set at each forward."""
    flat = {
        each.tensor.untyped_storage()._cdata
        for each in found.of(Ownership.PARAMETER)
        if getattr(each.tensor, "_is_flat_param", False)  # FSDP's, which makes views of it itself
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
        attribute = str(each.path[len(at)])
        advice = _advice(each, module, attribute)
        if advice is not None:
            yield Unregistered(each.name, advice, type(module), attribute, each.held)


def _of_optimizer(each: HeldTensor, found: Holdings) -> Iterator[Unregistered]:
    for path, optimizer in found.optimizers.items():
        if each.path[: len(path)] == path:
            yield Unregistered(each.name, _IN_HOOK, type(optimizer), "", each.held)
            return


def _module_at(holding: HeldTensor, modules: Mapping[Path, nn.Module]) -> Path:
    """The path of the module that holds something."""
    path = holding.path
    if not holding.module:
        return ()
    depths = range(len(path) - 1, 0, -1)
    named = (path[:n] for n in depths if path[:n] in modules)
    return next((each for each in named if spell(each) == holding.module), ())


def _moves_itself(module: nn.Module) -> bool:
    """Whether a class has its own way of moving, as metrics have."""
    apply = type(module)._apply
    return apply is not nn.Module._apply and not apply.__module__.startswith("torch.nn.modules.")


def _advice(holding: HeldTensor, module: nn.Module, attribute: str) -> str | None:
    """The code to write instead, or None if a tensor is made again at each forward."""
    if holding.held is Ownership.HOOK:
        return _IN_HOOK
    if holding.held is Ownership.CLASS:
        return f'self.register_buffer("{attribute}", …, persistent=False) in each of them'
    value = vars(module).get(attribute)
    if value is None:  # it hangs on a parameter
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
    """Whether a hook sets it whenever the module runs: of weight_norm or pruning, say."""
    return any(
        attribute in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))
        for hook in hooks(module)
    )
