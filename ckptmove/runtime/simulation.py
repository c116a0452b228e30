"""A device that isn't there, played by tensors without values, in a process of its own.

`FakeTensorMode` computes shapes, dtypes and devices and no values. A fake `cuda:0` can't have an
autograd graph where torch is built without CUDA, which ends the process; but every build has what
autograd needs for the device type `lazy`, which stands in. Whatever the model's code says of the
real device is taken to mean the stand-in.

    python -m ckptmove.runtime.simulation < request.json > result.json
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .. import errors
from .factories import Built
from .findings import CHECKS, SKIPPED, Finding, spell
from .fitting import Fit
from .inputs import Batch
from .performing import Request, perform
from .saved import Placing, Saved
from .stages import Stage, is_mismatch

STAND_IN = "lazy:0"
PATIENCE = 600.0  # seconds
_NAMING = (str, torch.device)
_SMALL = 256 << 20  # bytes of a checkpoint whose model may be built with values
_MOST_SAID = 1 << 16  # bytes of what the process said last

#: Exceptions by which torch says that a value is needed, or that there is no shape without one.
_NO_VALUE = frozenset(
    (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
        "UnsupportedFakeTensorException",
        "UnsupportedMutationAliasingException",
        "UnsupportedOperatorException",
    )
)
#: What real tensors on a real device would not say.
_OF_FAKES = re.compile(
    r"fake|lazy|meta tensor|tensor subclass|data.?pointer|data_ptr|symint|unbacked|"
    r"not compiled with \w+ enabled|not linked with support|NVIDIA driver|no \w+ GPUs|"
    r"storage has no data|_cuda_\w+",
    re.IGNORECASE,
)


# -- the stage -------------------------------------------------------------------------------------


class _Devices(TorchFunctionMode):
    """Takes what names a device to mean the stand-in."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        kind, _, index = wanted.partition(":")
        self._kind, self._index = kind, int(index or 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == self._kind and args and isinstance(args[0], torch.Tensor):  # x.cuda()
            device = args[1] if len(args) > 1 else kwargs.get("device")
            if device is None or self._is_meant(device):
                func, args, kwargs = torch.Tensor.to, (args[0], STAND_IN), {}
        if "device" in kwargs and self._is_meant(kwargs["device"]):
            kwargs["device"] = STAND_IN
        spelled = name in ("to", "_parse_to")
        args = tuple(
            STAND_IN
            if isinstance(each, torch.device if not spelled else (torch.device, str))
            and self._is_meant(each)
            else each
            for each in args
        )
        named = (each for each in (*args, kwargs.get("device")) if type(each) in _NAMING)
        moves = STAND_IN in map(str, named)
        if moves and func in (torch.tensor, torch.as_tensor) and _is_plain(args):
            return _made(func, args, kwargs)
        if moves and args and isinstance(args[0], FakeTensor) and args[0].constant is not None:
            # Its value is known on the CPU, and would be looked for on the stand-in.
            with _replaced(args[0], "constant", None):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_meant(self, device: Any) -> bool:
        if isinstance(device, int) and not isinstance(device, bool):
            return device == self._index
        if not isinstance(device, (str, torch.device)):
            return False
        kind, _, index = str(device).partition(":")
        return kind == self._kind and (not index or index == str(self._index))


class Simulated(Stage):
    """A device that is played. Its tensors have no values."""

    values = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device(STAND_IN)
        # Constants of the user's modules are real, and on the CPU.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See Stage."""
        with ExitStack() as stack:
            for target, name, value in _pretences(self.name):
                stack.enter_context(_replaced(target, name, value))
            stack.enter_context(_replaced(torch.nn.Module, "_apply", _apply))
            stack.enter_context(self._mode)
            stack.enter_context(_Devices(self.name))
            yield

    def build(self, make: Callable[[], Built], nbytes: int) -> Built:
        """See Stage. Code that needs values builds a small model with them."""
        try:
            built = make()
        except Exception as error:
            if nbytes > _SMALL or self.excuse(error) is None:
                raise
            with _disable_current_modes():
                built = make()
        if built.is_program and built.kind != "pickle":
            raise _NotPlayed(f"a program ({built.kind}) has its devices written into it")
        return built

    def load(self, module: torch.nn.Module, fit: Fit) -> None:
        """See Stage."""
        content = {
            key: _like(value, "cpu") if isinstance(value, torch.Tensor) else value
            for key, value in fit.state.content.items()
        }
        module.load_state_dict(content, strict=True)

    def moved(self, module: torch.nn.Module, fit: Fit | None, saved: Saved, to: Placing) -> None:
        """See Stage. What is said to be elsewhere stays behind, as `assign=True` has it."""
        away = set()
        if fit is not None:
            path = fit.state.path
            away = {key for key in fit.state.content if to.is_elsewhere(saved.label((*path, key)))}
        aliases: dict[int, tuple[Any, Any]] = {}
        for prefix, each in module.named_modules():
            for part in (each._parameters, each._buffers):
                for name, tensor in part.items():
                    if tensor is None:
                        continue
                    key = f"{prefix}.{name}" if prefix else name
                    device = "cpu" if key in away else STAND_IN
                    if id(tensor) not in aliases:
                        aliases[id(tensor)] = tensor, _like(tensor, device)
                    part[name] = aliases[id(tensor)][1]
        _follow(module, aliases)

    def slot(self, value: Any, label: str | None, slot: str) -> Any:
        """See Stage. A step has a value, since optimizers compute with it on the host."""
        if slot in ("step", "mu_product") and isinstance(value, torch.Tensor):
            return torch.tensor(1.0)

        def played(each: Any) -> Any:
            return _like(each, STAND_IN) if isinstance(each, torch.Tensor) else each

        return pytree.tree_map(played, value)

    def batch(self, batch: Batch) -> Batch:
        """See Stage."""

        def played(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=STAND_IN)

        args, kwargs = pytree.tree_map(played, (batch.args, batch.kwargs))
        return Batch(args, kwargs, batch.said, batch.labelled)

    def excuse(self, error: BaseException) -> str | None:
        """See Stage."""
        if isinstance(error, _NotPlayed):
            return str(error)
        if type(error).__name__ in _NO_VALUE:
            return f"{getattr(error, 'func', '') or spell(error)} needs values"
        if not is_mismatch(error) and _OF_FAKES.search(str(error)):
            return self.call(spell(error))
        return None

    def call(self, text: str) -> str:
        """See Stage."""
        return text.replace(STAND_IN, self.name)


class _NotPlayed(Exception):
    """This can't be simulated."""


def _is_plain(args: Sequence[Any]) -> bool:
    return not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(args))


