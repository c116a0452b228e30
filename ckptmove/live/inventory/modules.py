"""The modules of a model under all their paths, with their parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ...manifest.paths import Path


def with_tensors(modules: Sequence[tuple[Path, nn.Module]]) -> set[int]:
    """The `id()` of each module in which there are tensors; a mere activation has none."""
    found = set()
    for _, module in reversed(modules):  # what is in a module comes after it
        children = module._modules.values()
        if any(True for _ in registered_in(module)) or any(id(each) in found for each in children):
            found.add(id(module))
    return found


def modules_of(model: nn.Module, start: Path) -> Iterator[tuple[Path, nn.Module]]:
    """Each module under each path, in the order of a state dict."""
    todo: list[tuple[Path, nn.Module, tuple[int, ...]]] = [(start, model, ())]
    while todo:
        path, module, around = todo.pop()
        if id(module) in around:  # a ring, which has no state dict
            continue
        yield path, module
        inner = (*around, id(module))
        children = [((*path, n), m, inner) for n, m in module._modules.items() if m is not None]
        todo += reversed(children)


def registered_in(module: nn.Module) -> Iterator[torch.Tensor]:
    """Its own parameters and buffers."""
    for held in (module._parameters, module._buffers):
        yield from (each for each in held.values() if each is not None)


class Known:
    """What is listed on its own, and thus not again as a part of something."""

    def __init__(
        self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        modules = {id(m): m for each in models for _, m in modules_of(each, ())}
        self.objects: list[object] = [*modules.values(), *optimizers]  #: modules and optimizers
        #: `id()` of each tensor that a module has registered.
        self.registered = {id(t) for each in modules.values() for t in registered_in(each)}
