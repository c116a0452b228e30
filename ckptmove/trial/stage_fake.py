"""The stage of a trial on a simulated device: tensors without values, in a separate process.

`FakeTensorMode` computes shapes, dtypes and devices, but no values. If torch is built without CUDA,
a fake `cuda:0` cannot have an autograd graph: the process crashes. But every build of torch
supports autograd for the device type `lazy`, so this device is the stand-in. If the model's code
names the real device, the stand-in is used.
"""

from __future__ import annotations

import dis
import re
import sysconfig
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..display.phrases import format_error, text_of
from ..errors import CorruptError
from ..reports.validate import Finding
from .model.factory import BuiltModel, is_of_file
from .model.inputs import CallArguments
from .run import Request, perform
from .sandbox import confinement
from .simulation.device_memory import NotSimulated
from .simulation.patches import FakeDevice, place, pretending, valueless
from .stage import Stage, is_mismatch
from .state import checkpoint_state
from .state.checkpoint_state import SavedCheckpoint
from .state.state_dict_fit import Fit, loaded_into
from .subprocess_call import SubprocessLost, call_in_subprocess

_SMALL = 256 << 20  # a model is built with values only if its checkpoint has at most so many bytes

#: Exceptions with which torch says that an operation, or the shape of its result, needs a value.
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
#: Messages that real tensors on a real device would not cause.
_OF_FAKES = re.compile(
    r"\bfake\b|FakeTensor|\blazy\b|meta tensor|tensor subclass|data.?pointer|data_ptr|symint|"
    r"unbacked|not compiled with \w+ enabled|compiled without \w+ support|"
    r"not linked with support|without ATen_\w+|NCCL|NVIDIA driver|no \w+ GPUs|"
    r"(CUDA|HIP|cuDNN|cuBLAS) (driver|error)|with arguments from the  backend|"
    r"requires? CUDA|CUDA support|CUDA is not|"
    r"not an accelerator|accelerator device when none|storage has no data|_cuda_?\w+|"
    r"dummy base class|^NYI|PrivateUse1|TorchScript interpreter",
    re.IGNORECASE,
)
_LACKING = re.compile(r"Could not run '([^']+)'|You should register .*implement `(\w+)`")
_HOOKS = {
    "resizePrivateUse1Bytes": "a storage that changes its size (resize_)",
    "getPinnedMemoryAllocator": "a tensor that is made in pinned memory (pin_memory=True)",
}
#: Parts of a message that are ignored: quoted names, and paths.
_NAMED = re.compile(r"'[^']*'|\"[^\"]*\"|\S*[/\\]\S*")
#: Exceptions that the simulation does not cause.
_MISTAKES = (NameError, LookupError, ImportError, AttributeError, SyntaxError, FileNotFoundError)
_OURS = str(Path(__file__).parent)
_FAKES = str(Path(torch.__file__).parent / "_subclasses")
#: The folders of packages. If the environment extends another one, torch may be in the other one.
_PACKAGES = (
    str(Path(torch.__file__).parents[1]),
    *(str(Path(sysconfig.get_path(kind))) for kind in ("purelib", "platlib", "stdlib")),
)


class SimulatedStage(Stage):
    """A simulated device. Its tensors have no values."""

    values = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._cast = FakeDevice(name)
        self.device = self._cast.device
        # Constants in the user's modules are real tensors on the CPU.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def context(self) -> AbstractContextManager[Any]:
        """See Stage."""
        return pretending(self._cast, self._mode)

    def read(self, path: str) -> SavedCheckpoint:
        """See Stage. Tensors that torch can't make without values can't be simulated."""
        try:
            return checkpoint_state.read(path, values=False)
        except CorruptError as error:
            checkpoint_state.read(path)  # raises if the file is damaged
            raise NotSimulated(str(error)) from error

    def build(self, make: Callable[[], BuiltModel], nbytes: int) -> BuiltModel:
        """See Stage. If the code needs values, a small model is built with values."""
        try:
            built = make()
        except Exception as error:
            if nbytes > _SMALL or self.excuse(error) is None:
                raise
            with _disable_current_modes():
                built = make()
        if built.is_program and built.kind != "pickle":
            raise NotSimulated(f"a program ({built.kind}) has fixed devices")
        return built

    def load(self, module: torch.nn.Module, fit: Fit) -> None:
        """See Stage."""
        host = torch.device("cpu")
        with _disable_current_modes():  # torch's own hook does this, but fails in a mode
            for key, own in module.state_dict(keep_vars=True).items():
                saved = fit.state.content.get(key)
                if is_lazy(own) and isinstance(saved, torch.Tensor):
                    own.materialize(tuple(saved.shape))
        loaded_into(module, fit, lambda saved: valueless(saved, host))

    def move(self, module: torch.nn.Module, away: Container[str] = ()) -> None:
        """See Stage. Tensors in `away` stay on the CPU, as after loading with `assign=True`."""
        place(module, lambda key: torch.device("cpu") if key in away else self.device)

    def slot(self, value: Any, label: str | None, slot: str) -> Any:
        """See Stage. A step counter gets a value, because optimizers use it on the host."""
        if slot in ("step", "mu_product") and isinstance(value, torch.Tensor):
            return torch.tensor(1.0)

        def without_values(each: Any) -> Any:
            return valueless(each, self.device) if isinstance(each, torch.Tensor) else each

        return pytree.tree_map(without_values, value)

    def hyper(self, value: Any) -> Any:
        """See Stage."""
        return torch.tensor(1e-3) if isinstance(value, torch.Tensor) else value

    def batch(self, batch: CallArguments) -> CallArguments:
        """See Stage."""

        def without_values(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=self.device)

        args, kwargs = pytree.tree_map(without_values, (batch.args, batch.kwargs))
        return CallArguments(args, kwargs, batch.said, batch.labelled)

    def excuse(self, error: BaseException) -> str | None:
        """See Stage."""
        return limit_of_simulation(error, self.call)

    def call(self, text: str) -> str:
        """See Stage."""
        return self._cast.call(text)