def _made(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of numbers, without its values."""
    with _disable_current_modes():
        real = func(*args, **{**kwargs, "device": "cpu"})
    grad = bool(kwargs.get("requires_grad"))
    return torch.empty(real.shape, dtype=real.dtype, device=STAND_IN, requires_grad=grad)


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise _NotPlayed(f"a tensor of layout {tensor.layout}")
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _follow(module: torch.nn.Module, moved: Mapping[int, tuple[Any, Any]]) -> None:
    """Have other references to parameters follow; real ones are moved in place.

    As an LSTM's list of its weights. Buffers are replaced by torch too.
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


def _apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply` for fake tensors, which can't be changed in place."""
    aliases: dict[int, tuple[Any, Any]] = {}
    for each in module.modules() if recurse else (module,):
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in aliases:
                with torch.no_grad():
                    made = fn(parameter)
                needs = parameter.requires_grad
                made = parameter if made is parameter else torch.nn.Parameter(made, needs)
                aliases[id(parameter)] = parameter, made
            each._parameters[name] = aliases[id(parameter)][1]
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fn(buffer)
    _follow(module, aliases)
    return module


def _pretences(name: str) -> list[tuple[Any, str, Any]]:
    """What code asks to find out whether the device is there."""
    kind, _, index = name.partition(":")
    if kind == "cuda":
        count, current = int(index or 0) + 1, int(index or 0)
        return [
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: count),
            (torch.cuda, "current_device", lambda: current),
        ]
    if kind == "mps":
        return [(torch.backends.mps, "is_available", lambda: True)]
    return []


@contextmanager
def _replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


# -- the process -----------------------------------------------------------------------------------


def simulate(request: Request, *, patience: float = PATIENCE) -> tuple[Finding, ...]:
    """Rehearse on a played device, in another process.

    Args:
        request: what; its model must have a name.
        patience: seconds until it is ended.

    Raises:
        CkptmoveError: as `perform`.
    """
    said = json.dumps({**asdict(request), "path": str(Path(request.path).absolute())})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths())}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckptmove.runtime.simulation"],
            input=said.encode(),
            capture_output=True,
            timeout=patience,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _lost(f"it wasn't done after {patience:g} s")
    try:
        result = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr[-_MOST_SAID:].decode(errors="replace").strip().splitlines()
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        return _lost(f"its process ended ({how})", *lines[-1:])
    if "error" in result:
        kind = getattr(errors, result["error"], errors.CkptmoveError)
        raise kind(result["message"], path=result["path"], hint=result["hint"])
    return tuple(Finding(**each) for each in result["findings"])


def _paths() -> list[str]:
    package = str(Path(__file__).resolve().parents[2])
    return [package, *(str(Path(path).absolute()) for path in sys.path)]


def _lost(why: str, *lines: str) -> tuple[Finding, ...]:
    return tuple(Finding(check, SKIPPED, f"can't be simulated: {why}", lines) for check in CHECKS)


def main() -> None:
    """Rehearse what is asked for on stdin, and tell what was found on stdout."""
    telling = os.dup(1)
    os.dup2(2, 1)  # whatever the model's code prints
    asked = json.load(sys.stdin)
    request = Request(**{**asked, "inputs": tuple(asked["inputs"])})
    result: dict[str, Any]
    try:
        found = perform(request, Simulated(request.device))
        result = {"findings": [each.to_json() for each in found.listed()]}
    except errors.CkptmoveError as error:
        result = {
            "error": type(error).__name__,
            "message": str(error),
            "path": error.path,
            "hint": error.hint,
        }
    with os.fdopen(telling, "w") as out:
        json.dump(result, out)
    os._exit(0)  # torch may abort while it is torn down


if __name__ == "__main__":
    main()
