"""Record in a history where the user's program makes, fills and moves modules and other objects."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.data import DataLoader

from ..live.tracing.program.source_lines import user_line
from ..live.tracing.recording.history import History
from ..live.tracing.recording.host_copies import PendingCopies
from ..live.tracing.recording.operations import LOAD, tensors_of
from ..live.tracing.recording.recorder import Recorder
from ..live.tracing.recording.tensor_names import TensorNames
from ..reports.events import Site
from .simulation.torch_answers import replaced_attribute

_MOVES = ("to", "cuda", "cpu", "xpu", "to_empty")

#: Functions that record the operations of a model themselves.
_TRACERS = ((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.onnx, "export"))


def _waits() -> Iterator[tuple[Any, str]]:
    """What waits for the device: each owner, and the name of its function."""
    yield from ((of, "synchronize") for of in (torch.cuda, torch.cuda.Stream))
    yield from ((torch.cuda.Event, name) for name in ("synchronize", "query"))
    if hasattr(torch, "accelerator"):
        yield torch.accelerator, "synchronize"


@contextmanager
def told_to(recorder: Recorder) -> Iterator[None]:
    """A context that tells a recorder what the program makes, loads, moves and waits for."""
    history, names = recorder.history, recorder.names
    with ExitStack() as stack:
        for target, name in _waits():
            real = getattr(target, name, None)
            if real is not None:
                waits = _noting_waits(real, recorder.pending)
                stack.enter_context(replaced_attribute(target, name, waits))
        stack.enter_context(replaced_attribute(torch, "load", _noting_tensors(torch.load, names)))
        stack.enter_context(
            replaced_attribute(torch, "save", _noting_reads(torch.save, recorder.pending))
        )
        for target, name in _TRACERS:
            alone = _calling_alone(getattr(target, name), recorder)
            stack.enter_context(replaced_attribute(target, name, alone))
        for target, name, after in _calls(history):
            real = vars(target).get(name)
            failed = history.note_refused if name in _MOVES else None
            if real is not None:
                stack.enter_context(replaced_attribute(target, name, _then(real, after, failed)))
        data = vars(torch.Tensor).get("data")
        if isinstance(data, property):  # of a simulated device, which torch's own modes don't see
            sets = _noting_values(data.fset, recorder)
            told = property(data.fget, sets, data.fdel)
            stack.enter_context(replaced_attribute(torch.Tensor, "data", told))
        stack.enter_context(_told_of_parameters(history))
        maker = type(torch.device)
        # True only for the class of a simulated device; torch's own class can't be watched.
        if maker is not type:
            real = vars(maker)["__call__"]
            stack.enter_context(
                replaced_attribute(maker, "__call__", _noting_devices(real, history))
            )
        if isinstance(vars(torch.Generator).get("__init__"), type(_then)):
            real = vars(torch.Generator)["__init__"]
            told = _then(real, lambda made, args, kwargs, at: history.note_generator(made, at))
            stack.enter_context(replaced_attribute(torch.Generator, "__init__", told))
        yield


def _noting_values(real: Any, recorder: Recorder) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A setter of `.data` that records where it is used."""

    def set_values(tensor: torch.Tensor, value: torch.Tensor) -> None:
        real(tensor, value)
        recorder.updates.set_values(tensor, sys._getframe(1))
        recorder.history.note_values(tensor, sys._getframe(1))

    return set_values


@contextmanager
def _told_of_parameters(history: History) -> Iterator[None]:
    """A context that records in a history which module registers which parameter."""

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        history.note_parameter(module, name, parameter, sys._getframe(1))

    handle = hooks.register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def _calls(history: History) -> Iterator[tuple[type, str, Callable[..., None]]]:
    """The watched methods, each with the function to call after the method returned."""

    def made(each: Any, args: Any, kwargs: Any, at: FrameType) -> None:
        history.note_made(each, at)

    def moved(module: Any, args: Any, kwargs: Any, at: FrameType) -> None:
        given = [*args, *kwargs.values()]
        to = next((each for each in given if not isinstance(each, (torch.dtype, bool))), None)
        if to is not None or not given:  # else only the dtype changes
            history.note_moved(module, to, at)

    def filled(module: Any, args: Any, kwargs: Any, at: FrameType) -> None:
        if kwargs.get("assign", len(args) > 2 and args[2]):
            history.note_filled(module, at)

    def loaded(optimizer: Any, args: Any, kwargs: Any, at: FrameType) -> None:
        history.note_state(optimizer, at)

    def feeds(loader: Any, args: Any, kwargs: Any, at: FrameType) -> None:
        history.note_loader(loader, at)

    def casts(entered: Any, args: Any, kwargs: Any, at: FrameType) -> None:
        if entered._enabled:
            history.note_autocast(str(entered.device), at)

    yield torch.autocast, "__enter__", casts
    yield from ((nn.Module, name, made) for name in ("__init__", "__setstate__"))
    yield from ((nn.Module, name, moved) for name in _MOVES)
    yield nn.Module, "load_state_dict", filled
    yield torch.optim.Optimizer, "__init__", made
    yield torch.optim.Optimizer, "load_state_dict", loaded
    yield DataLoader, "__init__", feeds


def _then(
    real: Any,
    after: Callable[..., None],
    refused: Callable[[BaseException, FrameType], None] | None = None,
) -> Any:
    """Wrap a method: call `after` when a call returns, and `refused` on a RuntimeError."""

    @functools.wraps(real)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            out = real(self, *args, **kwargs)
        except RuntimeError as error:
            if refused is not None:
                refused(error, sys._getframe(1))
            raise
        after(self, args, kwargs, sys._getframe(1))
        return out

    return called


def _noting_tensors(real: Any, names: TensorNames) -> Any:
    """Wrap `torch.load` to record the tensors that it returns."""

    @functools.wraps(real)
    def load(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        site = Site("", "", LOAD, user_line(sys._getframe(1)))
        for each in tensors_of(found):
            names.made(each, site)
        return found

    return load


def _calling_alone(real: Any, recorder: Recorder) -> Any:
    """Wrap a function to call it while the recorder does not watch."""

    @functools.wraps(real)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with recorder.sampling.suspended():
            return real(*args, **kwargs)

    return alone


def _noting_waits(real: Any, pending: PendingCopies) -> Any:
    """Wrap a function that waits for the device, to record the wait."""

    @functools.wraps(real)
    def wait(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        pending.waited()
        return found

    return wait


def _noting_reads(real: Any, pending: PendingCopies) -> Any:
    """Wrap `torch.save` to record that it reads the tensors that it is given."""

    @functools.wraps(real)
    def save(*args: Any, **kwargs: Any) -> Any:
        if pending.is_pending:
            line = user_line(sys._getframe(1))
            for each in tensors_of([*args, *kwargs.values()]):
                pending.read(each, "save", line)
        return real(*args, **kwargs)

    return save


def _noting_devices(real: Any, history: History) -> Any:
    """Wrap the constructor of `torch.device` to record each device and each failed call."""

    @functools.wraps(real)
    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = real(cls, *args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            history.note_refused(error, sys._getframe(1))
            raise
        history.note_device(found, sys._getframe(1))
        return found

    return made
