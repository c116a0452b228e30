"""Patches that make a model's code see the simulated device instead of its stand-in.

If the code names the device, the stand-in is used. If it asks a tensor or torch about the device,
the answer is that of the real device. torch's own code sees the stand-in.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from ...live.tracing.program.source_lines import is_users
from .kernels import Kernels
from .torch_answers import TYPES, answers, replaced_attribute

_STAND_IN = "lazy"
_STANDING_IN = re.compile(rf"\b{_STAND_IN}:(\d+)")
_NAMING = (str, torch.device)


class FakeDevice:
    """Maps devices to stand-ins: `lazy:0` is the wanted device, other indices are its siblings.

    Attributes:
        name: the wanted device, for example `cuda:0`.
        kind: its type, for example `cuda`.
        device: its stand-in.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device(_STAND_IN, 0)
        self.kind, _, index = name.partition(":")
        self._index = int(index or 0)

    def of(self, device: object) -> torch.device | None:
        """The stand-in for a named device; None if it is not of the simulated type."""
        if isinstance(device, int) and not isinstance(device, bool):
            return self._numbered(device)
        if not isinstance(device, _NAMING):
            return None
        kind, _, index = str(device).partition(":")
        if kind != self.kind or (index and not index.isdecimal()):
            return None
        return self._numbered(int(index) if index else self._index)

    def _numbered(self, index: int) -> torch.device:
        return torch.device(_STAND_IN, 0 if index == self._index else index + 1)

    def real(self, device: torch.device) -> torch.device:
        """The device for which a stand-in stands; another device is returned as it is."""
        if device.type != _STAND_IN:
            return device
        return torch.device(self.call(str(device)))

    def call(self, text: str) -> str:
        """A text with stand-ins replaced by the real devices."""

        def name(found: re.Match[str]) -> str:
            index = int(found[1])
            return self.name if index == 0 else f"{self.kind}:{index - 1}"

        return _STANDING_IN.sub(name, text)


class Valueless(FakeTensorMode):
    """A mode of fake tensors in which real constants can also move to the simulated device."""

    @property
    def avoid_device_init(self) -> bool:
        """Whether a tensor that is copied to a device loses its value, even if it is known."""
        return True

    def __deepcopy__(self, memo: object) -> Valueless:
        return self  # copied tensors must have the same mode as the others


@contextmanager
def pretending(cast: FakeDevice, mode: FakeTensorMode) -> Iterator[None]:
    """A context that simulates the device; no tensor has values, on any device."""
    with ExitStack() as stack:
        for target, name, value in _pretences(cast):
            stack.enter_context(replaced_attribute(target, name, value))
        stack.enter_context(replaced_attribute(torch.nn.Module, "_apply", _apply))
        stack.enter_context(mode)
        stack.enter_context(Kernels(cast.kind, cast.device.type))
        stack.enter_context(Devices(cast))
        yield


def _pretences(cast: FakeDevice) -> list[tuple[Any, str, Any]]:
    """The replaced attributes that describe the device: owner, name, and new value."""
    return [
        (FakeTensor, "device", _device_property(cast)),
        (
            FakeTensor,
            "is_cuda",
            property(lambda tensor: cast.real(tensor.fake_device).type == "cuda"),
        ),
        # the device whose generator is saved
        (checkpoint, "_infer_device_type", lambda *args: "cpu"),
        *answers(cast.name),
    ]


def _device_property(cast: FakeDevice) -> property:
    """`FakeTensor.device`, which returns the simulated device to user code."""
    truly: Any = FakeTensor.__dict__["device"]

    def device(tensor: FakeTensor) -> torch.device:
        found: torch.device = truly.fget(tensor)
        # Within an operation, no function mode is active that maps a named device to its stand-in.
        spoken = torch._C._len_torch_function_stack() > 0
        users = is_users(sys._getframe(1).f_code.co_filename)
        return cast.real(found) if spoken and users else found

    return property(device, truly.fset)


