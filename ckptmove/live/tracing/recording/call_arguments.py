"""Name the arguments of a model call as its `forward` names them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...inventory.object_walk import Reach


def names_of(model: nn.Module) -> Sequence[str]:
    """The names of the arguments of a model's `forward`."""
    if "forward" in vars(model):  # a cache would keep the model alive
        return _signature.__wrapped__(model.forward, 0)
    return _signature(type(model).forward, 1)


@functools.lru_cache(maxsize=1024)  # called at each model call
def _signature(forward: Any, first: int) -> Sequence[str]:
    try:
        return list(inspect.signature(forward).parameters)[first:]
    except (TypeError, ValueError):
        return ()


def arguments_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among arguments, each with the name of its argument."""
    names = names_of(model)
    reach = Reach()
    for n, value in enumerate(args):
        name = names[n] if n < len(names) else f"argument {n}"
        for path, tensor in reach.within(value, (name,)):
            yield ".".join(map(str, path)), tensor
    for name, value in kwargs.items():
        for path, tensor in reach.within(value, (name,)):
            yield ".".join(map(str, path)), tensor
