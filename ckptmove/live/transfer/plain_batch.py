"""Copy a batch of plain containers and plain tensors to a device, in one pass.

Most batches are plain. `to_device` handles the others: shared objects, tensors that use only part
of their storage, other classes.
"""

from __future__ import annotations

import copy
import functools
from collections import UserDict
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from .copy import is_whole

_MOST_OBJECTS = 4096  # the most objects of a batch that is handled here
_MOST_DEPTH = 16  # of nested containers; some contain themselves
_NAMED, _DATA = "named", "data"
#: Classes that can't hold a tensor.
_INERT = frozenset((int, float, complex, bool, str, bytes, type(None), torch.device, torch.dtype))


class _NotPlain(Exception):
    """An object in the batch is not plain."""


def is_there(obj: Any, device: torch.device) -> bool:
    """Whether a batch is plain, has tensors, and all of them are on the device."""
    if type(obj) is torch.Tensor:
        return obj.device == device
    todo, found = [obj], False
    for _ in range(_MOST_OBJECTS):
        if not todo:
            return found
        each = todo.pop()
        kind: Any = type(each)
        if kind is torch.Tensor:
            if each.device != device:
                return False
            found = True
        elif kind is dict:
            todo += each.values()
        elif kind is list or kind is tuple:
            todo += each
        elif kind not in _INERT:
            sort = _sort(kind)
            if not sort:
                return False
            todo += each if sort is _NAMED else each.data.values()
    return False


def send_plain(obj: Any, device: torch.device) -> Any:
    """The batch on the device; None if it is not plain, or can't be copied there."""
    tensors: list[torch.Tensor] = []
    try:
        _find(obj, device, tensors, set(), 0)
    except _NotPlain:
        return None
    storages = {each.untyped_storage()._cdata for each in tensors}
    if (
        not tensors
        or len(storages) < len(tensors)
        or not all(map(_is_plain, tensors))
        or device.type == "meta"
    ):
        return None
    try:
        return _built(obj, device)
    except (RuntimeError, AssertionError, NotImplementedError):  # such as a missing device
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is exactly its storage, has values, and is not wrapped by a transform."""
    if tensor.is_meta or is_functorch_wrapped_tensor(tensor) or tensor.is_quantized:
        return False
    return is_whole(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()


def _find(
    obj: Any, device: torch.device, away: list[torch.Tensor], seen: set[int], depth: int
) -> None:
    kind: Any = type(obj)
    if kind is torch.Tensor:
        if id(obj) in seen or obj.layout is not torch.strided:
            raise _NotPlain
        seen.add(id(obj))
        if obj.device != device:
            away.append(obj)
    elif kind is dict or kind is list or kind is tuple:
        if id(obj) in seen or depth > _MOST_DEPTH:
            raise _NotPlain
        seen.add(id(obj))
        for each in obj.values() if kind is dict else obj:
            _find(each, device, away, seen, depth + 1)
    elif kind not in _INERT:
        sort = _sort(kind)
        if not sort:
            raise _NotPlain
        _find(tuple(obj) if sort is _NAMED else obj.data, device, away, seen, depth + 1)


def _built(obj: Any, device: torch.device) -> Any:
    """The containers with tensors on the device; a container without new tensors is reused."""
    kind: Any = type(obj)
    if kind is torch.Tensor:
        return obj.to(device)
    if kind is dict:
        made = {key: _built(each, device) for key, each in obj.items()}
        return made if any(made[key] is not each for key, each in obj.items()) else obj
    if kind is list or kind is tuple:
        new = [_built(each, device) for each in obj]
        if all(one is other for one, other in zip(new, obj, strict=True)):
            return obj
        return new if kind is list else tuple(new)
    if kind in _INERT:
        return obj
    if _sort(kind) is _NAMED:
        new = [_built(each, device) for each in obj]
        return kind._make(new) if any(a is not b for a, b in zip(new, obj, strict=True)) else obj
    return _built_of_transformers(obj, device)


def _built_of_transformers(batch: Any, device: torch.device) -> Any:
    data = _built(batch.data, device)
    if data is batch.data:
        return batch
    made = copy.copy(batch)
    made.data = data
    return made


@functools.lru_cache(maxsize=256)
def _sort(kind: Any) -> str:
    """The kind of another class: a named tuple, or a batch of transformers; "" for the rest."""
    if kind.__bases__ == (tuple,) and hasattr(kind, "_make"):
        return _NAMED
    of_library = kind.__module__.partition(".")[0] == "transformers"
    return _DATA if of_library and issubclass(kind, UserDict) else ""
