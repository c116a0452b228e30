"""Find parts of a model that cannot be moved, and say what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...display.phrases import join_names
from ...errors import RefusedError
from ...manifest.paths import spell
from ..inventory.holdings import HeldTensor, Holdings, Ownership

#: Classes that place a model on devices themselves.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def check_movable(roots: Iterable[object], found: Holdings) -> None:
    """Refuse tensors that another library places and tracks: dispatched, offloaded, distributed."""
    for root in roots:
        if isinstance(root, nn.Module):
            for name, module in root.named_modules():
                _check_module(name, module)
    for each in found.all:
        _check_tensor(each.name, each.tensor)


def _check_module(name: str, module: nn.Module) -> None:
    called = f"{name or 'the model'!r}" if name else "the model"
    if hasattr(module, "_hf_hook"):
        raise RefusedError(
            f"{called} is dispatched by accelerate, whose hooks move its tensors while it runs",
            hint="accelerate.hooks.remove_hook_from_submodules(model) first; if from_pretrained "
            'offloaded a part of it, load it again with device_map={"": device}',
        )
    kinds = {kind.__name__ for kind in type(module).__mro__}
    wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
    if wrapper is not None:
        raise RefusedError(
            f"{called} is a {wrapper}, whose devices are set when it is created",
            hint="move the model, then wrap it",
        )
    if isinstance(module, nn.DataParallel) and module.device_ids:
        raise RefusedError(
            f"{called} is a DataParallel; it starts from {module.src_device_obj}",
            hint="move the model, then wrap it",
        )


def holder_of(module: nn.Module) -> tuple[str, str] | None:
    """The holder of a module's tensors outside of Python, with a fix; None if there is none."""
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "TorchScript holds it in its own module",
            "model.to() moves a scripted model; or load its file again with "
            "torch.jit.load(path, map_location=...)",
        )
    if any(kind.__name__ == "_StatefulGraphModule" for kind in type(module).__mro__):
        return (
            "it belongs to an exported program, whose guards refer to it",
            "torch.export.passes.move_to_device_pass(program, device) moves the "
            "program and the devices in its graph; then call its module() again",
        )
    return None


def to_empty_hint(holding: HeldTensor, found: Holdings, device: str) -> str:
    """The hint how a tensor without values gets values, while no other tensor loses its own."""
    if holding.held in (Ownership.PARAMETER, Ownership.BUFFER, Ownership.TRANSIENT):
        root = max((r for r in found.roots if holding.path[: len(r)] == r), key=len, default=())
        for n in range(len(root), len(holding.path)):
            module = found.modules.get(holding.path[:n])
            held = [] if module is None else [*module.parameters(), *module.buffers()]
            if module is not None and all(each.is_meta for each in held):
                start = spell(root) if root else "model"
                inner = spell(holding.path[len(root) : n]) if n > len(root) else ""
                owner = f'{start}.get_submodule("{inner}")' if inner else start
                unsaved = [name for name, _ in module.named_buffers() if name not in _saved(module)]
                rest = (
                    f", and set {join_names(unsaved, 3)}, which no state dict holds"
                    if unsaved
                    else ""
                )
                return f'{owner}.to_empty(device="{device}"), then load its state dict{rest}'
    return "assign it again; no state dict holds it"


def _saved(module: nn.Module) -> set[str]:
    return {
        f"{place}.{name}" if place else name
        for place, each in module.named_modules()
        for name in (each._parameters.keys() | each._buffers.keys())
        - each._non_persistent_buffers_set
    }


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if any(each.__name__ == "DTensor" for each in kind.__mro__):
        raise RefusedError(
            f"{name!r} is a DTensor: its mesh decides its device",
            hint="move the model, then distribute it",
        )
    if isinstance(tensor, FakeTensor):
        raise RefusedError(
            f"{name!r} is a fake tensor: it has no values to move",
            hint="create the model outside FakeTensorMode",
        )
    if is_lazy(tensor):
        raise RefusedError(
            f"{name!r} is not initialized yet: it has no shape",
            hint="run a batch through the model first, or use model.to()",
        )
    own = next((each for each in kind.__mro__ if _moves_itself(each)), None)
    if own is not None and not is_traceable_wrapper_subclass(tensor):
        raise RefusedError(
            f"{name!r} is a {kind.__name__} of {own.__module__.partition('.')[0]}, "
            "which has its own way to move",
            hint="use its own .to(); bitsandbytes quantizes when it moves",
        )


def _moves_itself(kind: type) -> bool:
    return not kind.__module__.startswith("torch") and bool({"to", "cuda"} & vars(kind).keys())