class Devices(TorchFunctionMode):
    """Replaces a named device by its stand-in in calls of torch."""

    def __init__(self, cast: FakeDevice) -> None:
        super().__init__()
        self._cast = cast
        self._kind = cast.kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None:
            usual = _usual_device()  # torch would fill it in after this mode
            if usual is not None and self._cast.of(usual) is not None:
                kwargs["device"] = usual
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0]
        if name == "type" and args:
            return self._typed(func, args, kwargs)
        kwargs.pop("pin_memory", None)
        if name == self._kind and args and isinstance(args[0], torch.Tensor):  # x.cuda()
            named = args[1] if len(args) > 1 else kwargs.get("device")
            func, kwargs = torch.Tensor.to, {}
            args = args[0], self._cast.of(self._kind if named is None else named)
        # the position of an argument that may name a device without being a `torch.device`
        first = {"to": 1, "_parse_to": 0}.get(name)
        args = tuple(
            self._cast.of(each) or each if isinstance(each, torch.device) or n == first else each
            for n, each in enumerate(args)
        )
        if kwargs.get("device") is not None:
            kwargs["device"] = self._cast.of(kwargs["device"]) or kwargs["device"]
        target = next(
            (
                each
                for each in (*args, kwargs.get("device"))
                if isinstance(each, torch.device) and each.type == _STAND_IN
            ),
            None,
        )
        if target is None or not args:
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and _is_plain(args):
            return _made(func, args, {**kwargs, "device": target})
        if isinstance(args[0], FakeTensor) and args[0].constant is not None:
            # Its known value is on the CPU, but torch would look for it on the stand-in.
            with replaced_attribute(args[0], "constant", None):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _typed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`tensor.type(...)`, whose type names contain the device."""
        wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
        spelled = getattr(wanted, "__name__", "") if isinstance(wanted, type) else wanted
        if isinstance(spelled, str):
            where, _, kind = spelled.rpartition(".")
            dtype = TYPES.get(kind)
            there = where.endswith(f".{self._kind}") or getattr(wanted, "home", None) is not None
            if dtype is not None and there:
                return args[0].to(self._cast.device, dtype)
        found = func(*args, **kwargs)
        if isinstance(found, str):
            return found.replace(f".{_STAND_IN}.", f".{self._kind}.")
        return found


def _usual_device() -> torch.device | None:
    """The device that `with torch.device(...)` or `torch.set_default_device` names."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def _is_plain(args: Sequence[Any]) -> bool:
    return not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(args))


def _made(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The result of `torch.tensor` or `torch.as_tensor` for plain numbers, without values."""
    with _disable_current_modes():
        real = func(*args, **{**kwargs, "device": "cpu"})
    grad = bool(kwargs.get("requires_grad"))
    return torch.empty(real.shape, dtype=real.dtype, device=kwargs["device"], requires_grad=grad)


# -- moved parameters ------------------------------------------------------------------------------


def place(module: torch.nn.Module, where: Callable[[str], torch.device]) -> None:
    """Move each parameter and buffer to the device that `where` returns for its name."""
    moved: dict[int, tuple[Any, Any]] = {}
    for prefix, each in module.named_modules():
        for part in (each._parameters, each._buffers):
            for name, tensor in part.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    key = f"{prefix}.{name}" if prefix else name
                    moved[id(tensor)] = tensor, valueless(tensor, where(key))
                part[name] = moved[id(tensor)][1]
    _follow(module, moved)


def valueless(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like another one, on a device; a parameter if the other is one.

    Raises:
        NotImplementedError: the layout isn't strided.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"a fake tensor of layout {tensor.layout}")
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply` for fake tensors, which can't be changed in place."""
    moved: dict[int, tuple[Any, Any]] = {}
    for each in module.modules() if recurse else (module,):
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                moved[id(parameter)] = parameter, _remade(parameter, fn)
            each._parameters[name] = moved[id(parameter)][1]
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fn(buffer)
    _follow(module, moved)
    return module


def _remade(parameter: torch.nn.Parameter, fn: Callable[[Any], Any]) -> Any:
    with torch.no_grad():
        made = fn(parameter)
    if made is parameter:
        return parameter
    return torch.nn.Parameter(made, parameter.requires_grad)


def _follow(module: torch.nn.Module, moved: Mapping[int, tuple[Any, Any]]) -> None:
    """Update other references to moved parameters, because torch moves real parameters in place.

    For example, an LSTM's list of its weights. Buffers need no update: torch replaces them too.
    """

    def new(value: Any) -> Any:
        found = moved.get(id(value))
        return found[1] if found and isinstance(value, torch.nn.Parameter) else value

    for each in module.modules():
        for name, value in list(vars(each).items()):
            if type(value) is list:
                value[:] = [new(item) for item in value]
            elif isinstance(value, torch.nn.Parameter):
                each.__dict__[name] = new(value)
