"""Weights that a hook of the module computes: the old weight_norm, spectral_norm and pruning.

Such a weight has an autograd history, which prevents torch from swapping the tensors behind it. So
the weight is dropped, and computed again right after the move, like the hook does at each run of
the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...display.phrases import first_line
from ...errors import RefusedError


class ComputedAttribute(NamedTuple):
    """An attribute that a hook computes."""

    name: str  #: its dotted name
    module: nn.Module  #: the module that has it
    attribute: str  #: its name in the module
    compute: Callable[[], torch.Tensor]  #: computes it again

    @property
    def value(self) -> object:
        """The current value."""
        return vars(self.module).get(self.attribute)

    def renew(self) -> None:
        """Compute the attribute again, and set it."""
        with torch.enable_grad(), torch._C._EnableTorchFunction():
            setattr(self.module, self.attribute, self.compute())

    def drop(self) -> None:
        """Drop the value; `setattr` also drops it from the list of an RNN."""
        setattr(self.module, self.attribute, None)


def computed_attributes(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[ComputedAttribute]:
    """The attributes of named modules that are results of a hook."""
    met: set[int] = set()
    for name, module in modules:
        if id(module) in met:
            continue
        met.add(id(module))
        for hook in list(module._forward_pre_hooks.values()):
            found = _of_hook(hook, module)
            if found is not None:
                value = vars(module).get(found[0])
                if isinstance(value, torch.Tensor) and not value.is_leaf:
                    own = f"{name}.{found[0]}" if name else found[0]
                    yield ComputedAttribute(own, module, *found)


def _of_hook(hook: Any, module: nn.Module) -> tuple[str, Callable[[], torch.Tensor]] | None:
    """The attribute that a hook sets, and a function that computes the same value again."""
    if not type(hook).__module__.startswith("torch.nn.utils."):
        return None
    if hasattr(hook, "apply_mask"):
        return hook._tensor_name, lambda: hook.apply_mask(module)
    if type(hook).__name__ == "SpectralNorm":
        return hook.name, lambda: hook.compute_weight(module, do_power_iteration=False)
    if hasattr(hook, "compute_weight"):
        return hook.name, lambda: hook.compute_weight(module)
    return None


@contextmanager
def without_computed(weights: list[ComputedAttribute]) -> Iterator[None]:
    """A context without these weights; at its end, missing weights are computed."""
    for each in weights:
        each.drop()
    try:
        yield
    finally:
        for each in weights:
            if each.value is None:
                each.renew()


def renew(weights: list[ComputedAttribute], undoing: Callable[[Callable[[], None]], None]) -> None:
    """Compute dropped weights again; `undoing` receives functions that undo it."""
    for each in weights:
        undoing(each.drop)
        try:
            each.renew()
        except Exception as error:
            raise RefusedError(
                f"{each.name!r} can't be computed on the new device: {first_line(error)}",
                hint="nothing was moved",
            ) from error
