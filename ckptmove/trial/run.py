"""Run a trial on a stage: the model loads its state, then takes one traced step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..display.phrases import join_names, plural
from ..live.tracing.recording.recorder import Recorder
from ..reports.validate import FAILED, PASSED, SKIPPED
from ..system.signals import SignalReceived
from . import step as steps
from .findings import Performance, TrialOver, report_failed_step, report_trace, reporting
from .model import factory, inputs
from .model.factory import BuiltModel, Model
from .model.import_by_name import import_named
from .stage import Stage
from .state import checkpoint_state, optimizer_state, state_dict_fit
from .state.checkpoint_state import Placing, SavedCheckpoint, State
from .state.state_dict_fit import Fit
from .step import NoLoss, Step

_UNFIT, _NO_STEP = "the checkpoint does not fit the model", "the step did not run"


@dataclass(frozen=True)
class Request:
    """The arguments of a trial; see `trial.trial.rehearse`."""

    path: str
    model: Model | None
    device: str
    inputs: tuple[str, ...] = ()
    step: str | None = None
    optimizer: str | None = None
    trust_pickle: bool = False


def perform(
    request: Request,
    stage: Stage,
    *,
    keep: bool = False,
    report: Callable[[Performance], object] | None = None,
) -> Performance:
    """Run a trial of a checkpoint; `keep` stores the results of the step for a comparison.

    Raises:
        UsageError: the request is not valid.
        InputError: a file can't be read, or is not trusted.
    """
    found = Performance(report=report)
    try:
        with reporting(found, stage, "model", "the state can't be read"):
            held = stage.read(request.path)
        to = checkpoint_state.placing(held, request.device)
        with stage.context():
            torch.manual_seed(inputs.SEED)
            with reporting(found, stage, "model", "the model can't be built"):
                built = stage.build(lambda: _built(request, held), held.manifest.nbytes)
            kind = type(built.module).__name__
            with reporting(found, stage, "model", f"{kind} does not accept its state"):
                _adopt(request, stage, held, to, built, found)
            if request.step is None:
                raise TrialOver("no --step was given")
            with reporting(found, stage, "step", "the result of the step can't be read"):
                _take(request, stage, held, to, built, found, keep)
    except TrialOver as over:
        found.skip_rest(str(over))
    return found


def _built(request: Request, held: SavedCheckpoint) -> BuiltModel:
    model = request.path if request.model is None else request.model
    known = held.manifest.format if _is_itself(request) else None
    return factory.build_model(model, trust_pickle=request.trust_pickle, fmt=known)


def _is_itself(request: Request) -> bool:
    """Whether the model and the checkpoint are the same file or folder."""
    if request.model is None:
        return True
    if not isinstance(request.model, (str, os.PathLike)) or not Path(request.model).exists():
        return False
    return Path(request.model).samefile(request.path)


# -- the model -------------------------------------------------------------------------------------


def _averages_told(state: State, averages: Sequence[State]) -> list[str]:
    """A line about averaged weights (EMA) that fit: used, or passed over for other weights."""
    if any(each is state for each in averages):
        return [f"{state.name} holds averaged weights (EMA); no other weights fit"]
    names = join_names([each.name for each in averages])
    return [f"not used: {names}, averaged weights (EMA)"] if averages else []


def _adopt(
    request: Request,
    stage: Stage,
    held: SavedCheckpoint,
    to: Placing,
    built: BuiltModel,
    found: Performance,
) -> None:
    """Load the state into the model and move the model to the device.

    Raises:
        TrialOver: torch would not load the state.
    """
    kind = type(built.module).__name__
    data: dict[str, Any] = {"class": kind, "kind": built.kind}
    if built.is_program and _is_itself(request):
        with reporting(found, stage, "model", "the model can't be moved to the device"):
            stage.move(built.module)
        found.find("model", PASSED, f"the checkpoint itself is the model: {kind}", *built.notes)
        return
    state, averages = state_dict_fit.chosen(built.module, held)
    if state is None:
        found.find("model", FAILED, "the checkpoint holds no state dict")
        raise TrialOver(_UNFIT)
    fit = state_dict_fit.fit_state(
        built.module, state, None if stage.values else lambda: _valued(request, state)
    )
    found.dtypes = frozenset(
        each.dtype for each in state.content.values() if isinstance(each, torch.Tensor)
    )
    lines = [*built.notes, *_averages_told(state, averages)]
    loads = True
    try:
        stage.load(built.module, fit)
        if not fit.loads:
            lines.append(f"its own hooks accept what does not fit by name: {fit.title()}")
    except Exception as error:
        if fit.loads and (excuse := stage.excuse(error)) is None:  # otherwise, the fit names it
            raise
        if fit.loads:
            lines.append(f"compared by names and shapes: loading can't be simulated: {excuse}")
        loads = fit.loads
    away = _elsewhere(fit, held, to)
    data |= fit.to_json() | {"elsewhere": away}
    good = loads and not fit.retyped and not fit.untied
    title = _taken(fit, kind) if good else fit.title()
    if away:
        first = sorted(away)[0]
        there = sum(map(len, away.values()))
        title = f"{plural(there, 'tensor')} stored on {first}, not on {to.wanted}"
        lines += [f"stored on {device}: {join_names(names)}" for device, names in away.items()]
        lines.append(f"put them on one device: ckptmove relocate --to {to.wanted}")
    elif held.says_devices and not to.at_its_word and held.usual_device() != to.wanted:
        lines.append(f"stored on {held.usual_device()}: loaded with map_location='{to.wanted}'")
    outcome = PASSED if good and not away else FAILED
    found.find("model", outcome, title, *fit.details(), *lines, **data)
    if not loads:
        raise TrialOver(_UNFIT)
    with reporting(found, stage, "model", f"{kind} can't be moved to {to.wanted}"):
        stage.move(built.module, {key for keys in away.values() for key in keys})


def _valued(request: Request, state: State) -> Mapping[Any, Any]:
    """The state dict with values, mapped from the file; for a stage without values."""
    with _disable_current_modes():
        again = checkpoint_state.read(request.path)
    return next(each.content for each in again.states if each.path == state.path)


def _taken(fit: Fit, kind: str) -> str:
    where = f" of {fit.state.name}" if fit.state.path else ""
    return f"{kind} accepts all {plural(fit.matched, 'tensor')}{where}"


def _elsewhere(fit: Fit, held: SavedCheckpoint, to: Placing) -> dict[str, list[str]]:
    """The keys of the model's state that stay on another device, by device."""
    away: dict[str, list[str]] = {}
    for key in fit.state.content:
        label = held.label((*fit.state.path, key))
        if to.is_elsewhere(label):
            away.setdefault(str(label), []).append(str(key))
    return away


