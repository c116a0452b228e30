"""Run a whole script on a simulated device with real values, beside the real CPU.

`device` has the kernels; this module has the attributes and functions that Python code sees.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.jit._script import RecursiveScriptModule
from torch.utils._device import _device_constructors

from .device import install
from .device_kernels import generators, type_name
from .device_memory import NAME, THERE, Device, device_of, is_there, shown
from .hooks import guarded_hooks
from .pinning import pinning
from .torch_answers import TYPES, Stream, answers, noop, replaced_attribute

_true_data: Any = torch._C.TensorBase.data
_true_type: Any = torch.Tensor.type
_true_device_of_storage: Any = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]
_truly_compatible: Any = torch._has_compatible_shallow_copy_type
_truly_wrapped: Any = Tensor._make_wrapper_subclass


@contextmanager
def hosting(device: torch.device) -> Iterator[None]:
    """A context that simulates the device; its kernels stay registered in this process.

    Raises:
        NotSimulated: it can't be simulated.
    """
    # Both list functions of torch by identity, so they must run before functions are replaced.
    importlib.import_module("torch._dynamo")
    _device_constructors()
    install(device)
    with ExitStack() as stack:
        for target, name, value in chain(
            answers(str(device)), _seen(device), _asked(device), guarded_hooks(), pinning()
        ):
            if not hasattr(target, name):
                continue
            scripted = _find_builtin(getattr(target, name))
            if scripted is not None:  # TorchScript knows torch's functions by identity
                _register_builtin(value, scripted)
            stack.enter_context(replaced_attribute(target, name, value))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".pin_memory. argument is set as true but no")
        yield


def call(text: str) -> str:
    """A text in which the stand-in is replaced by the device that is simulated."""
    kind = shown.device.type
    text = text.replace(f"{NAME}:0", str(shown.device)).replace(NAME, kind)
    return text.replace("PrivateUse1", kind.upper())


# -- attributes of tensors -------------------------------------------------------------------------


def _seen(device: torch.device) -> list[tuple[Any, str, Any]]:
    is_kind = f"is_{device.type}"
    storage = torch.UntypedStorage
    data = property(_true_data.__get__, _set_data, _true_data.__delete__)
    return [
        (Tensor, "device", property(_shown_device)),
        (Tensor, is_kind, property(is_there)),
        (Tensor, "data", data),
        (Tensor, "type", _typed),
        (Tensor, device.type, _brought),
        (storage, "device", property(_device_of_storage)),
        (storage, is_kind, property(lambda each: _device_of_storage(each) == shown.device)),
        (torch, "_has_compatible_shallow_copy_type", _compatible),
        (Tensor, "_make_wrapper_subclass", staticmethod(_wrapped)),
        (RecursiveScriptModule, "_apply", _apply_to_script),
    ]


def _shown_device(tensor: Tensor) -> torch.device:
    found = device_of(tensor)
    return shown.device if found.type == NAME else found


def _device_of_storage(storage: Any) -> torch.device:
    found: torch.device = _true_device_of_storage(storage)
    return shown.device if found.type == NAME else found


def _compatible(one: Tensor, other: Tensor) -> bool:
    """Whether `one.data = other` is allowed; it is between the CPU and the device, as with CUDA."""
    if {device_of(one).type, device_of(other).type} == {"cpu", NAME}:
        return True
    return bool(_truly_compatible(one, other))


def _wrapped(*args: Any, **kwargs: Any) -> Any:
    """`Tensor._make_wrapper_subclass`, which makes nested tensors and other subclasses."""
    args = tuple(shown.true_device(each) if isinstance(each, Device) else each for each in args)
    if "device" in kwargs:
        kwargs["device"] = shown.true_device(kwargs["device"])
    return _truly_wrapped(*args, **kwargs)


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`; between devices, `tensor` swaps its implementation with a new one."""
    if device_of(tensor).type == device_of(value).type:
        _true_data.__set__(tensor, value)
        return
    with torch.no_grad():
        gradient, learns = tensor.grad, tensor.requires_grad
        new = value.detach().requires_grad_(False)
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, learns)
        else:
            new = new.view_as(new) if new is value else new
            new.requires_grad_(learns)
    hooks = tensor._backward_hooks
    later = getattr(tensor, "_post_accumulate_grad_hooks", None)
    torch._C._swap_tensor_impl(tensor, new)
    if hooks:
        tensor._backward_hooks = hooks
    if later:
        tensor._post_accumulate_grad_hooks = later
    if gradient is not None:
        if device_of(gradient).type != device_of(tensor).type:
            _set_data(gradient, gradient.to(device_of(tensor)))
        tensor.grad = gradient


