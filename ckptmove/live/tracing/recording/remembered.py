"""Notes about tensors by their storages, which they do not keep alive."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

_MOST_KEPT = 4096  # the most storages that have notes


_VALUES = {torch.sparse_coo: torch.Tensor._values} | dict.fromkeys(
    (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), torch.Tensor.values
)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor, or of a sparse one's values; None if it has no storage."""
    try:
        if tensor.layout in _VALUES:
            with _disable_current_modes():
                tensor = _VALUES[tensor.layout](tensor)
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper
        return None
    except ValueError:  # a parameter without a shape yet
        return None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, -1 for a ragged size; empty for a parameter without a shape yet."""
    if nn.parameter.is_lazy(tensor):
        return ()
    if tensor.is_nested and tensor.layout is torch.strided:  # it has no sizes
        return (tensor.size(0), *(-1 for _ in range(1, tensor.dim())))
    return tuple(each if type(each) is int else -1 for each in tensor.shape)


def key_of(tensor: torch.Tensor) -> int | None:
    """A key of a tensor's storage, unique while the storage exists; None without a storage."""
    storage = storage_of(tensor)
    return None if storage is None else int(storage._cdata)


class StorageNotes(OrderedDict[int, tuple[StorageWeakRef, Any]]):
    """Notes about storages, which do not keep the bytes alive; only the latest notes are kept.

    A weak reference prevents another storage from getting the same key.
    """

    def __init__(self, most: int | None = _MOST_KEPT) -> None:
        """`most` is how many notes are kept; None means all."""
        super().__init__()
        self._most = most

    def note(self, tensor: torch.Tensor, what: object) -> None:
        """Add a note about a tensor's storage, unless the storage has one already."""
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self:
            self[storage._cdata] = StorageWeakRef(storage), what
            if self._most is not None and len(self) > self._most:
                self.popitem(last=False)

    def about(self, tensor: torch.Tensor) -> Any:
        """The note about a tensor's storage, or None."""
        key = key_of(tensor)
        found = None if key is None else self.get(key)
        return None if found is None else found[1]
