"""A device that isn't there, played by tensors without values, in a process of its own.

`FakeTensorMode` computes shapes, dtypes and devices and no values. A fake `cuda:0` can't have an
autograd graph where torch is built without CUDA, which ends the process; but every build has what
autograd needs for the device type `lazy`, which stands in. Whatever the model's code says of the
real device is taken to mean the stand-in.

    python -c 'from ckptmove.rehearsal.simulation import main; main()' < request.json > result.json
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .. import errors
from .factories import Built
from .findings import CHECKS, SKIPPED, Finding, spell, text_of
from .fitting import Fit
from .inputs import Batch
from .performing import Request, perform
from .pretending import Cast, place, pretending, valueless
from .saved import Placing, Saved
from .stages import Stage, is_mismatch

PATIENCE = 600.0  # seconds
_SMALL = 256 << 20  # bytes of a checkpoint whose model may be built with values
_MOST_SAID = 1 << 16  # bytes of what the process said last
#: Nothing is imported from the folder that it runs in, where a checkpoint may have brought code.
_BEGIN = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from ckptmove.rehearsal.simulation import main; main()"
)

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
    r"not compiled with \w+ enabled|compiled without \w+ support|not linked with support|"
    r"without ATen_\w+|NVIDIA driver|no \w+ GPUs|not an accelerator|"
    r"storage has no data|_cuda_?\w+|^NYI",
    re.IGNORECASE,
)


class _NotPlayed(Exception):
    """This can't be simulated."""


class Simulated(Stage):
    """A device that is played. Its tensors have no values."""

    values = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._cast = Cast(name)
        self.device = self._cast.device
        # Constants of the user's modules are real, and on the CPU.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def entered(self) -> AbstractContextManager[Any]:
        """See Stage."""
        return pretending(self._cast, self._mode)

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
        host = torch.device("cpu")
        content = {
            key: valueless(value, host) if isinstance(value, torch.Tensor) else value
            for key, value in fit.state.content.items()
        }
        module.load_state_dict(content, strict=True)

    def moved(self, module: torch.nn.Module, fit: Fit | None, saved: Saved, to: Placing) -> None:
        """See Stage. What is said to be elsewhere stays behind, as `assign=True` has it."""
        away = set()
        if fit is not None:
            path = fit.state.path
            away = {key for key in fit.state.content if to.is_elsewhere(saved.label((*path, key)))}
        place(module, lambda key: torch.device("cpu") if key in away else self.device)

    def slot(self, value: Any, label: str | None, slot: str) -> Any:
        """See Stage. A step has a value, since optimizers compute with it on the host."""
        if slot in ("step", "mu_product") and isinstance(value, torch.Tensor):
            return torch.tensor(1.0)

        def played(each: Any) -> Any:
            return valueless(each, self.device) if isinstance(each, torch.Tensor) else each

        return pytree.tree_map(played, value)

    def hyper(self, value: Any) -> Any:
        """See Stage."""
        return torch.tensor(1e-3) if isinstance(value, torch.Tensor) else value

    def batch(self, batch: Batch) -> Batch:
        """See Stage."""

        def played(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=self.device)

        args, kwargs = pytree.tree_map(played, (batch.args, batch.kwargs))
        return Batch(args, kwargs, batch.said, batch.labelled)

    def excuse(self, error: BaseException) -> str | None:
        """See Stage."""
        if isinstance(error, _NotPlayed):
            return str(error)
        if type(error).__name__ in _NO_VALUE:
            return f"{getattr(error, 'func', '') or spell(error)} needs values"
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            return f"it is compiled: {spell(error)}"
        if not is_mismatch(error) and _OF_FAKES.search(text_of(error)):
            return self.call(spell(error))
        return None

    def call(self, text: str) -> str:
        """See Stage."""
        return self._cast.call(text)


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
            [sys.executable, "-c", _BEGIN],
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
