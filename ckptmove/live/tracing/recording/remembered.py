"""Notes about tensors by their storages, which they do not keep alive."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

_MOST_KEPT = 4096  # inputs, and tensors that were made, of which something is remembered


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor, if it has one of its own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
        return None
    except ValueError:  # a parameter without a shape yet
        return None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor, -1 for a ragged one; none for a parameter that has no shape yet."""
    sizes = () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
    return tuple(each if type(each) is int else -1 for each in sizes)


def key_of(tensor: torch.Tensor) -> int | None:
    """A key of a tensor's storage, unique while the storage lives."""
    storage = storage_of(tensor)
    return None if storage is None else int(storage._cdata)


class Remembered(OrderedDict[int, tuple[StorageWeakRef, Any]]):
    """Notes about storages, without keeping their bytes; only the latest are kept.

    A weak reference prevents that another storage gets the same key.
    """

    def __init__(self, most: int | None = _MOST_KEPT) -> None:
        """`most`: how many notes are kept; None: all."""
        super().__init__()
        self._most = most

    def note(self, tensor: torch.Tensor, what: object) -> None:
        """Remember something about a tensor's storage, unless there is something already."""
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self:
            self[storage._cdata] = StorageWeakRef(storage), what
            if self._most is not None and len(self) > self._most:
                self.popitem(last=False)

    def about(self, tensor: torch.Tensor) -> Any:
        """What is remembered about a tensor's storage, or None."""
        key = key_of(tensor)
        found = None if key is None else self.get(key)
        return None if found is None else found[1]