# -- the step --------------------------------------------------------------------------------------


def _take(
    request: Request,
    stage: Stage,
    held: SavedCheckpoint,
    to: Placing,
    built: BuiltModel,
    found: Performance,
    keep: bool,
) -> None:
    train = request.step == "train"
    optimizer: optimizer_state.Rebuilt | None = None
    lines: list[str] = []
    problems: list[str] = []
    with reporting(found, stage, "step", "the step can't be prepared"):
        batch = inputs.batch(request.inputs, built, train=train)
        batch = stage.batch(batch)
        steps.set_mode(built.module, train=train)
        try:
            if train:
                optimizer, wrong, said = _optimizer(request, stage, held, to, built.module)
                problems += wrong
                lines += [f"optimizer: {said}"]
        except optimizer_state.UnrecognisedOptimizer as error:
            hint = "give its class, for example --optimizer torch.optim:AdamW"
            found.find("step", SKIPPED, "the optimizer is not recognized", str(error), hint)
            raise TrialOver(_NO_STEP) from error
        except optimizer_state.Misfit as error:
            found.find("step", FAILED, "the optimizer state does not match the model", str(error))
            raise TrialOver(_NO_STEP) from error
    lines.insert(0, f"input: {batch.said}")
    recorder = Recorder(built.module, stage.device, call=stage.call)
    try:
        step = steps.take_step(
            built.module, batch, optimizer, recorder, values=stage.values, keep=keep
        )
    except NoLoss as error:
        found.find("step", FAILED, str(error), *lines)
        report_trace(found, recorder.trace())
        return
    except (KeyboardInterrupt, SignalReceived):
        raise
    except BaseException as error:
        report_failed_step(found, stage, built.module, recorder, error, problems, lines)
        return
    found.step = step
    wrong_places = steps.misplaced_tensors(
        built.module, optimizer.optimizer if optimizer else None, stage.device
    )
    problems += steps.misplaced_lines(wrong_places, stage.call)
    problems += step.problems
    title = _step_title(step, stage, train)
    if train:
        own = sum(1 for _ in built.module.parameters())
        lines.append(f"loss: {step.loss}")
        lines.append(f"gradients: {step.gradients:,} of {plural(own, 'parameter')}")
    if problems:
        title = problems[0]
    data = {
        "input": batch.said,
        "loss": step.loss,
        "value": step.value if step.value is None or isfinite(step.value) else None,
        "gradients": step.gradients,
        "problems": problems,
        "optimizer": None if optimizer is None else optimizer.name,
    }
    outcome = FAILED if problems else PASSED
    found.find("step", outcome, title, *problems[1:], *lines, **data)
    report_trace(found, recorder.trace())


