"""Memory of the simulated device: torch's `privateuseone` tensors over ordinary memory.

A tensor on the device is an ordinary torch tensor in a storage that DLPack relabels. Its values are
real. User code that reads `x.device` sees the device that is simulated, `shown.device`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

Device = torch.device  # the original class, before it is replaced for scripts
NAME, KEY = "privateuseone", "PrivateUse1"
THERE = torch.device(NAME, 0)
CPU = torch.device("cpu")
CPU_KEY = torch._C.DispatchKey.CPU
Op = Any  # torch._ops.OpOverload, which accepts any arguments
Seen = tuple[int | torch.SymInt, Sequence[int], Sequence[int]]  # offset, sizes, strides

_EXTENSION = 12  # kDLExtDev of DLPack, which torch maps to `privateuseone`
_true_device: Any = torch._C.TensorBase.device.__get__
_set: Op = torch.ops.aten.set_.source_Storage_storage_offset
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class NotSimulated(Exception):
    """Something can't be simulated; the text says what and why."""


class ShownDevice:
    """The device that is simulated, as user code sees it.

    Attributes:
        device: for example, `cuda:0`.
        process: the process that used it first, or 0; torch can't use CUDA in a fork of it.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.process = 0

    def name(self, device: torch.device) -> str:
        """The name of a device as user code sees it."""
        return str(self.device if device.type == NAME else device)

    def true_device(self, device: Any) -> Any:
        """The true device for a device that the program names.

        Raises:
            NotSimulated: it is another device of the simulated type.
        """
        if device is None:
            return None
        named = torch.device(device)
        if named.type != self.device.type:
            return named
        check_named(named, self.device)
        return THERE

    def use(self) -> None:
        """Record that this process uses the device.

        Raises:
            RuntimeError: like CUDA, if this is a fork of a process that used it.
        """
        process = os.getpid()
        if not self.process:
            self.process = process
        if self.process != process and self.device.type == "cuda":
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
                "multiprocessing, you must use the 'spawn' start method"
            )


def check_named(named: torch.device, simulated: torch.device) -> None:
    """Refuse a device of a program that is another one than what is simulated.

    Raises:
        RuntimeError: the simulated machine has no device of this number, as CUDA says it.
        NotSimulated: it would have one, which is not simulated.
    """
    if named.type != simulated.type or named.index in (None, simulated.index):
        return
    if named.index > simulated.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {named}, beside {simulated} alone")
    raise NotSimulated(f"the script names {named}, and only {simulated} is simulated")


shown = ShownDevice()


def device_of(tensor: Tensor) -> torch.device:
    """The true device of a tensor, even if an active torch function mode returns the shown one."""
    found: torch.device = _true_device(tensor)
    return THERE if found.type == shown.device.type else found


def is_there(value: object) -> bool:
    """Whether this is a tensor on the simulated device."""
    return isinstance(value, Tensor) and device_of(value).type == NAME


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors among arguments, which may be lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def seen_bytes(tensor: Tensor) -> Seen:
    """The offset, shape and stride with which a tensor views its storage."""
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def relabel(storage: UntypedStorage) -> UntypedStorage:
    """A storage on the device that has the bytes of a CPU storage and keeps them alive."""
    size = storage.nbytes()
    flat = torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage, 0, (size,), (1,))
    capsule = torch._C._to_dlpack(flat)
    # A `DLTensor` is `void *data; int32_t device_type, device_id; ...`.
    device_type = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(device_type).value = _EXTENSION
    there: Tensor = torch._C._from_dlpack(capsule)
    return there.untyped_storage()


def place(tensor: Tensor, storage: UntypedStorage, view: Seen) -> Tensor:
    """Make a tensor on the device a view of a storage there."""
    placed: Tensor = _set._op_dk(CPU_KEY, tensor, storage, *view)
    return placed


def empty_there(dtype: torch.dtype) -> Tensor:
    """A tensor without elements on the device."""
    made: Tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    return made


def here(there: Tensor) -> Tensor:
    """A CPU tensor over the same bytes, valid while the tensor on the device exists."""
    storage = there.untyped_storage()
    made = torch.empty(0, dtype=there.dtype, device=CPU)
    if not storage.nbytes():  # keep the new tensor's own storage, which an op may enlarge
        return made.as_strided_(there.size(), there.stride())
    near = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    made.set_(near, *seen_bytes(there))
    made = torch._conj(made) if there.is_conj() else made
    return torch._neg_view(made) if there.is_neg() else made


def resize(self: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """`resize_`; if the storage is too small, the tensor moves to a new one."""
    like = torch.empty(size, device="meta", memory_format=memory_format)
    storage, offset = self.untyped_storage(), self.storage_offset()
    needed = (offset + like.numel()) * self.element_size() if like.numel() else 0
    if needed > storage.nbytes():
        larger = UntypedStorage(needed)
        if storage.nbytes():
            ctypes.memmove(larger.data_ptr(), storage.data_ptr(), storage.nbytes())
        storage = relabel(larger)
    return place(self, storage, (offset, like.size(), like.stride()))


def unset(self: Tensor) -> Tensor:
    """`set_()`: the tensor gets an empty storage."""
    return place(self, relabel(UntypedStorage(0)), (0, (0,), (1,)))


def new_storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> UntypedStorage:
    """`UntypedStorage(...)`, for the device too."""
    if device is None or torch.device(device).type not in (NAME, shown.device.type):
        given = kwargs if device is None else {**kwargs, "device": device}
        made: UntypedStorage = torch._C.StorageBase.__new__(cls, *args, **given)
        return made
    return relabel(UntypedStorage(*args, **kwargs))


class Bridge:
    """Converts the operands of one operation to CPU tensors, and its results back to the device."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by `id()` of the CPU tensor
        self._heres: dict[int, Tensor] = {}  # CPU tensors, by `id()` of the device tensor
        self._storages: dict[int, UntypedStorage] = {}  # on the device, by key of the CPU storage

    def here(self, value: Any) -> Any:
        """An operand for the CPU's operation."""
        if isinstance(value, Tensor):
            found = self._heres.get(id(value))
            if found is None:
                found = self._brought(value)
                self._heres[id(value)] = found
                self._pairs[id(found)] = found, value
            return found
        if isinstance(value, Device):
            return CPU if value.type in (NAME, shown.device.type) else value
        if isinstance(value, (list, tuple)):
            return [self.here(each) for each in value]
        return value

    def _brought(self, value: Tensor) -> Tensor:
        if device_of(value).type != NAME:
            return value
        found = here(value)
        if value.untyped_storage().nbytes():
            self._storages[found.untyped_storage()._cdata] = value.untyped_storage()
        return found

    def there(self, value: Any) -> Any:
        """A result on the device; for a CPU tensor of an operand, the operand itself."""
        if isinstance(value, Tensor):
            found = self._pairs.get(id(value))
            if found is not None:
                return found[1]
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            near = value.untyped_storage()
            if near._cdata not in self._storages:
                self._storages[near._cdata] = relabel(near)
            return place(empty_there(value.dtype), self._storages[near._cdata], seen_bytes(value))
        if isinstance(value, (list, tuple)):
            made = map(self.there, value)
            return type(value)(made) if type(value) in (list, tuple) else tuple(made)
        return value

    def settle(self) -> None:
        """Give operands on the device the shape and storage that their CPU tensors now have."""
        for near, far in list(self._pairs.values()):
            if near is far:
                continue
            grew = near.untyped_storage().nbytes() != far.untyped_storage().nbytes()
            if grew or seen_bytes(near) != seen_bytes(far):
                key = near.untyped_storage()._cdata
                if key not in self._storages or grew:
                    self._storages[key] = relabel(near.untyped_storage())
                place(far, self._storages[key], seen_bytes(near))
