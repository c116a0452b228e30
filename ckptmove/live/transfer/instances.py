"""Tell which objects in a batch can be rebuilt from their attributes.

These are objects of classes written in Python, unless an object is more than its attributes: an
open file, a lock, a model that others refer to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from io import IOBase
from threading import Condition, Event, Lock, RLock, Semaphore, Thread
from types import BuiltinFunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .containers import Container, Part, attributed, plain

#: Values that are looked at in an object before it is taken for one without tensors: a vocabulary.
MOST_VALUES = 200_000

_WORLDS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    DataLoader,
    Dataset,
    Sampler,
    Thread,
)
#: What an object that holds it shares with others, so that no other does as well.
_SHARED = (*_WORLDS, IOBase, Condition, Event, Semaphore, type(Lock()), type(RLock()))
_MORE_THAN_DATA = ("__next__", "__anext__", "__exit__", "__aexit__", "__del__")
#: Modules of the standard library whose classes may be bases.
_BASES = frozenset(("abc", "argparse", "collections.abc", "typing"))
#: Libraries whose objects are as large as a disk, or no data.
_OTHERS = frozenset(("datasets", "tokenizers", "torch"))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not made in C once and for all

_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_divisible(kind: type) -> bool:
    """Whether objects of a class may be taken apart, and others put together."""
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = _is_divisible(kind)
    return found


def is_shared(parts: Iterable[Part]) -> bool:
    """Whether an object that holds this can't be had twice."""
    return any(issubclass(type(part), _SHARED) for _, part in parts)  # none of its code runs


def holds_tensors(value: Any) -> bool:
    """Whether there is a tensor in an object, in whatever that is made of."""
    stack, seen = [value], {id(value)}
    while stack and len(seen) < MOST_VALUES:
        each = stack.pop()
        kind = type(each)
        if issubclass(kind, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
            return True
        if issubclass(kind, (*_SHARED, type)):
            continue
        container: Container = (plain(kind) or attributed(kind))(each)
        for _, part in container.parts():
            if id(part) not in seen:
                seen.add(id(part))
                stack.append(part)
    return False


def _is_divisible(kind: type) -> bool:
    if issubclass(kind, (type, Enum, *_WORLDS)):
        return False
    if any(hasattr(kind, name) for name in _MORE_THAN_DATA):
        return False
    makers = (base.__dict__.get("__new__") for base in kind.__mro__)
    if next(each for each in makers if isinstance(each, BuiltinFunctionType)) is not object.__new__:
        return False
    return all(_is_data(base) for base in kind.__mro__ if base is not object)


def _is_data(kind: type) -> bool:
    """Whether a class adds no more than attributes."""
    if not kind.__flags__ & _HEAP_TYPE:
        return False
    module = str(kind.__module__)
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return module in _BASES
    return root not in _OTHERS or module.startswith("torch.distributions.")