def limit_of_simulation(error: BaseException, call: Callable[[str], str]) -> str | None:
    """The reason if the simulation, not the model, caused an exception; else None.

    Args:
        error: the exception.
        call: replaces the stand-in in a text by the device that the user knows.
    """
    if isinstance(error, NotSimulated):
        return str(error)
    if type(error).__name__ in _NO_VALUE:
        return f"{getattr(error, 'func', '') or format_error(error)} needs values"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"it is compiled: {format_error(error)}"
    lacking = _LACKING.match(str(error))
    if lacking:
        return f"{lacking[1] or _HOOKS.get(lacking[2], lacking[2])} is not simulated"
    if is_mismatch(error) or "invalid device ordinal" in str(error):
        return None
    file, raised = _origin(error)
    if isinstance(error, AssertionError) and file.startswith(_FAKES):
        return f"torch can't make a tensor without values: {format_error(error)}"
    complained = raised and not file.startswith((_OURS, *_PACKAGES))
    if complained or isinstance(error, _MISTAKES):
        return None
    lacks = isinstance(error, NotImplementedError) and not raised  # from torch's C++
    if lacks or _OF_FAKES.search(_NAMED.sub("", text_of(error))):
        return call(format_error(error))
    return None


def _origin(error: BaseException) -> tuple[str, bool]:
    """The file that an exception comes from, and whether a `raise` statement there raised it.

    Otherwise code that is not Python raised it.
    """
    traceback = error.__traceback__
    if traceback is None:
        return "", False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    raised = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return code.co_filename, raised


# -- the process -----------------------------------------------------------------------------------


def simulate(request: Request, *, patience: float) -> tuple[Finding, ...]:
    """Run a trial on a simulated device, in another process.

    If that process dies of a crash, the simulation may have caused it: the trial is run again, on
    the CPU with values. The model caused the crash if that process dies too.

    Args:
        request: the trial; its model must have a name.
        patience: seconds until the process is ended.

    Raises:
        CkptmoveError: see `perform`.
    """
    asked = {**asdict(request), "path": str(Path(request.path).absolute()), "real": False}
    guarded = is_of_file(request.model)
    try:
        result = call_in_subprocess(run_simulated, asked, patience=patience, guarded=guarded)
        return confinement.findings(result)
    except SubprocessLost as lost:
        if not lost.crashed:
            return confinement.findings_of_ended(lost)
        crash = lost
    try:
        real = {**asked, "device": "cpu", "real": True}
        call_in_subprocess(run_simulated, real, patience=patience, guarded=guarded)
    except SubprocessLost:
        return confinement.findings_of_ended(crash)
    return confinement.findings_of_ended(crash, f"{crash}; on the CPU, it does not end")


def run_simulated(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the requested trial; called in that process. `real`: on a real device."""
    told = {key: value for key, value in asked.items() if key != "real"}
    request = Request(**{**told, "inputs": tuple(told["inputs"])})
    lacking: tuple[str, ...] = ()
    if is_of_file(request.model):
        path = request.path if request.model is None else str(request.model)
        inputs, optimizer = request.inputs, request.optimizer
        trust = request.trust_pickle
        lacking = confinement.begin(path, inputs, optimizer, "cpu", trust_pickle=trust)
    stage = Stage(request.device) if asked["real"] else SimulatedStage(request.device)
    found = perform(request, stage, report=confinement.report)
    return confinement.result(found, lacking)
