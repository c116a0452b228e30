"""Run the user's training script for some steps in its own process, and watch it."""

from __future__ import annotations

import os
import re
import runpy
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..display.phrases import plural
from ..live.inventory.holdings import Ownership, holdings
from ..live.tracing.causes.background import background
from ..live.tracing.causes.costs import found_at_end, ran_elsewhere
from ..live.tracing.causes.training_causes import gradients_of_copies, stale_copies
from ..live.tracing.program.source_lines import error_line, raised_at
from ..live.tracing.recording.history import History
from ..live.tracing.recording.operations import is_table
from ..live.tracing.recording.recorder import Recorder
from ..live.tracing.trace import diagnose
from ..reports.doctor import Diagnosis, Verdict
from ..runtime.environment.evidence import CUDA_VARIABLE
from ..runtime.environment.facts import Facts, facts
from ..system.signals import HAS_TIMER, timer
from .program_history import told_to
from .script_causes import models_never_called, optimizers_without_state, unchecked
from .simulation.device_memory import NotSimulated
from .simulation.script_host import call, hosting
from .stage_fake import limit_of_simulation
from .subprocess_call import tell, tell_so_far

#: Before the first step, each of the first calls is diagnosed; later ones so that it costs little.
_FEW_CALLS = 16
_SPARE = 10  # the pause after a diagnosis, as a multiple of its duration
_AGAIN = 1.0  # seconds after which a script that goes on is stopped again
_IDLE = ": gradients were computed, and nothing that was watched was changed by them"
_LIMIT = "the simulation can't continue"
#: Exceptions that are the script's own fault, whatever their text.
_OWN = (ModuleNotFoundError, FileNotFoundError, SyntaxError, NameError, EOFError, KeyboardInterrupt)

#: Code of scripts that evaluate, or that save.
_EVALUATES = re.compile(r"\.eval\(\)|no_grad\(\)|inference_mode\(\)")
_SAVES = re.compile(r"torch\.save\(|\.save_pretrained\(|save_file\(|\.save_checkpoint\(")


class _Enough(BaseException):
    """The wanted steps were taken, or the time is up."""


