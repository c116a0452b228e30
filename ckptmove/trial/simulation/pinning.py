"""Pinned memory beside the simulated device: ordinary memory, of which it is noted that it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors

from .device_kernels import type_name
from .device_memory import is_there

#: The pinned storages; as long as one is noted, no other storage has its key.
_pinned: dict[int, StorageWeakRef] = {}
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")


def pinning() -> Iterator[tuple[Any, str, Any]]:
    """What pins memory, and what tells whether it is: of what, by which name, and instead."""
    yield Tensor, "pin_memory", _pin
    yield Tensor, "is_pinned", _is_pinned
    makers = {each.__name__ for each in _device_constructors()}.union(_LIKE)
    yield from (
        (torch, name, _making(getattr(torch, name))) for name in makers.intersection(dir(torch))
    )


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    """`Tensor.pin_memory`, which torch supports only for tensors on the CPU."""
    if is_there(tensor):
        raise RuntimeError(f"cannot pin '{type_name(tensor)}' only dense CPU tensors can be pinned")
    return tensor if _is_pinned(tensor) else _note(tensor.detach().clone())


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in _pinned


def _note(made: Tensor) -> Tensor:
    for key in [key for key, each in _pinned.items() if each.expired()]:
        del _pinned[key]
    storage = made.untyped_storage()
    _pinned[storage._cdata] = StorageWeakRef(storage)
    return made


def _making(real: Any) -> Callable[..., Tensor]:
    """A function that makes tensors, perhaps in pinned memory."""

    @functools.wraps(real)
    def making(*args: Any, **kwargs: Any) -> Any:
        pins = kwargs.pop("pin_memory", False)
        made = real(*args, **kwargs)
        return _pin(made) if pins else made

    return making
