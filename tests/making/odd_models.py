"""Models that torch allows and few people write, to rehearse with; each takes `float32[2,3]`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

INPUT = "float32[2,3]"


class Plain(nn.Module):
    """A layer, and whatever a subclass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.made()
        self.add()

    def made(self) -> nn.Module:
        """The layer."""
        return nn.Linear(3, 4)

    def add(self) -> None:
        """Add what is beside the layer."""

    def forward(self, rows: torch.Tensor) -> Any:
        return self.layer(rows)


def _with(**members: Any) -> type[Plain]:
    return type("Odd", (Plain,), members)


def _around(make: Callable[[], Any]) -> type[Plain]:
    """A class of models whose layer is made so."""
    return _with(made=lambda self: make())


def _norm(make: Callable[[nn.Module], nn.Module]) -> type[Plain]:
    return _around(lambda: make(nn.Linear(3, 3)))


def _beside(make: Callable[[], torch.Tensor]) -> type[Plain]:
    """A class of models that hold such a parameter or buffer beside their layer."""

    def add(self: nn.Module) -> None:
        made = make()
        if isinstance(made, nn.Parameter):
            self.register_parameter("beside", made)
        else:
            self.register_buffer("beside", made)

    return _with(add=add)


def _doing(act: Callable[[torch.Tensor], object]) -> type[Plain]:
    """A class of models that do this before they compute."""

    def forward(self: Plain, rows: torch.Tensor) -> Any:
        act(rows)
        return self.layer(rows)

    return _with(forward=forward)


def _raising(error: BaseException) -> Callable[..., Any]:
    def method(*args: Any, **options: Any) -> Any:
        raise error

    return method


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 4)


def _pruned() -> Any:
    return prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5)


def _dynamic() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = nn.Sequential(nn.Linear(3, 4))
        return torch.ao.quantization.quantize_dynamic(layers, {nn.Linear}, dtype=torch.qint8)


def _tied() -> nn.Module:
    first, second = nn.LazyLinear(3, bias=False), nn.LazyLinear(3, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, second)


def _by_channel() -> torch.Tensor:
    zeros = torch.zeros(3, dtype=torch.long)
    return torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), zeros, 0, torch.qint8)


def _refusing(self: Plain) -> None:
    """Add a hook that refuses a state that fits by names and shapes."""
    add: Any = self._register_load_state_dict_pre_hook
    add(_raising(KeyError("a hook")))


def _within_itself(self: Plain, rows: torch.Tensor) -> Any:
    out: dict[Any, Any] = {"rows": [self.layer(rows)], 1: (None, object())}
    out["itself"] = out
    return out


def _reading_values(rows: torch.Tensor) -> None:
    """Crash as C code does that reads a tensor without values."""
    if isinstance(rows, FakeTensor):
        ctypes.string_at(0)