class _Run:
    """A run of a script.

    Attributes:
        diagnosis: the latest diagnosis, after a step or a call.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._script = str(asked["script"])
        self._wanted = int(asked["steps"])
        self._patience = float(asked["patience"])
        self._onward = float(asked.get("onward", 0.0))
        self._text = Path(self._script).read_text(encoding="utf-8", errors="replace")
        self._process = os.getpid()
        self._device = str(asked["device"])
        self.simulated = bool(asked["simulate"])
        # Collecting them here starts CUDA, which then ignores variables that the script sets.
        self._facts = Facts.from_json(asked["facts"]) if "facts" in asked else facts()
        self._enough = self._steps = 0
        # the times of the first call of a model and of the next diagnosis
        self._began = self._due = 0.0
        self._until = 0.0  # when to stop a script that took its steps
        self._settled = False  # whether the script went on after its steps
        self.diagnosis: Diagnosis | None = None
        self.home = torch.device(self._device)
        self._call = call if self.simulated else str
        self.history = History()  #: the objects that the script made and moved
        self.recorder = Recorder(
            None, self.home, call=self._call, turn=self._turn, history=self.history
        )

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork that the script made."""
        return os.getpid() != self._process

    def _turn(self, recorder: Recorder) -> None:
        """Diagnose the run, and end it if it is done.

        Called before each call of a model and after each step.
        """
        if self.is_fork:  # for example, one that loads data
            return
        now = time.monotonic()
        between = recorder.steps == self._steps
        self._steps = recorder.steps
        if not self._began and recorder.names.latest:
            self._began = now
        # Some scripts update their weights without an optimizer.
        own = self._onward and recorder.backwards >= self._wanted
        patience = self._onward if own else self._patience
        late = bool(self._began) and not recorder.steps and now > self._began + patience
        if recorder.steps >= self._wanted and not self._until:
            self._until = now + self._onward
            self._limit(self._onward)
        ends = between and (late or (bool(self._until) and now >= self._until))
        few = not recorder.steps and recorder.models.count <= _FEW_CALLS
        last = between and bool(self._until) and not self._settled  # the last step is complete
        self._settled |= last
        due = few or last or ends or not between or now > self._due
        if recorder.steps <= self._wanted and due:
            self._look(now)
        if ends:
            self._time_is_up()

    _stop_timer: Callable[[], None] | None = None

    def _limit(self, seconds: float) -> None:
        """Stop the script after a time, even if it calls no model."""
        main = threading.current_thread() is threading.main_thread()
        if seconds and main and HAS_TIMER:
            self._stop_timer = timer(seconds, _AGAIN, self._time_is_up)

    def _time_is_up(self, *signal: object) -> None:
        if self.is_fork:
            return
        self._enough += 1
        if self._enough > 2:  # the script catches every exception and goes on
            tell(self.enough().to_json())
        raise _Enough

    def over(self) -> None:
        """Stop the timer, because the script has ended."""
        if self._stop_timer is not None:
            self._stop_timer()

    def _look(self, now: float) -> None:
        """Update the diagnosis and report it, in case the process ends early."""
        try:
            self.diagnosis = self.diagnosed()
        except Exception as ours:  # not the script's fault
            if self.diagnosis is None:
                self.diagnosis = Diagnosis(self._script, self._device, self.simulated)
            note = f"the cause can't be found: {error_line(ours)}"
            self.diagnosis = replace(self.diagnosis, complete=False, notes=(note,))
        tell_so_far(self.diagnosis.to_json())
        after = time.monotonic()
        self._due = after + _SPARE * (after - now)

    def diagnosed(self, failed: str | None = None, error: BaseException | None = None) -> Diagnosis:
        """The diagnosis of the run; made while its model still exists.

        Args:
            failed: the exception that ended it, in one line, even if the script caught it.
            error: the exception that ended it, if any.
        """
        with _disable_current_modes():
            model = self._model(failed)
            return diagnose(
                self._device,
                self.recorder.trace(error),
                model=model,
                optimizers=[] if model is None else self._optimizers(model),
                failed=failed,
                simulated=self.simulated,
                known=self._facts,
                subject=self._script,
                background=background(self.recorder, model, error),
                fed=self.recorder.names.optimizers.fed,
                call=self._call,
                line=self.recorder.line_of_node,
                origin=self.recorder.names.origin,
                complete=self.recorder.steps >= self._wanted,
            )

    def _model(self, failed: str | None) -> torch.nn.Module | None:
        """The main model: the one that failed, else the one that is trained, else the largest.

        Of two equal candidates, the later one.
        """
        names = self.recorder.names
        error = self.recorder.error
        models = [each for each in names.models if next(each.parameters(), None) is not None]
        latest = names.latest
        failing = failed is not None and error is not None and error.phase == "forward"
        if failing and latest and next(latest[-1].parameters(), None) is not None:
            return latest[-1]  # a loss module has no parameters
        trained = {
            id(parameter)
            for each in names.optimizers.known
            for group in each.param_groups
            for parameter in group["params"]
        }

        trace = self.recorder.trace()
        here = trace.operations.get(trace.device, 0)
        most = failed is None and 2 * here > sum(trace.operations.values())

        def rank(model: torch.nn.Module) -> tuple[bool, bool, bool, bool, int, int]:
            parameters = list(model.parameters())
            return (
                any(names.optimizers.fed(each) for each in parameters),
                any(id(each) in trained for each in parameters),
                not is_table(model),  # a table may stay on the CPU
                # If most operations run on the device, a model elsewhere is there on purpose.
                most and parameters[0].device == self.home,
                sum(map(_count, parameters)),
                next((n for n, each in enumerate(latest) if each is model), -1),
            )

        return max(models, key=rank) if models else next(filter(_hides_tensors, names.models), None)

    def _optimizers(self, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """The optimizers that train a model; or all optimizers, if none does."""
        own = {id(parameter) for parameter in model.parameters()}
        known = self.recorder.names.optimizers.known
        training = [
            each
            for each in known
            if any(id(p) in own for group in each.param_groups for p in group["params"])
        ]
        return training or known

    def _latest(self) -> Diagnosis:
        """The latest diagnosis, from before the script cleaned up or its model was deleted."""
        if self.diagnosis is None or self.diagnosis.report is None:
            return self.diagnosed()
        if self.recorder.steps >= self._wanted:
            return self.diagnosis
        found = replace(self.diagnosis, trace=self.recorder.trace())
        lost = gradients_of_copies(self.recorder.updates.reads.values(), self._device)
        return found if found.is_wrong else replace(found, verdicts=(*found.verdicts, *lost))

    def enough(self) -> Diagnosis:
        """The diagnosis after the run was ended."""
        found = replace(self._latest(), not_run=self._not_run())
        if self.recorder.steps >= self._wanted:
            return self._with_later(found)
        own = self.recorder.backwards
        patience = self._onward if own >= self._wanted and self._onward else self._patience
        waited = f"{patience:g} s and {self.recorder.models.count:,} calls"
        waited += f", with {own:,} backward pass{'es' if own > 1 else ''}" if own else ""
        return _noted(found, f"the script was stopped: no optimizer took a step in {waited}")

    def _with_later(self, found: Diagnosis) -> Diagnosis:
        """A diagnosis plus what came after the diagnosed steps: models elsewhere, copies."""
        told = " ".join(each.title for each in found.verdicts)
        later = [
            each
            for each in self.recorder.trace().of("apart")
            if each.count > 2  # fewer cost little
            if each.site.source not in told and f" {each.site.module} " not in f" {told} "
        ]
        if found.is_wrong:
            return found
        elsewhere = ran_elsewhere(later, self._device, "after the first steps")
        found_later = (*elsewhere, *found_at_end(self.recorder, self._device))
        return replace(found, verdicts=(*found.verdicts, *found_later))

    def _with_stale(self, found: Diagnosis) -> Diagnosis:
        """The diagnosis of a script that ended, plus its stale copies, which were not renewed."""
        stale = stale_copies(self.recorder.stale.stale, self._device)
        return found if found.is_wrong else replace(found, verdicts=(*found.verdicts, *stale))

    def _not_run(self) -> tuple[str, ...]:
        """The parts of the script that were not run: later steps, evaluation, saving."""
        evaluates = "evaluation" if _EVALUATES.search(self._text) else ""
        saves = "saving" if _SAVES.search(self._text) else ""
        missed = (saves, evaluates if not self.recorder.evaluated else "")
        later = f"steps after the first {self.recorder.steps:,}" if self.recorder.steps else ""
        return tuple(each for each in (later, *reversed(missed)) if each)

    def raised(self, error: BaseException) -> Diagnosis:
        """The diagnosis after the script raised an exception."""
        simulated = self.simulated and not isinstance(error, _OWN)
        excuse = limit_of_simulation(error, self._call) if simulated else None
        if excuse is not None:
            where = f" (at {line})" if (line := raised_at(error)) else ""
            note = f"{_LIMIT}: {excuse}{where}"
            return _noted(replace(self._latest(), not_simulated=True), note)
        line = self._call(error_line(error))
        found = replace(self.diagnosed(line, error), not_run=self._not_run())
        reads = self.recorder.updates.reads.values()
        for lost in gradients_of_copies(reads, self._device) if "NoneType" in line else ():
            return replace(found, verdicts=(replace(lost, evidence=(line, *lost.evidence)),))
        copied = self._copied_at(error) if found.is_wrong else ""
        if copied:
            first = found.verdicts[0]
            told = replace(first, evidence=(*first.evidence, copied))
            found = replace(found, verdicts=(told, *found.verdicts[1:]))
        if found.is_wrong or found.not_simulated:
            return found
        when = "" if self.recorder.names.latest else " before it called a model"
        found = _wrong(found, f"the script failed{when}: {line}", "read the exception")
        if isinstance(error, KeyError) and not self.recorder.steps:
            for each in optimizers_without_state(_variables(error, self._script)):
                found = _noted(found, each)
        return found

    def _copied_at(self, error: BaseException) -> str:
        """Where the copy that an optimizer refuses was made; "" if it refuses none."""
        traceback = error.__traceback__
        param = None
        while traceback is not None:
            frame = traceback.tb_frame
            if frame.f_code.co_name == "add_param_group":
                param = frame.f_locals.get("param")
            traceback = traceback.tb_next
        node = param.grad_fn if isinstance(param, torch.Tensor) else None
        line = "" if node is None else self.recorder.line_of_node(node._sequence_nr())
        return f"the copy was made at {line}" if line else ""

    def ended(self, code: object, variables: Mapping[str, Any] | None = None) -> Diagnosis:
        """The diagnosis after the script ended by itself with the exit code `code`.

        `variables` are the script's global variables, if known.
        """
        recorder = self.recorder
        failed = code not in (None, 0)
        devices = {each.device for each in recorder.operands if each.shape}
        mixed = len(devices) > 1 and not recorder.steps
        caught = recorder.said if failed or mixed else None
        found = self._latest() if caught is None else self.diagnosed(caught)
        if caught is not None and not found.not_simulated:
            found = _noted(found, f"the script caught the exception: {caught}")
        if failed and not found.is_wrong and not found.not_simulated:
            steps = recorder.steps
            when = f"after {plural(steps, 'step')}" if steps else "before it took a step"
            title = f"the script exited {when}: {code}"
            return _wrong(found, title, "read its output")
        if failed:
            return _noted(found, f"it exited with {code}")
        turns = recorder.steps or max(recorder.models.count, recorder.backwards)
        if not (recorder.steps or recorder.is_idle) and turns >= self._wanted:
            found = _noted(replace(found, complete=True), self._short())  # all of it was run
        if found.complete or caught is not None:
            return self._with_stale(self._with_later(found)) if found.complete else found
        found = _noted(found, self._short())
        if variables is not None and not recorder.steps:
            with _disable_current_modes():
                models = models_never_called(variables, recorder.names.models, self._call)
                for each in (*models, *optimizers_without_state(variables)):
                    found = _noted(found, each)
        return found

    def _short(self) -> str:
        """A note that the script ended before it took the wanted steps."""
        steps, calls = self.recorder.steps, self.recorder.models.count
        if steps:
            times = plural(steps, "step")
            return f"the script ended after {times}; it should run at least {self._wanted:,}"
        if calls:
            times = "once" if calls == 1 else f"{calls:,} times"
            said = f"the script called its model {times}, and no optimizer took a step"
            return f"{said}{_IDLE}" if self.recorder.is_idle else said
        if own := self.recorder.backwards:
            passes = f"{own:,} backward pass{'es' if own > 1 else ''}"
            return f"the script ended after {passes}, and no optimizer took a step"
        return "the script ended before it called a model"


def _variables(error: BaseException, script: str) -> Mapping[str, Any]:
    """The variables of a script and of its functions in the traceback of an exception."""
    found: dict[str, Any] = {}
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_filename == script:
            found |= frame.f_locals
        traceback = traceback.tb_next
    return found


def _hides_tensors(model: torch.nn.Module) -> bool:
    """Whether a model has parameters that are not registered."""
    hidden = holdings(model).of(Ownership.UNREGISTERED)
    return any(isinstance(each.tensor, torch.nn.Parameter) for each in hidden)


def _count(parameter: torch.Tensor) -> int:
    """The number of elements of a parameter; 0 if it has no shape yet."""
    return 0 if torch.nn.parameter.is_lazy(parameter) else parameter.numel()


def _wrong(found: Diagnosis, title: str, fix: str) -> Diagnosis:
    return replace(found, verdicts=(*found.verdicts, Verdict("script-failed", title, fix)))


def _noted(found: Diagnosis, note: str) -> Diagnosis:
    return replace(found, notes=(*found.notes, note))


def run_watched(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run a script until it took its steps, and return the diagnosis; called in its own process.

    Args:
        asked: `script`, `args`, `steps`, `device`, `simulate`; `patience`: seconds from the first
            call of a model to the first step; `onward`: seconds to go on after the steps.
    """
    run, visible = _Run(asked), os.environ.get(CUDA_VARIABLE)
    sys.argv = [str(asked["script"]), *map(str, asked["args"])]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path(asked["script"]).resolve().parent))
    with ExitStack() as stack:
        if run.simulated:
            try:
                stack.enter_context(hosting(run.home))
            except NotSimulated as error:
                return run.raised(error).to_json()
        stack.enter_context(told_to(run.recorder))
        stack.enter_context(run.recorder)
        try:
            # Keep the script's variables, so that its model stays alive.
            defined = runpy.run_path(str(asked["script"]), run_name="__main__")
            run.over()
        except _Enough:
            found = run.enough()
        except SystemExit as error:
            if run.is_fork:
                raise
            found = run.ended(error.code)
        except BaseException as error:
            if run.is_fork:
                raise
            found = run.raised(error)
        else:
            found = run.ended(None, defined)
            del defined
    if not found.is_wrong:
        notes = unchecked(run.recorder.pending, run.home, visible)
        found = replace(found, notes=(*found.notes, *notes))
    return found.to_json()
