"""A second torch device with real values, on a machine without one: torch's `privateuseone`.

A tensor on `DEVICE` lies in ordinary memory, in a storage on `privateuseone:0`. Its operations run
on the CPU over the same bytes, so numbers are those of the CPU, bit by bit. Like a real device it
refuses to mix its tensors with those of another, and it can run out of memory (`limited`). There is
one such device, at index 0.

It lacks: storages that grow or shrink (`storage.resize_`; a tensor that must grow moves to a new
one), its own random generators, streams, autocast, sparse and quantized tensors, second derivatives
through composed operations (`_AS_ONE`). `Tensor.data` can't be set to a tensor of another device,
as for most backends, so `Module.to` makes new parameters, unless
`torch.__future__.set_swap_module_params_on_conversion(True)`.

`install` lasts for the whole process, and torch then finds an accelerator, so a test that wants the
device runs in its own process (`apart`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree, backend_registration
from torch.utils._python_dispatch import _disable_current_modes

from ckptmove.trial.simulation.device import DEVICE_MODULE
from tests.conftest import ROOT
from tests.servers.warm_python import WarmTest

NAME = "privateuseone"
DEVICE = f"{NAME}:0"

needs_second_device = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="needs a torch whose devices can be written in Python",
)

P = ParamSpec("P")
Seen = tuple[int | torch.SymInt, Sequence[int], Sequence[int]]  # offset, sizes, strides
Op = Any  # torch._ops.OpOverload, which may be called with anything

_KEY = "PrivateUse1"
_aten: Any = torch.ops.aten
# Ops that have one kernel for every device, and there ask which it is.
_ALSO = ("copy_", "convolution", "convolution_backward", "set_.source_Tensor")
# Ops that are made of others, but of different ones on a CPU and elsewhere.
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_AS_ONE = [f"{name}.{kind}" for name in _RECURRENT for kind in ("input", "data")]
_AS_ONE += ["lstm_cell", "gru_cell", "dropout", "scaled_dot_product_attention"]
# What of an op's arguments may be on another device.
_OF_ANY = dict.fromkeys(("index", "index_put_", "_index_put_impl_"), "indices")
_OF_ANY |= dict.fromkeys(_RECURRENT, "batch_sizes")

_kept: list[torch.library.Library] = []  # what is registered goes when its library does
_limits: list[Limit] = []


def install() -> None:
    """Register the device, once in this process."""
    if _kept:
        return
    # Renamed to its own name, without which it is no accelerator, and there is no autograd.
    set_up = backend_registration._setup_privateuseone_for_python_backend
    set_up(NAME, DEVICE_MODULE)
    _kept.append(library := torch.library.Library("aten", "IMPL"))
    for op in _on_cpu():
        library.impl(op, functools.partial(_see if _sees(op) else _run, op), _KEY)
    library.impl("resize_", _resize, _KEY)
    library.impl("set_", _set, _KEY)
    for name in _AS_ONE:
        library.impl(name, functools.partial(_run_as_one, _op(name)), f"Autograd{_KEY}")
    _kept.append(rest := torch.library.Library("_", "IMPL"))
    rest.fallback(_run, _KEY)
    # A storage is made by its device's allocator, which Python can't be.
    UntypedStorage.__new__ = staticmethod(_new_storage)  # type: ignore[assignment]


def apart(test: Callable[P, None]) -> Callable[P, None]:
    """Decorate a test to run in its own process, with the device."""

    @needs_second_device
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if _APART in os.environ:
            install()
            return test(*args, **kwargs)
        name = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
        process = WarmTest(
            [sys.executable, "-B", "-m", "pytest", *_QUIETLY, name],
            # Of accelerators torch takes one: this, even where there is a GPU.
            env={**os.environ, _APART: "1", "CUDA_VISIBLE_DEVICES": ""},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = process.communicate()
        if process.returncode:
            pytest.fail(f"apart, exit code {process.returncode}\n{said}", pytrace=False)
        return None

    return run


_APART = "CKPTMOVE_TEST_APART"
_QUIETLY = (
    *("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # some plugins are imported already
)


class Limit:
    """Bytes that may still be allocated on the device; earlier ones do not count."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.peak = 0
        self._held: list[tuple[StorageWeakRef, int]] = []

    @property
    def used(self) -> int:
        """Bytes that were allocated under this limit and are still held."""
        self._held = [(ref, size) for ref, size in self._held if not ref.expired()]
        return sum(size for _, size in self._held)

    def check(self, nbytes: int) -> None:
        """Refuse an allocation that exceeds the limit."""
        if nbytes + (used := self.used) > self.nbytes:
            raise torch.OutOfMemoryError(
                f"{DEVICE} out of memory. Tried to allocate {nbytes} bytes. "
                f"{self.nbytes} bytes of total capacity, of which {self.nbytes - used} are free."
            )

    def hold(self, storage: UntypedStorage) -> None:
        """Count an allocated storage."""
        self._held.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.used)