#: Name → a class, and the outcomes of `model` and `step`, on the CPU and on a simulated device:
#: P passed, F failed, s skipped.
ODD: dict[str, tuple[type[nn.Module], str]] = {
    "lazy": (_around(lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())), "PP PP"),
    "lazy_and_tied": (_around(_tied), "PP PP"),
    "spectral": (_norm(spectral_norm), "PP PP"),
    "spectral_parametrization": (_norm(parametrizations.spectral_norm), "PP PP"),
    "weight_normalized": (_norm(weight_norm), "PP PP"),
    "weight_parametrization": (_norm(parametrizations.weight_norm), "PP PP"),
    "orthogonal": (_norm(parametrizations.orthogonal), "PP PP"),
    "pruned": (_around(_pruned), "PP PP"),
    "scripted": (_around(lambda: torch.jit.script(nn.Linear(3, 4))), "PP PP"),
    "compiled": (_around(lambda: torch.compile(nn.Linear(3, 4), backend="eager")), "PP PP"),
    "on_meta": (_around(_on_meta), "PP PP"),
    "frozen": (_around(lambda: nn.Linear(3, 4).requires_grad_(False)), "PF PF"),
    "quantized_layer": (_around(_dynamic), "PF ss"),
    "quantized": (
        _beside(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        "PP ss",
    ),
    "quantized_by_channel": (_beside(_by_channel), "PP ss"),
    "sparse": (_beside(lambda: torch.eye(3).to_sparse()), "PP ss"),
    "sparse_parameter": (_beside(lambda: nn.Parameter(torch.eye(3).to_sparse())), "PP ss"),
    "sparse_rows": (_beside(lambda: torch.eye(3).to_sparse_csr()), "PP ss"),
    "nested": (
        _beside(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "Fs ss",
    ),
    "float8": (_beside(lambda: torch.ones(3).to(torch.float8_e4m3fn)), "PP PP"),
    "conjugate": (_beside(lambda: torch.ones(3, dtype=torch.complex64).conj()), "PP PP"),
    "empty": (_beside(lambda: nn.Parameter(torch.empty(0, 3))), "PP PP"),
    "extra_state": (
        _with(get_extra_state=lambda self: {"kept": 1}, set_extra_state=lambda self, state: None),
        "PP PP",
    ),
    "hook_refuses": (_with(add=_refusing), "Fs Fs"),
    "odd_keys": (_with(state_dict=lambda self, *args, **options: {1: torch.ones(2)}), "Fs Fs"),
    "no_state": (_with(state_dict=lambda self, *args, **options: None), "Fs Fs"),
    "state_raises": (_with(state_dict=_raising(RuntimeError("no state"))), "Fs Fs"),
    "parameters_raise": (_with(named_parameters=_raising(ValueError("none"))), "PF PF"),
    "modules_raise": (_with(named_modules=_raising(ValueError("none"))), "PF Fs"),
    "length_raises": (_with(__len__=_raising(ValueError("no length"))), "PP PP"),
    "equality_raises": (_with(__eq__=_raising(ValueError("no")), __hash__=lambda self: 1), "PF PF"),
    "unhashable": (_with(__hash__=None), "PF Fs"),
    "returns_itself": (_with(forward=_within_itself), "PP PP"),
    "calls_itself": (_with(forward=lambda self, rows: self(rows)), "PF PF"),
    "locked": (_doing(lambda rows: threading.Lock().acquire()), "PP PP"),
    "lacks_memory": (_doing(_raising(MemoryError())), "PF PF"),
    "exits": (_doing(_raising(SystemExit(0))), "PF PF"),
    "leaves": (_doing(_raising(GeneratorExit())), "PF PF"),
}
#: Name → a class of models that end their process, the check that this fails, and how it ended.
DYING: dict[str, tuple[type[nn.Module], str, str]] = {
    "exits_at_once": (_with(add=lambda self: os._exit(0)), "model", "(exit 0)"),
    "exits_later": (_doing(lambda rows: os._exit(1)), "step", "(exit 1)"),
    "crashes": (_doing(lambda rows: ctypes.string_at(0)), "step", "(signal 11)"),
    "is_killed": (_doing(lambda rows: os.kill(os.getpid(), signal.SIGKILL)), "step", "(signal 9)"),
}
#: A model that the simulation makes crash.
CRASHING = _doing(_reading_values)


def named(name: str) -> str:
    """The import path of a model of this file."""
    return f"{__name__}:{name}"


def __getattr__(name: str) -> type[nn.Module]:
    if name in ODD:
        return ODD[name][0]
    if name in DYING:
        return DYING[name][0]
    raise AttributeError(name)


def saved(name: str, path: Path) -> Path:
    """A file with the state of an odd model, after its lazy parts have taken their shapes."""
    own = name not in DYING and name != "on_meta"  # what is on `meta` has no values to be saved
    model = getattr(sys.modules[__name__], name)() if own else Plain()
    if name.startswith("lazy"):
        model(torch.ones(2, 3))
    torch.save(nn.Module.state_dict(model), path)
    return path
