"""Implements `ckptmove.doctor`: find out why a model does not train on the GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import StrPath, UsageError
from ..manifest.device import with_index
from ..reports.doctor import Diagnosis, Verdict
from ..runtime.torch_import import NOT_INSTALLED, why_no_torch
from .options import Input, Option, Simulate, declare_options

if TYPE_CHECKING:
    from ..runtime.environment.facts import Facts
    from ..trial.subprocess_call import SubprocessLost

_NOT_SIMULATED = "nothing was simulated: the CPU is there; name another, e.g. --device cuda:0"
_NO_GPU = (
    "no GPU was found on this machine: --device cuda:0 says why torch can't use one, and "
    "--script FILE --device cuda:0 --simulate what a script does on one"
)
_NOT_RUN = "it was not run; --simulate simulates the device"
_STEPS = 2
_ONWARD = 20.0  # seconds that a script runs on after its steps, to evaluate and save
_LONGEST = 120.0  # seconds from the first call of a model to the first step
_NO_TORCH = Verdict("no-torch", "torch is not installed in this Python", "pip install torch")
_REPAIR = "make python -c 'import torch' work; a limit such as ulimit -v may be too low"

_MODEL, _SCRIPT = "Model", "Script"


@declare_options
def doctor(
    *,
    model: Annotated[
        str | os.PathLike[str] | Callable[..., Any] | None,
        Option(
            "Build, move and train the model that FACTORY makes.",
            "FACTORY",
            _MODEL,
            python="FACTORY may be a callable.",
            value="FACTORY is `package.module:name`, `path/to/file.py:name` or a Hugging Face "
            "folder.",
        ),
    ] = None,
    input: Input = (),
    optimizer: Annotated[
        str | None,
        Option(
            "Train the model with this optimizer: a class of torch.optim, or package.module:Class.",
            "CLASS",
            default="torch.optim:AdamW",
        ),
    ] = None,
    script: Annotated[
        StrPath | None, Option("Run this training script and watch it.", "FILE", _SCRIPT)
    ] = None,
    steps: Annotated[
        int | None,
        Option(
            "Watch this many optimizer steps, then stop the script.",
            "N",
            default="watch two, and go on to the end of the script, for 20 seconds at most",
        ),
    ] = None,
    args: Sequence[str] = (),
    device: Annotated[
        str,
        Option(
            "The device to train on; auto is the best one of this machine, even if torch cannot "
            "use it.",
            "DEVICE",
            "Device",
        ),
    ] = "auto",
    simulate: Simulate = False,
    timeout: Annotated[
        float, Option("Stop a script or a simulation after this time.", "SECONDS", _SCRIPT)
    ] = 600,
    quiet: bool = True,
) -> Diagnosis:
    """Find out why a model trains on the CPU or fails on the GPU, and how to fix it.

    `doctor` first checks the machine and the build of torch. With `model`, it builds the model,
    moves it to the device with `model.to`, and trains it for one step. With `script`, it runs a
    training script in another process for some steps. Root causes come first, each with its fix. If
    a run ends early, the result holds what was found until then; see `Diagnosis.complete`. ckptmove
    itself writes nothing.

    Args:
        args: the arguments of the script.
        quiet: discard the output of the script; otherwise it goes to stderr.

    Returns:
        What is wrong and how to fix it; `print` shows it as `ckptmove doctor` does.

    Raises:
        UsageError: the request makes no sense.
        DeviceError: the name of the device is not valid.
    """
    if model is not None and script is not None:
        raise UsageError("a model or a script is looked at, not both")
    if script is not None and not Path(script).is_file():
        raise UsageError("there is no such script", path=script)
    if script is None and steps is not None:
        raise UsageError("steps are of a script, and there is none", hint="name a --script")
    if steps is not None and steps < 1:
        raise UsageError("a script is watched for at least one step")
    if not timeout > 0:
        raise UsageError("nothing can be watched in no time", hint="give a --timeout in seconds")
    specs = (input,) if isinstance(input, str) else tuple(input)
    if args and script is None:
        raise UsageError("arguments are for a script, and there is none", hint="name a --script")
    if model is None and (specs or optimizer is not None):
        raise UsageError("an input and an optimizer are for a model, and there is none")
    subject = os.fspath(script) if script is not None else _name_of(model)
    no_torch = why_no_torch()
    if no_torch is not None:
        verdict = _NO_TORCH if no_torch == NOT_INSTALLED else Verdict("no-torch", no_torch, _REPAIR)
        return Diagnosis(subject, device, verdicts=(verdict,), complete=not subject)
    from ..runtime.environment.facts import facts
    from ..runtime.environment.usable import best, usable

    known = facts()
    wanted = best(known) if device == "auto" else with_index(device)
    unusable = usable(wanted, known)
    alone = model is None and script is None
    if alone or (unusable and not simulate):
        found = Diagnosis(subject, wanted, facts=known.to_json(), verdicts=unusable)
        if alone:
            none = wanted == "cpu" and device == "auto"
            return _with_notes(found, _NO_GPU) if none else found
        return _with_notes(replace(found, complete=False), _NOT_RUN)
    run = _Run(subject, wanted, simulate and bool(unusable), known, timeout)
    if script is not None:
        found = _diagnose_script(run, args, steps, quiet)
    else:
        assert model is not None
        found = _diagnose_model(run, model, specs, optimizer)
    if wanted == "cpu" and device == "auto" and not simulate:
        found = _with_notes(found, _NO_GPU)
    return _with_notes(found, _NOT_SIMULATED) if simulate and wanted == "cpu" else found


@dataclass(frozen=True)
class _Run:
    """The code to run, and the device."""

    subject: str
    device: str
    simulates: bool
    known: Facts
    timeout: float


def _name_of(model: object) -> str:
    if model is None or isinstance(model, (str, os.PathLike)):
        return "" if model is None else os.fspath(model)
    return getattr(model, "__qualname__", type(model).__name__)


def _diagnose_script(run: _Run, args: Sequence[str], steps: int | None, quiet: bool) -> Diagnosis:
    from ..trial.script import run_watched

    request = {
        "script": run.subject,
        "args": list(args),
        "steps": _STEPS if steps is None else steps,
        "onward": 0.0 if steps is not None else min(run.timeout / 4, _ONWARD),
        "device": run.device,
        "simulate": run.simulates,
        "patience": min(run.timeout / 2, _LONGEST),
        "facts": run.known.to_json(),
    }
    return _diagnose_in_subprocess(run, run_watched, request, shows=not quiet, script=True)


def _diagnose_model(
    run: _Run,
    model: str | os.PathLike[str] | Callable[..., Any],
    specs: Sequence[str],
    optimizer: str | None,
) -> Diagnosis:
    from ..system.signals import exits_raised
    from ..trial.examine import examine, examine_model
    from ..trial.model import inputs
    from ..trial.model.factory import is_of_file
    from ..trial.model.import_by_name import importable_name, optimizer_name
    from ..trial.stage import Stage

    inputs.check(specs)
    optimizer = None if optimizer is None else optimizer_name(optimizer)
    guarded = is_of_file(model)
    if not run.simulates and not guarded:
        with exits_raised():
            return examine(model, tuple(specs), optimizer, Stage(run.device))
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else importable_name(model)
    if name is None:
        raise UsageError(
            "a simulation runs in another process, which can't import this model",
            hint="give a function or class of a module that can be imported",
        )
    request = {
        "model": name,
        "inputs": list(specs),
        "optimizer": optimizer,
        "device": run.device,
        "simulates": run.simulates,
    }
    return _diagnose_in_subprocess(run, examine_model, request, guarded=guarded)


def _diagnose_in_subprocess(
    run: _Run,
    function: Callable[[Any], Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    shows: bool = False,
    script: bool = False,
    guarded: bool = False,
) -> Diagnosis:
    """Run in another process and return the diagnosis, however the process ends."""
    from ..trial.subprocess_call import SubprocessLost, call_in_subprocess

    try:
        result = call_in_subprocess(
            function, request, patience=run.timeout, heard=shows, script=script, guarded=guarded
        )
        return Diagnosis.of_json(result)
    except SubprocessLost as lost:
        return _diagnose_lost(run, lost)
    except ValueError as error:
        return _diagnose_lost(run, SubprocessLost(str(error), code=0))


def _diagnose_lost(run: _Run, lost: SubprocessLost) -> Diagnosis:
    """Diagnose a process that ended without a result."""
    found = Diagnosis(
        run.subject, run.device, run.simulates, facts=run.known.to_json(), complete=False
    )
    if lost.latest is not None:
        with contextlib.suppress(ValueError):
            found = Diagnosis.of_json(lost.latest)
    if lost.code is None:
        return _with_notes(found, f"the run was ended: {lost}; see --timeout")
    if not lost.code and (found.complete or found.trace is not None):
        return found if found.complete else _with_notes(found, f"the run ended early: {lost}")
    if not lost.code:
        nothing = Verdict(
            "run-ended",
            "no result: it ended before anything was watched",
            "do not end the process, as by os._exit, before a step is done",
            (str(lost), *lost.lines),
        )
        return replace(found, verdicts=(*found.verdicts, nothing))
    if run.simulates and lost.crashed:
        found = replace(found, not_simulated=True, complete=False)
        return _with_notes(found, f"the simulation can't continue: {lost}", *lost.lines)
    verdict = Verdict("run-ended", f"the run ended early: {lost}", "read its output", lost.lines)
    return replace(found, verdicts=(*found.verdicts, verdict))


def _with_notes(found: Diagnosis, *notes: str) -> Diagnosis:
    return replace(found, notes=(*found.notes, *notes))