def _apply_to_script(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply` for scripted modules, whose tensors are in C++."""
    for each in module.modules() if recurse else (module,):
        for held in (each._parameters, each._buffers):
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                with torch.no_grad():
                    made = fn(tensor)
                if made is not tensor:
                    each._c.setattr(name, made.detach().requires_grad_(tensor.requires_grad))
    return module


def _brought(
    tensor: Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = torch.preserve_format,
) -> Tensor:
    """`Tensor.cuda`."""
    named = f"{shown.device.type}:{device}" if isinstance(device, int) else device
    there = shown.true_device(shown.device if named is None else named)
    return tensor.to(there, non_blocking=non_blocking, memory_format=memory_format)


def _typed(tensor: Tensor, wanted: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`, whose type names contain the device."""
    wanted = kwargs.pop("dtype", wanted)
    if wanted is None:
        return type_name(tensor)
    spelled = getattr(wanted, "__name__", "") if isinstance(wanted, type) else wanted
    if isinstance(spelled, str):
        where, _, kind = spelled.rpartition(".")
        there = where.endswith(f".{shown.device.type}") or hasattr(wanted, "home")
        if kind in TYPES and there:
            return tensor.to(THERE, TYPES[kind])
    return _true_type(tensor, wanted, *args, **kwargs)


# -- functions of torch ----------------------------------------------------------------------------


def _asked(device: torch.device) -> list[tuple[Any, str, Any]]:
    """The replaced functions that differ from those of `answers`, which serve valueless tensors."""
    accelerator = getattr(torch, "accelerator", None)
    found: list[tuple[Any, str, Any]] = [
        (torch, "Generator", _generator()),
        *(
            (of, name, _drawing(getattr(of, name), device.type))
            for of in (torch, Tensor, torch.utils.data.dataset)
            for name in _DRAWING
            if hasattr(of, name)
        ),
        (torch, "device", _DeviceClass("device", (), {"__module__": "torch"})),
        (torch, "compile", _compile),
        *((torch, name, _autocast(name, device.type)) for name in _AUTOCAST),
        (accelerator, "is_available", lambda: _count(device) > 0),
        (accelerator, "current_accelerator", lambda check_available=False: _kind(device)),
        (accelerator, "device_count", lambda: _count(device)),
        *((accelerator, name, _index(device)) for name in _INDEX),
        *((accelerator, name, noop()) for name in _ACCELERATED),
        (accelerator, "memory_stats", lambda device=None: defaultdict(int)),
        (accelerator, "memory_allocated", lambda device=None: 0),
        (accelerator, "max_memory_allocated", lambda device=None: 0),
        (accelerator, "current_stream", lambda device=None: Stream()),
        (accelerator, "device_index", lambda device: nullcontext()),
    ]
    if device.type == "cuda":
        cuda = torch.cuda
        found += [
            (cuda, "is_available", lambda: _count(device) > 0),
            (cuda, "device_count", lambda: _count(device)),
            (cuda, "is_initialized", lambda: True),
            (cuda, "_lazy_init", noop()),
            (cuda, "get_device_capability", lambda device=None: (8, 0)),
            (cuda, "get_arch_list", lambda: ["sm_80"]),
            (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        ]
    return found


def _count(device: torch.device) -> int:
    """The number of devices; 0 if the script hid them before it used one."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    mine = os.environ.get("CUDA_VISIBLE_DEVICES") != _visible and not shown.process
    return 0 if device.type == "cuda" and hidden and mine else (device.index or 0) + 1


_visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # the value before the script starts
_INDEX = ("current_device_index", "current_device_idx")
_ACCELERATED = ("set_device_index", "set_device_idx", "synchronize", "set_stream", "empty_cache")
#: Functions of torch and methods of tensors that draw random numbers; torch's data sets import one.
_DRAWING = (
    *("bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
)
_AUTOCAST = (
    *("set_autocast_enabled", "is_autocast_enabled"),
    *("get_autocast_dtype", "set_autocast_dtype"),
)


class _DeviceClass(type):
    """The class of `torch.device`; a plain number means a device of the simulated type."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = Device(*args, **kwargs)
        number = bool(args) and isinstance(args[0], int)
        return Device(shown.device.type, found.index) if number else found

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Device)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, Device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is Device

    def __hash__(cls) -> int:
        return hash(Device)


def _kind(device: torch.device) -> torch.device:
    return torch.device(device.type)


def _index(device: torch.device) -> Callable[[], int]:
    return lambda: device.index or 0


def _autocast(name: str, kind: str) -> Callable[..., Any]:
    """A function that gets or sets the autocast settings of a device type."""
    real = getattr(torch, name)

    def autocast(*args: Any) -> Any:
        named = bool(args) and isinstance(args[0], str)
        if (not named and kind == "cuda") or (named and args[0] == kind):
            args = (NAME, *args[named:])
        return real(*args)

    return autocast


def _generator() -> type:
    """`torch.Generator`, for the device too."""
    real = torch.Generator

    class Meta(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Generator(real, metaclass=Meta):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            there = torch.device(device).type in (shown.device.type, NAME)
            made: Any = real.__new__(cls, device="cpu" if there else device)  # type: ignore[call-arg]
            if there:
                generators[made._cdata] = made
            return made

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        @property
        def device(self) -> Any:
            there = self._cdata in generators
            return shown.device if there else real.device.__get__(self)

    return Generator


def _drawing(real: Any, kind: str) -> Callable[..., Any]:
    """A function that draws numbers: on the CPU, it refuses a generator of the device."""

    @functools.wraps(real)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        key = getattr(kwargs.get("generator"), "_cdata", None)
        if key in generators and not is_there(made):
            raise RuntimeError(f"Expected a 'cpu' device type for generator but found '{kind}'")
        return made

    return drawn


class _CompiledModule(torch.nn.Module):
    """The result of `torch.compile` for a module: it runs the module without compiling."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._orig_mod, name)


def _compile(model: Any = None, **kwargs: Any) -> Any:
    """`torch.compile`, without compiling: functions are returned as they are."""
    if model is None:
        return lambda found: _compile(found)
    return _CompiledModule(model) if isinstance(model, torch.nn.Module) else model