def _step_title(step: Step, stage: Stage, train: bool) -> str:
    how = "simulated " if not stage.values else ""
    if not train:
        finite = ", all outputs are finite" if stage.values else ""
        return f"a {how}forward pass on {stage.name}{finite}"
    value = f", loss {step.value:.6g}" if step.value is not None else ""
    return f"a {how}training step on {stage.name}{value}"


def _optimizer(
    request: Request, stage: Stage, held: SavedCheckpoint, to: Placing, module: torch.nn.Module
) -> tuple[optimizer_state.Rebuilt, list[str], str]:
    """The optimizer, the problems of its state, and its description."""
    made: Callable[..., Any] | None = None
    if request.optimizer is not None:
        made = import_named(request.optimizer, "--optimizer")
    if not held.optimizers:
        made = made or torch.optim.AdamW
        fresh = optimizer_state.new(made, list(module.parameters()))
        for group in fresh.param_groups:
            if not stage.values:
                group["foreach"] = False
        known = "a new one, because the checkpoint holds none"
        name = f"{made.__name__} ({known})"
        return optimizer_state.Rebuilt(fresh, name, {}, frozenset(), []), [], name
    misfit: optimizer_state.Misfit | None = None
    for state in held.optimizers:
        content = stage.optimizer_state(state, held, to)
        try:
            kind, known = (made, "") if made is not None else optimizer_state.kind_of(content)
            rebuilt = optimizer_state.rebuild_optimizer(
                module, content, kind, known, simulated=not stage.values
            )
        except optimizer_state.Misfit as error:
            misfit = misfit or error
            continue
        wrong = [*rebuilt.problems, *_steps_elsewhere(state, held, to, rebuilt)]
        more = len(held.optimizers) - 1
        said = rebuilt.name + (f"; {state.name}, one of {more + 1}" if more else "")
        return rebuilt, wrong, said
    assert misfit is not None
    if len(held.optimizers) > 1:
        n = plural(len(held.optimizers), "optimizer")
        raise optimizer_state.UnrecognisedOptimizer(
            f"of {n}, but none holds all parameters of the model"
        ) from misfit
    raise misfit


def _steps_elsewhere(
    state: State, held: SavedCheckpoint, to: Placing, rebuilt: optimizer_state.Rebuilt
) -> list[str]:
    """Step counters that torch keeps on the CPU but that were stored on another device.

    Loading leaves them on that device. Returns a line for each device.
    """
    if to.wanted == "cpu":
        return []
    away: dict[str, list[str]] = {}
    for key, slots in state.content["state"].items():
        for slot in slots if isinstance(slots, Mapping) else ():
            path = (*state.path, "state", key, slot)
            label = held.label(path)
            if held.is_step(path) and label is not None and label != "cpu":
                away.setdefault(label, []).append(f"{slot} of {rebuilt.names.get(key, key)}")
    return [
        f"stored on {device}; torch keeps it on cpu unless capturable or fused: "
        f"{join_names(names, 3)}"
        for device, names in away.items()
    ]
