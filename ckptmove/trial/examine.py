"""Build a model that the user names, move it to a device, and watch it take one step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import CkptmoveError, UsageError
from ..live.tracing.program.source_lines import error_line
from ..live.tracing.recording.recorder import Recorder
from ..live.tracing.trace import diagnose
from ..reports.doctor import Diagnosis, Verdict
from ..runtime.environment.usable import Facts, facts
from . import step as steps
from .model import factory, inputs
from .model.factory import BuiltModel, Model
from .model.import_by_name import import_named
from .sandbox import confinement
from .stage import Stage
from .stage_fake import SimulatedStage
from .state import optimizer_state
from .step import NoLoss

_LIMIT = "the simulation can't continue"
_NO_INPUT = "no step was run: describe the input, for example --input 'float32[8,3,224,224]'"


def examine_model(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Examine a model on a real or simulated device; runs in another process."""
    model, specs, optimizer = asked["model"], tuple(asked["inputs"]), asked["optimizer"]
    known = facts()  # collected before confinement: it starts processes
    lacking: tuple[str, ...] = ()
    if factory.is_of_file(model):
        device = "cpu" if asked["simulates"] else asked["device"]
        lacking = confinement.begin(model, specs, optimizer, device)
    stage = SimulatedStage(asked["device"]) if asked["simulates"] else Stage(asked["device"])
    found = examine(model, specs, optimizer, stage, known)
    return replace(found, notes=(*found.notes, *lacking)).to_json()


def examine(
    model: Model,
    specs: tuple[str, ...],
    optimizer: str | None,
    stage: Stage,
    known: Facts | None = None,
) -> Diagnosis:
    """Build a model, move it to a device like `model.to`, and take a step.

    Raises:
        UsageError: a name or a spec is not valid.
    """
    with stage.context():
        torch.manual_seed(inputs.SEED)
        try:
            built = stage.build(lambda: factory.build_model(model), 0)
        except CkptmoveError:
            raise
        except SystemExit as error:
            raise UsageError(
                f"{_called(model)} ends the process on import: {error.code}",
                hint="put code that only a script should run under if __name__ == '__main__':",
            ) from error
        except Exception as error:
            return _unbuilt(_called(model), error, stage, known)
        return _examined(built, specs, optimizer, stage, known)


def _called(model: Model) -> str:
    if isinstance(model, (str, os.PathLike)):
        return f"--model {os.fspath(model)}"
    return getattr(model, "__qualname__", type(model).__name__)


def _unbuilt(called: str, error: Exception, stage: Stage, known: Facts | None) -> Diagnosis:
    """The diagnosis if the model can't be built."""
    excuse = stage.excuse(error)
    found = diagnose(
        stage.name,
        None,
        model=None,
        simulated=not stage.values,
        subject=called.removeprefix("--model "),
        complete=False,
        not_simulated=excuse is not None,
        known=known,
        notes=() if excuse is None else (f"{_LIMIT}: {excuse}",),
    )
    if excuse is not None:
        return found
    title = f"the model can't be built: {stage.call(error_line(error))}"
    return replace(found, verdicts=(Verdict("model-failed", title, "read the exception"),))


def _examined(
    built: BuiltModel,
    specs: tuple[str, ...],
    optimizer: str | None,
    stage: Stage,
    known: Facts | None,
) -> Diagnosis:
    notes: list[str] = []
    failed: str | None = None
    ended_by: BaseException | None = None
    not_simulated = False
    trainer: torch.optim.Optimizer | None = None
    recorder = Recorder(built.module, stage.device, call=stage.call)
    try:
        stage.move(built.module)
        trainer = _step(built, specs, optimizer, stage, recorder, notes)
    except CkptmoveError:
        raise
    except (Exception, SystemExit) as error:
        excuse = stage.excuse(error)
        not_simulated = excuse is not None
        if not_simulated:
            notes.append(f"{_LIMIT}: {excuse}")
        else:
            failed, ended_by = stage.call(error_line(error)), error
    ran = recorder.models.count > 0
    learns = any(each.requires_grad for each in built.module.parameters())
    return diagnose(
        stage.name,
        recorder.trace(ended_by) if ran else None,
        model=built.module,
        optimizers=[] if trainer is None else [trainer],
        failed=failed,
        simulated=not stage.values,
        call=stage.call,
        notes=notes,
        complete=ended_by is None
        and not not_simulated
        and ran
        and (recorder.steps > 0 or not learns),
        not_simulated=not_simulated,
        known=known,
    )


def _step(
    built: BuiltModel,
    specs: tuple[str, ...],
    optimizer: str | None,
    stage: Stage,
    recorder: Recorder,
    notes: list[str],
) -> torch.optim.Optimizer | None:
    """Take a step, if the model's inputs are known; returns the optimizer, if one was used."""
    if not specs and built.config is None and built.example is None:
        notes.append(_NO_INPUT)
        return None
    made: Callable[..., Any] = torch.optim.AdamW
    if optimizer is not None:
        made = import_named(optimizer, "--optimizer")
    batch = stage.batch(inputs.batch(specs, built, train=True))
    parameters = [each for each in built.module.parameters() if each.requires_grad]
    fresh = optimizer_state.new(made, parameters) if parameters else None
    trainer = None
    if fresh is not None:
        for group in fresh.param_groups:
            if not stage.values:
                group["foreach"] = False
        trainer = optimizer_state.Rebuilt(fresh, type(fresh).__name__, {}, frozenset(), [])
    try:
        step = steps.take_step(
            built.module, batch, trainer, recorder, values=stage.values, keep=False
        )
        notes += step.problems
    except NoLoss as error:
        notes.append(str(error))
    return fresh
