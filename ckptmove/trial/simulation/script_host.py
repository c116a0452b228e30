"""Run a whole script with a simulated device beside the real CPU.

Tensors on the CPU have their values, so data is loaded, shuffled and counted as usual. Tensors that
go to the simulated device have no values; if the script asks for one, it is made up.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import Distribution
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...live.tracing.source_lines import user_line
from .kernels import Kernels
from .made_up_values import Guesses
from .patches import Devices, FakeDevice, Valueless, applying, pretences, valueless
from .torch_answers import replaced
from .torch_save import Files

#: Where a made up value of 1 would say that a gradient is infinite.
_OF_SCALING = "torch.amp.grad_scaler"


@contextmanager
def hosting(cast: FakeDevice) -> Iterator[Guesses]:
    """Play the device as long as this lasts, beside a CPU that is what it is.

    Gives what is told of values that aren't there.
    """
    mode = Valueless(allow_non_fake_inputs=True)
    guesses = Guesses()
    validates = Distribution._validate_args
    with ExitStack() as stack:
        for target, name, value in pretences(cast):
            stack.enter_context(replaced(target, name, value))
        exchanged = functools.partial(_exchanged, mode)
        stack.enter_context(replaced(torch.nn.Module, "_apply", applying(exchanged)))
        files = Files(cast, mode)
        stack.enter_context(replaced(torch, "save", files.save))
        stack.enter_context(replaced(torch, "load", files.load))
        for module, name, change in files.changes():
            stack.enter_context(replaced(module, name, change))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".pin_memory. argument is set as true but no")
        stack.enter_context(replaced(torch, "inference_mode", _inferring))
        for kind in _fused():
            stack.enter_context(replaced(kind, "__init__", _unfused(kind.__init__)))
        stack.callback(Distribution.set_default_validate_args, validates)
        Distribution.set_default_validate_args(False)  # made up values are in no range
        stack.enter_context(_There(cast, mode, guesses))
        stack.enter_context(Kernels(cast.kind, cast.device.type))
        stack.enter_context(_Devices(cast, guesses))
        yield guesses


class _Devices(Devices):
    """Tells values of what has none."""

    def __init__(self, cast: FakeDevice, guesses: Guesses) -> None:
        super().__init__(cast)
        self._guesses = guesses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = bool(args) and isinstance(args[0], FakeTensor)
        if asked and func in _VALUES:
            if func is not torch.Tensor.tolist:
                self._check_numpy(args[0], **(kwargs or {}))
            return func(self._guesses.filled(args[0]), *args[1:], **(kwargs or {}))
        if asked and func is torch.Tensor.__format__ and not args[0].dim():
            return format(args[0].item(), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def _check_numpy(
        self, tensor: FakeTensor, *args: object, force: bool = False, **kwargs: object
    ) -> None:
        """Raise what torch does of a tensor that can't be numpy's."""
        if force:
            return
        if tensor.fake_device.type != "cpu":
            raise TypeError(
                f"can't convert {self._cast.real(tensor.fake_device)} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )


#: What asks for all values of a tensor.
_VALUES = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)


class _There(TorchDispatchMode):
    """Has what is made on the device, or brought there, be without values.

    A number that is asked for is made up: 1, or what lets a scaled step be taken.
    """

    def __init__(self, cast: FakeDevice, mode: FakeTensorMode, guesses: Guesses) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = cast.device.type
        self._mode = mode
        self._guesses = guesses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        there = isinstance(device, torch.device) and device.type == self._kind
        if kwargs.get("generator") is not None and (there or _is_fake(args)):
            kwargs = {**kwargs, "generator": None}  # it is of the CPU
        if there:
            with self._mode:
                return func(*args, **kwargs)
        asked = func is torch.ops.aten._local_scalar_dense.default
        if asked and isinstance(args[0], FakeTensor) and args[0].constant is None:
            if _called_by(_OF_SCALING):
                return False if args[0].dtype is torch.bool else 0.0
            return self._guesses.answer(args[0])
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = self._made_up(func, args, kwargs)
        self._guesses.note(func, args, out)
        return out

    def _made_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives whose shapes hang on values: as if all were 1, and True."""

        def real(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            return torch.ones(value.shape, dtype=value.dtype, device="cpu")

        self._guesses.tell(user_line(sys._getframe(1)))
        home = next(
            each.fake_device
            for each in pytree.tree_leaves((args, kwargs))
            if isinstance(each, FakeTensor)
        )
        with _disable_current_modes():
            made = func(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))
        outputs, spec = pytree.tree_flatten(made)
        # How many go together stays on the host.
        there = 1 if func is torch.ops.aten._pack_padded_sequence.default else len(outputs)
        with self._mode:
            outputs[:there] = [
                valueless(each, home) if isinstance(each, torch.Tensor) else each
                for each in outputs[:there]
            ]
        return pytree.tree_unflatten(outputs, spec)


def _inferring(mode: Any = True) -> Any:
    """`torch.inference_mode`, in which there is no playing, as `torch.no_grad`."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.set_grad_enabled(torch.is_grad_enabled())


def _fused() -> list[type[torch.optim.Optimizer]]:
    """The optimizers that have fused kernels."""
    return [
        each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and "fused" in inspect.signature(each).parameters
    ]


def _unfused(make: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's `__init__` without fused kernels, which know no other devices."""

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fused"):
            kwargs["fused"] = None
        make(self, *args, **kwargs)

    return init


def _called_by(module: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(32):  # and those of the modes between
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def _is_fake(args: Any) -> bool:
    return any(isinstance(each, FakeTensor) for each in args)


def _exchanged(
    mode: FakeTensorMode, parameter: torch.nn.Parameter, fn: Callable[[Any], Any]
) -> torch.nn.Parameter:
    """A parameter to which a function was applied: the same object, wherever it goes."""
    with torch.no_grad():
        source: torch.Tensor = parameter
        if not isinstance(parameter, FakeTensor):
            with mode:  # the parameter itself must not be made into one, or it can't be exchanged
                source = valueless(parameter, parameter.device)
        made = fn(source)
        if made is source:
            return parameter
        if made.device.type == "cpu" and source is not parameter:  # it keeps its values
            parameter.data = fn(parameter.data)
            return parameter
        gradient = None if parameter.grad is None else fn(parameter.grad)
    new = torch.nn.Parameter(made.detach(), parameter.requires_grad)
    new.grad = gradient
    _swap(parameter, new)
    return parameter


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """`torch.utils.swap_tensors`, whatever else holds on to them.

    A graph that does keeps what it had, as it does of a parameter that is moved in place.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
