"""Pickle an object like torch.save, but without the bytes of storages.

Source: torch/serialization.py, `_save` and its `persistent_id`.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any, NamedTuple

import torch
from torch.serialization import location_tag, normalize_storage_type

from ..errors import UnsupportedError
from .opaque import Opaque


class PickledObject(NamedTuple):
    """A pickled object."""

    data: bytes  #: the pickle, of protocol 2
    #: Key → the bytes of a storage; for a storage on the CPU, a view of its own memory, which must
    #: not change until it is written.
    storages: dict[str, memoryview]


def pickle_object(obj: object) -> PickledObject:
    """Pickle an object.

    Raises UnsupportedError if it can't be pickled, or a storage has no readable bytes.
    """
    output = io.BytesIO()
    pickler = _Pickler(output, protocol=2)
    try:
        pickler.dump(obj)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise UnsupportedError(f"it can't be pickled: {why}") from error
    return PickledObject(output.getvalue(), pickler.contents)


def stand_in(*parts: object) -> None:
    """Never called, because its calls are replaced before the pickle is written.

    `parts` are the module and the name; for a call also the callable (if it has no name), the
    arguments, the keyword arguments, and the opcode.
    """
    raise UnsupportedError("a stand-in was unpickled")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.contents: dict[str, memoryview] = {}
        self._keys: dict[int, str] = {}
        self._alive: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an `Opaque` to a call of `stand_in`; other objects as usual."""
        if type(obj) is not Opaque:
            return NotImplemented
        names = (obj.module, obj.qualname[len(obj.module) :].removeprefix("."))
        if obj.qualname and obj.args is None:
            return stand_in, names
        call = (*names, obj.function, obj.args, obj.kwargs, obj.how)
        return stand_in, call, obj.state, iter(obj.items), iter(obj.pairs)

    def persistent_id(self, obj: Any) -> Any:
        """The persistent id of a storage, as torch writes it."""
        storage: Any
        if isinstance(obj, torch.storage.TypedStorage):
            storage, kind, numel = obj._untyped_storage, obj._pickle_storage_type(), obj._size()
            storage_type = getattr(torch, kind)
        elif torch.is_storage(obj):
            storage, storage_type, numel = obj, normalize_storage_type(type(obj)), obj.nbytes()
        else:
            return None
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        if key not in self.contents:
            self.contents[key] = self._bytes(storage)
        return ("storage", storage_type, key, location_tag(storage), numel)

    def _bytes(self, storage: Any) -> memoryview:
        if storage.device.type == "meta":
            raise UnsupportedError("a storage on the meta device has no bytes to be saved")
        self._alive.append(storage)  # its address is its key, and must not be used again
        if storage.device.type != "cpu":
            storage = storage.cpu()
        nbytes = storage.nbytes()
        if not nbytes:
            return memoryview(b"")
        content: Any = (ctypes.c_char * nbytes).from_address(storage.data_ptr())
        content.storage = storage  # keeps the storage alive as long as the view
        return memoryview(content).cast("B")