@contextmanager
def limited(nbytes: int) -> Iterator[Limit]:
    """Permit so many more bytes on the device; then `torch.OutOfMemoryError`."""
    _limits.append(limit := Limit(nbytes))
    try:
        yield limit
    finally:
        _limits.remove(limit)


# Tensors, there and here


def _is_there(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _relabel(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage of the CPU as a tensor on the device, which owns them."""
    size = storage.nbytes()
    for limit in _limits:
        limit.check(size)
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (size,), (1,))
    capsule = torch._C._to_dlpack(flat)
    # A `DLTensor` is `void *data; int32_t device_type, device_id; ...`. Torch takes another
    # library's "extension device", 12, for this one.
    device_type = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(device_type).value = 12
    there: Tensor = torch._C._from_dlpack(capsule)
    for limit in _limits:
        limit.hold(there.untyped_storage())
    return there


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _seen(tensor: Tensor) -> Seen:
    """The offset, shape and stride with which a tensor views its storage."""
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _place(tensor: Tensor, storage: UntypedStorage, seen: Seen) -> Tensor:
    """Make a tensor on the device view a storage there."""
    op = _aten.set_.source_Storage_storage_offset
    placed: Tensor = op._op_dk(torch._C.DispatchKey.CPU, tensor, storage, *seen)
    return placed


def _there(here: Tensor, storage: UntypedStorage) -> Tensor:
    """A tensor on the device that views a storage there as one of the CPU views its own."""
    made: Tensor = torch._C._acc.create_empty_tensor((0,), here.dtype)
    return _place(made, storage, _seen(here))


def _here(there: Tensor) -> Tensor:
    """The same bytes as a tensor of the CPU, valid while the one on the device lives."""
    storage = there.untyped_storage()
    made = torch.empty(0, dtype=there.dtype, device="cpu")
    if not storage.nbytes():  # its own storage, then, which an op may make larger
        return made.as_strided_(there.size(), there.stride())
    near = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    made.set_(near, *_seen(there))
    made = torch._conj(made) if there.is_conj() else made
    return torch._neg_view(made) if there.is_neg() else made


def _new_storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> UntypedStorage:
    """`UntypedStorage(...)`, also on the device."""
    if device is None or torch.device(device).type != NAME:
        given = kwargs if device is None else {**kwargs, "device": device}
        made: UntypedStorage = torch._C.StorageBase.__new__(cls, *args, **given)
        return made
    return _relabel(UntypedStorage(*args, **kwargs)).untyped_storage()


# Ops


def _op(name: str) -> Op:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


def _on_cpu() -> Iterator[Op]:
    """The ops with a kernel for the CPU, and some with one for all devices."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    wanted = {*_ALSO, *(name[6:] for name in names if name.startswith("aten::"))}
    yield from map(_op, sorted(wanted - {"resize_", "set_"}))


def _sees(op: Op) -> bool:
    """Whether an op only makes a view; such kernels work on any device."""
    aliases = [each.alias_info for each in op._schema.returns]
    return (
        any(alias is not None and not alias.is_write for alias in aliases)
        or op.name().startswith("aten::set_.")
        or op.name() == "aten::is_set_to"
    )


def _see(op: Op, *args: Any, **kwargs: Any) -> Any:
    """The CPU's own kernel, on tensors of the device."""
    return op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


class _Bridge:
    """Maps tensors on the device to tensors of the CPU for one op, and back."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the one on the CPU
        self._heres: dict[int, Tensor] = {}  # by the id of the other
        self._storages: dict[int, UntypedStorage] = {}  # those there, by those here

    def here(self, value: Any) -> Any:
        """The argument for the CPU."""
        if isinstance(value, Tensor):
            if id(value) not in self._heres:
                here = _here(value) if _is_there(value) else value
                self._heres[id(value)] = here
                self._pairs[id(here)] = here, value
                if _is_there(value) and value.untyped_storage().nbytes():
                    self._storages[here.untyped_storage()._cdata] = value.untyped_storage()
            return self._heres[id(value)]
        if isinstance(value, torch.device) and value.type == NAME:
            if value.index:
                raise RuntimeError(f"{NAME} has one device, and no {value}")
            return torch.device("cpu")
        return [self.here(each) for each in value] if isinstance(value, list | tuple) else value

    def there(self, value: Any) -> Any:
        """The result for the device."""
        if isinstance(value, Tensor):
            if id(value) in self._pairs:
                return self._pairs[id(value)][1]
            value = value.resolve_conj().resolve_neg()
            return _there(value, self._storage(value))
        return type(value)(map(self.there, value)) if isinstance(value, list | tuple) else value

    def settle(self) -> None:
        """Give tensors on the device the shapes that an op gave those of the CPU."""
        for here, there in list(self._pairs.values()):
            if not _is_there(there):
                continue
            grew = here.untyped_storage().nbytes() != there.untyped_storage().nbytes()
            if grew or _seen(here) != _seen(there):
                _place(there, self._storage(here), _seen(here))

    def _storage(self, here: Tensor) -> UntypedStorage:
        near = here.untyped_storage()
        if near._cdata not in self._storages:
            self._storages[near._cdata] = _relabel(near).untyped_storage()
        return self._storages[near._cdata]


def _run(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Run an op of the device on the CPU, over the same bytes."""
    named = {arg.name: value for arg, value in zip(op._schema.arguments, args, strict=False)}
    named |= kwargs
    _check_devices(op, named)
    bridge = _Bridge()
    made = op(**{name: bridge.here(value) for name, value in named.items()})
    if any(_is_written(arg) for arg in op._schema.arguments):
        bridge.settle()
    return bridge.there(made)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _check_devices(op: Op, named: dict[str, Any]) -> None:
    """Refuse tensors of several devices, except numbers on the CPU that are only read."""
    name = op._schema.name.removeprefix("aten::")
    if name == "copy_":
        return
    written = {arg.name for arg in op._schema.arguments if _is_written(arg)}
    tensors = [
        (each, argument in written)
        for argument, value in named.items()
        if argument != _OF_ANY.get(name)
        for each in _pytree.tree_leaves(value)
        if isinstance(each, Tensor)
    ]
    if any(_is_there(each) for each, _ in tensors):
        for each, is_written in tensors:
            if not _is_there(each) and (each.dim() or is_written):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {DEVICE} and {each.device}!"
                )


def _resize(self: Tensor, size: list[int], *, memory_format: Any = None) -> Tensor:
    """`resize_`; without room, the tensor moves to a new storage."""
    like = torch.empty(size, device="meta", memory_format=memory_format)
    storage, offset = self.untyped_storage(), self.storage_offset()
    needed = (offset + like.numel()) * self.element_size() if like.numel() else 0
    if needed > storage.nbytes():
        larger = UntypedStorage(needed)
        ctypes.memmove(larger.data_ptr(), storage.data_ptr(), storage.nbytes())
        storage = _relabel(larger).untyped_storage()
    return _place(self, storage, (offset, size, like.stride()))


def _set(self: Tensor) -> Tensor:
    """`set_()`: the tensor lets go of its storage."""
    return _place(self, _relabel(UntypedStorage(0)).untyped_storage(), (0, (0,), (1,)))


class _AsOne(torch.autograd.Function):
    """An op composed of others, run and differentiated on the CPU as a whole."""

    @staticmethod
    def forward(ctx: Any, op: Op, names: list[str], spec: Any, *leaves: Any) -> Any:
        ctx.bridge = bridge = _Bridge()  # whose tensors must live as long
        ctx.given = [
            bridge.here(leaf).detach().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        # What is done to saved tensors, such as recomputing them, isn't for those of in here.
        as_they_are = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
        with torch.enable_grad(), as_they_are, _disable_current_modes():
            named = dict(zip(names, _pytree.tree_unflatten(ctx.given, spec), strict=True))
            ctx.made = op(**named)
        # Copies, for an op may give what it was given.
        copies = _pytree.tree_map(lambda made: made.detach().clone(), ctx.made)
        return _Bridge().there(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        made = [ctx.made] if isinstance(ctx.made, Tensor) else ctx.made
        wanted = [isinstance(each, Tensor) and each.requires_grad for each in ctx.given]
        with _disable_current_modes():  # who watches shall see one op
            bridge = _Bridge()
            found = iter(
                torch.autograd.grad(
                    made,
                    [each for each, is_wanted in zip(ctx.given, wanted, strict=True) if is_wanted],
                    [bridge.here(grad) for grad in grads],
                    retain_graph=True,  # for the graph around it may be
                    allow_unused=True,
                )
            )
            return None, None, None, *(bridge.there(next(found)) if w else None for w in wanted)


def _run_as_one(op: Op, *args: Any, **kwargs: Any) -> Any:
    named = {arg.name: value for arg, value in zip(op._schema.arguments, args, strict=False)}
    named |= kwargs
    _check_devices(op, named)
    leaves, spec = _pytree.tree_flatten(list(named.values()))
    return _AsOne.apply(op, list(named), spec, *leaves)  # type: ignore[no-untyped-call]
