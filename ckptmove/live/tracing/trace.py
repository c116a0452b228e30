"""Watch a model take a step, and diagnose what runs on the wrong device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...display.blocks import text_of
from ...errors import UsageError
from ...manifest.device import with_index
from ...manifest.manifest import Manifest, Section
from ...reports.doctor import Diagnosis, Verdict
from ...reports.events import Happening, Trace
from ...reports.live import places
from ...runtime.environment.usable import Facts, best, facts, usable
from ..inventory.holdings import Optimizers, has_optimizer, holdings, optimizers_of, original_model
from ..inventory.manifest import manifest_of
from ..inventory.ownership import belonging
from .causes.background import UNKNOWN_PROGRAM, Background, background
from .causes.costs import found_at_end
from .causes.training_causes import stale_copies
from .causes.verdicts import before_a_model, causes, without_a_model
from .program.source_lines import error_line
from .recording.recorder import Recorder
from .recording.sampling import EVERY, checked_every, left_out


def diagnose(
    device: str,
    trace: Trace | None,
    *,
    model: nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    failed: str | None = None,
    simulated: bool = False,
    known: Facts | None = None,
    subject: str = "",
    background: Background = UNKNOWN_PROGRAM,
    fed: Callable[[torch.Tensor], bool] = lambda parameter: parameter.grad is not None,
    call: Callable[[str], str] = str,
    line: Callable[[int], str] = lambda number: "",
    origin: Callable[[torch.Tensor], str] = lambda tensor: "",
    notes: Sequence[str] = (),
    complete: bool = True,
    not_simulated: bool = False,
) -> Diagnosis:
    """Diagnose a run.

    `failed` is the exception that ended the run, in one line; `background` has facts about the
    program. `fed` tells whether a parameter has, or had, a gradient. `call` returns the displayed
    name of a device, `line` the line of an autograd node from its number, and `origin` the code
    that made a tensor. `subject` defaults to the model's class.
    """
    known = facts() if known is None else known
    verdicts: list[Verdict] = [] if simulated else list(usable(device, known))
    report: dict[str, Any] | None = None
    placed: tuple[str, ...] = ()
    if model is None and failed is not None and not verdicts:
        verdicts += before_a_model(device, trace, failed, background)
    if model is None and failed is None and not verdicts:
        verdicts += without_a_model(device, trace, background)
    if model is not None:
        found = holdings(model, optimizers, as_written=True)
        manifest = _called(manifest_of(found, original_model(model)), call)
        if not verdicts:  # else the device can't be used at all
            together = belonging(found, fed=fed, call=call, line=line)
            made = {each.name: told for each in found.all if (told := origin(each.tensor))}
            verdicts += causes(
                device,
                manifest,
                together,
                trace,
                failed,
                background,
                made,
                trained=bool(optimizers) or has_optimizer(original_model(model)),
            )
        report = manifest.to_json()
        homes = {e.device for e in manifest.tensors if e.section is Section.MODEL}
        placed = tuple(text_of(places(manifest))) if len(homes) > 1 else ()
    return Diagnosis(
        subject=subject or ("" if model is None else type(original_model(model)).__name__),
        device=device,
        simulated=simulated,
        facts=known.to_json(),
        report=report,
        placed=placed,
        trace=trace,
        verdicts=tuple(verdicts),
        notes=tuple(notes),
        complete=complete,
        not_simulated=not_simulated,
    )


def _called(manifest: Manifest, call: Callable[[str], str]) -> Manifest:
    """The manifest with displayed names of devices."""
    return replace(
        manifest,
        tensors=tuple(each._replace(device=call(each.device)) for each in manifest.tensors),
        storages={
            key: each._replace(location=call(each.location))
            for key, each in manifest.storages.items()
        },
        values_naming_devices=tuple(
            each._replace(value=call(each.value)) for each in manifest.values_naming_devices
        ),
        warnings=tuple(map(call, manifest.warnings)),
    )


def _add_note(error: BaseException | None, note: str) -> None:
    add = getattr(error, "add_note", None)  # it does not exist before Python 3.11
    if add is not None:
        add(note)


class Watch:
    """The context manager that `ckptmove.trace` returns; it watches a model while it runs.

    Attributes:
        diagnosis: the findings; set when the block ends, also after an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        device: object = None,
        every: int = EVERY,
    ) -> None:
        """Like `ckptmove.trace`; optimizers that step in the block are found even if not given."""
        holdings(model)  # fail now if the model can't be searched
        self._model = model
        self._optimizers = optimizers_of(optimizer)
        self._every = checked_every(every)
        self._facts = facts()
        self.device = with_index(best(self._facts) if device is None else device)
        self._recorder = Recorder(model, torch.device(self.device), every=every)
        self._entered = False
        self.diagnosis: Diagnosis | None = None

    def __enter__(self) -> Watch:
        if self._entered:
            raise UsageError(
                "this block is already watched", hint="call ckptmove.trace again for another block"
            )
        self._entered = True
        self._recorder.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.__exit__(kind, error, traceback)
        try:
            self._diagnose(error)
        except Exception as ours:
            if error is None:
                raise
            _add_note(error, f"ckptmove: the cause can't be found: {error_line(ours)}")

    def _diagnose(self, error: BaseException | None) -> None:
        known = [*self._optimizers]
        known += [each for each in self._recorder.names.optimizers.known if each not in known]
        trace = self._recorder.trace(error)
        self.diagnosis = diagnose(
            self.device,
            trace,
            model=self._model,
            optimizers=known,
            failed=None if error is None else error_line(error),
            known=self._facts,
            background=background(self._recorder, self._model, error),
            fed=self._recorder.names.optimizers.fed,
            line=self._recorder.line_of_node,
            origin=self._recorder.names.origin,
            notes=tuple(left_out(trace, self._every)),
            complete=error is None,
        )
        if not (error or self.diagnosis.is_wrong):
            copies = found_at_end(self._recorder, self.device)
            stale = stale_copies(self._recorder.stale.stale, self.device)
            verdicts = (*self.diagnosis.verdicts, *copies, *stale)
            self.diagnosis = replace(self.diagnosis, verdicts=verdicts)
        for each in self.diagnosis.verdicts if error is not None else ():
            _add_note(error, f"ckptmove: {each}")

    def __str__(self) -> str:
        return "nothing has been watched yet" if self.diagnosis is None else str(self.diagnosis)

    @property
    def trace(self) -> Trace:
        """The recording so far."""
        return self._recorder.trace()

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The findings, each with its fix; empty before the block ends."""
        return () if self.diagnosis is None else self.diagnosis.verdicts

    @property
    def transfers(self) -> list[Happening]:
        """Copies between devices."""
        return self.trace.of("transfer")

    @property
    def syncs(self) -> list[Happening]:
        """Values for which the host waited."""
        return self.trace.of("sync")

    @property
    def created(self) -> list[Happening]:
        """Tensors that were made on another device than the target."""
        return self.trace.of("created")
