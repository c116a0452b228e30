"""Try a checkpoint: check that a model accepts it and that a step runs on the right device.

found = rehearse("run.pt", model="train.py:Net", inputs=["float32[8,3,32,32]"], step="train")
found.ok, found.of("step").title
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import formats
from ..errors import DeviceError, StrPath, UsageError
from ..manifest.device import kind_of, with_index
from ..reports.validate import FAILED, Finding, TrialResult
from .findings import Performance
from .model import inputs as batches
from .model.factory import Model, is_of_file
from .model.import_by_name import importable_name, is_named, optimizer_name
from .run import Request, perform
from .sandbox import confinement
from .stage import Stage
from .state.loaders import usual_device
from .step import StepComparison, compare_steps
from .subprocess_call import SubprocessLost, call_in_subprocess

__all__ = ["Finding", "TrialResult", "run_trial"]

TIMEOUT = 600.0  # seconds that a trial in another process may take
_STEPS = ("forward", "train")


def run_trial(
    path: StrPath,
    *,
    model: Model | None = None,
    inputs: Sequence[str] = (),
    step: str | None = None,
    optimizer: str | None = None,
    device: str = "auto",
    simulate: bool = False,
    against: StrPath | None = None,
    trust_pickle: bool = False,
    timeout: float = TIMEOUT,
) -> TrialResult:
    """Load a checkpoint into a model, take a step, and watch it. Nothing is written.

    Without a `model` the checkpoint is the model. A model that fails is a finding.

    Raises:
        UsageError: the request is not valid.
        DeviceError: this machine does not have the device, and `simulate` is not set.
        InputError: a checkpoint cannot be read, or is not trusted.
    """
    if step not in (None, *_STEPS):
        raise UsageError(f"step must be forward or train, not {step!r}")
    optimizer = None if optimizer is None else optimizer_name(optimizer)
    if optimizer is not None and not is_named(optimizer):
        raise UsageError(
            f"--optimizer {optimizer!r} is not a name in Python code",
            hint="for example torch.optim:AdamW",
        )
    if not timeout > 0:
        raise UsageError("nothing can be run in no time", hint="give a --timeout in seconds")
    inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    batches.check(inputs)
    wanted = _device(path, device, simulate)
    request = Request(os.fspath(path), model, wanted, inputs, step, optimizer, trust_pickle)
    if not is_there(wanted):
        return _simulated(request, against, timeout)
    other = None if against is None or step is None else os.fspath(against)
    if is_of_file(model):
        return _confined(request, other, device, timeout)
    return TrialResult(wanted, False, _found(request, other, device).all_findings())


def _found(
    request: Request,
    against: str | None,
    device: str,
    report: Callable[[Performance], object] | None = None,
) -> Performance:
    """Run a trial on a real device."""
    keep = against is not None
    with torch.random.fork_rng(devices=_seeded(request.device)):
        found = perform(request, Stage(request.device), keep=keep, report=report)
        if against is not None:
            _compare(request, against, device, found)
    return found


def _device(path: StrPath, device: str, simulate: bool) -> str:
    """The device for the trial."""
    if device == "auto":
        with formats.open_checkpoint(path, follow_links=True) as found:
            usual = usual_device(found.manifest)
        return usual if simulate or is_there(usual) else "cpu"
    tag = with_index(device)
    if not simulate and not is_there(tag):
        raise DeviceError(
            f"{tag} can't be used: torch {torch.__version__} does not find it on this machine",
            hint="--simulate simulates the device",
        )
    return tag


def is_there(device: str) -> bool:
    """Whether torch can use a device on this machine."""
    try:
        torch.ones(1, device=device).add_(1)
    except Exception:  # each backend raises its own kind; the tag in a file may be any text
        return False
    return kind_of(device) != "meta"


def _seeded(device: str) -> list[int]:
    return [torch.device(device).index or 0] if kind_of(device) == "cuda" else []


# -- models from files -----------------------------------------------------------------------------


def _confined(request: Request, against: str | None, device: str, timeout: float) -> TrialResult:
    """Run a trial of a model made from a file, in a guarded process."""
    model = None if request.model is None else str(request.model)
    asked = {"request": asdict(replace(request, model=model)), "against": against, "device": device}
    try:
        result = call_in_subprocess(run_requested, asked, patience=timeout, guarded=True)
        found = confinement.findings(result)
    except SubprocessLost as lost:
        found = confinement.findings_of_ended(lost)
    return TrialResult(request.device, False, found)


def run_requested(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the requested trial; called in that process."""
    told = asked["request"]
    request = Request(**{**told, "inputs": tuple(told["inputs"])})
    path = request.path if request.model is None else str(request.model)
    lacking = confinement.begin(
        path,
        request.inputs,
        request.optimizer,
        request.device,
        trust_pickle=request.trust_pickle,
    )
    found = _found(request, asked["against"], asked["device"], confinement.report)
    return confinement.result(found, lacking)


# -- simulated -------------------------------------------------------------------------------------


def _simulated(request: Request, against: StrPath | None, timeout: float) -> TrialResult:
    from .stage_fake import simulate

    model = request.model
    if model is not None and not isinstance(model, (str, os.PathLike)):
        name = importable_name(model)
        if name is None:
            raise UsageError(
                "a simulation runs in another process, which can't import this model",
                hint="give a function or class of a module that can be imported",
            )
        request = replace(request, model=name)
    elif model is not None:
        request = replace(request, model=os.fspath(model))
    findings = simulate(request, patience=timeout)
    if against is not None and request.step is not None:
        note = "values can't be compared in a simulation"
        findings = tuple(
            replace(each, details=[*each.details, note]) if each.check == "step" else each
            for each in findings
        )
    return TrialResult(request.device, True, findings)


# -- against another checkpoint --------------------------------------------------------------------


def _compare(request: Request, against: str, device: str, found: Performance) -> None:
    """Take the same step with the other checkpoint, and add the comparison to the finding."""
    if found.step is None:
        return
    there = _device(against, device, False)
    other = perform(replace(request, path=against, device=there), Stage(there), keep=True)
    mine = found.findings["step"]
    if other.step is None:
        why = [each for each in other.all_findings() if each.outcome == FAILED]
        told = [f"{each.title}: {'; '.join(each.details)}" for each in why]
        lines = [f"the step of {against} can't be run", *told]
        found.findings["step"] = _extended(mine, FAILED, lines, None)
        return
    difference = compare_steps(found.step, other.step, found.dtypes | other.dtypes)
    alike = there == request.device and found.dtypes == other.dtypes
    where = f"on {there}" if there == request.device else f"on {request.device} and {there}"
    if difference.equal:
        line = f"{against} gives the same {where}, bit for bit"
        found.findings["step"] = _extended(mine, mine.outcome, [line], difference)
    elif difference.close and not alike:
        line = f"{against} gives the same {where}, within {difference.tolerance:g}"
        lines = [line, *difference.lines]
        found.findings["step"] = _extended(mine, mine.outcome, lines, difference)
    else:
        again = perform(replace(request, path=against, device=there), Stage(there), keep=True)
        if alike and difference.close and again.step is not None:
            itself = compare_steps(other.step, again.step, other.dtypes)
            if not itself.equal:
                line = (
                    f"{against} gives the same {where} within "
                    f"{difference.tolerance:g}; not bit for bit, but two runs of it differ too"
                )
                found.findings["step"] = _extended(mine, mine.outcome, [line], difference)
                return
        bound = "bit for bit" if alike else f"within {difference.tolerance:g}"
        line = f"{against} gives a different result {where}, compared {bound}"
        lines = [line, *difference.lines]
        found.findings["step"] = _extended(mine, FAILED, lines, difference)


def _extended(
    mine: Finding, outcome: str, lines: Sequence[str], difference: StepComparison | None
) -> Finding:
    title = lines[0] if outcome == FAILED and mine.outcome != FAILED else mine.title
    told = lines[1:] if title == lines[0] else lines
    data = {**mine.data}
    if difference is not None:
        data["against"] = {
            "equal": difference.equal,
            "close": difference.close,
            "tolerance": difference.tolerance,
            "differences": list(difference.lines),
        }
    return replace(mine, outcome=outcome, title=title, details=[*told, *mine.details], data=data)
