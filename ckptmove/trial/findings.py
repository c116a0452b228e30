"""Turn the outcome of a trial into findings: passed checks, failed checks, and the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..display.phrases import format_error, plural
from ..errors import CkptmoveError
from ..live.tracing.program.source_lines import raised_at, raised_in
from ..live.tracing.recording.recorder import Recorder
from ..reports.events import Trace
from ..reports.validate import FAILED, PASSED, SKIPPED, TRIAL_CHECKS, Finding
from ..system.signals import SignalReceived
from .stage import Stage, is_mismatch
from .step import Step

_MOST_HAPPENINGS = 6  # happenings of one kind that are shown
_MOST_TOLD = 200  # happenings in the data of a finding


@dataclass
class Performance:
    """The outcome of a trial, collected while it runs."""

    findings: dict[str, Finding] = field(default_factory=dict)
    step: Step | None = None
    #: The dtypes of the saved state.
    dtypes: frozenset[torch.dtype] = frozenset()
    #: Called after each added finding.
    report: Callable[[Performance], object] | None = None

    def all_findings(self) -> tuple[Finding, ...]:
        """A finding for every check; a check that was not reached is skipped."""
        return tuple(
            self.findings.get(check, Finding(check, SKIPPED, "not reached"))
            for check in TRIAL_CHECKS
        )

    def find(self, check: str, outcome: str, title: str, *lines: str, **data: Any) -> None:
        """Add a finding."""
        self.findings[check] = Finding(check, outcome, title, lines, data)
        if self.report is not None:
            self.report(self)

    def skip_rest(self, why: str) -> None:
        """Skip every check that has no finding yet."""
        for check in TRIAL_CHECKS:
            if check not in self.findings:
                self.find(check, SKIPPED, why)


# -- failures --------------------------------------------------------------------------------------


class TrialOver(Exception):
    """The rest of the trial can't run; the message says why. The finding is already added."""


@contextmanager
def reporting(found: Performance, stage: Stage, check: str, title: str) -> Iterator[None]:
    """A context that makes an exception of the user's code a finding with this title.

    A script may parse arguments that aren't its own, and exit: that is an exception too.

    Raises:
        TrialOver: the finding of an exception was added. Other errors of ckptmove, Ctrl-C and other
            signals are raised as they are.
    """
    try:
        yield
    except (CkptmoveError, TrialOver, KeyboardInterrupt, SignalReceived):
        raise
    except BaseException as error:
        excuse = stage.excuse(error)
        where = raised_at(error)
        lines = [f"at {where}"] if where else []
        data = {"error": stage.call(format_error(error)), "source": where}
        if excuse is not None:
            found.find(check, SKIPPED, f"can't be simulated: {excuse}", *lines, **data)
        else:
            found.find(check, FAILED, title, stage.call(format_error(error)), *lines, **data)
        raise TrialOver(title if excuse is None else "not reached") from error


def report_failed_step(
    found: Performance,
    stage: Stage,
    module: torch.nn.Module,
    recorder: Recorder,
    error: BaseException,
    problems: Sequence[str],
    lines: Sequence[str],
) -> None:
    """Add the findings of a step that an exception ended.

    One of the `problems` that were known before the step may be the cause.
    """
    trace = recorder.trace()
    excuse = stage.excuse(error)
    mismatch = is_mismatch(error)
    inner = raised_in(error, module)
    where = raised_at(error)
    site = trace.error
    operator = site.op if site is not None else ""
    data = {
        "error": stage.call(format_error(error)),
        "operator": operator,
        "module": inner or (site.module if site is not None else ""),
        "source": where or (site.source if site is not None else ""),
        "phase": site.phase if site is not None else "",
    }
    place = " ".join(
        f"{word} {data[key]}" for word, key in (("in", "module"), ("at", "source")) if data[key]
    )
    place = place or (f"in {data['phase']}" if data["phase"] else "")
    what = f"{operator} {place}".strip()
    if excuse is not None:
        title = f"can't be simulated: {excuse}"
        lines = [*([place] if place else []), *problems, *lines]
        found.find("step", SKIPPED, title, *lines, **data)
    else:
        title = "a tensor is on the wrong device" if mismatch else "the step failed"
        title = f"{title}: {what}" if what else title
        if problems and not mismatch:
            title, problems = problems[0], [title, *problems[1:]]
        lines = [stage.call(format_error(error)), *problems, *lines]
        found.find("step", FAILED, title, *lines, **data)
    report_trace(found, trace, data if mismatch and excuse is None else {})


def report_trace(found: Performance, trace: Trace, broken: Mapping[str, Any] | None = None) -> None:
    """Add the finding of a trace.

    `broken`: where a device mismatch ended the step; {} if something else ended it.
    """
    lines = []
    for kind, said in (
        ("stray", "computed on another device"),
        ("mixed", "operands on another device"),
        ("created", "made on another device"),
        ("transfer", "copied between devices"),
        ("sync", "waits for a value"),
    ):
        happened = trace.of(kind)
        lines += [f"{said}: {each}" for each in happened[:_MOST_HAPPENINGS]]
        more = len(happened) - _MOST_HAPPENINGS
        if more > 0:
            lines.append(f"{said}: {more:,} more")
    strays = trace.of("stray")
    total = sum(trace.operations.values())
    data = trace.to_json()
    del data["timeline"]
    data["happenings"] = data["happenings"][:_MOST_TOLD]
    if strays:
        n = sum(each.count for each in strays)
        title = f"{plural(n, 'operation')} not on {trace.device}: {strays[0].site}"
        found.find("trace", FAILED, title, *lines, **data)
    elif broken:
        title = f"{broken['operator'] or 'an operation'} got tensors on several devices"
        found.find("trace", FAILED, title, *lines, **data)
    elif broken is not None:
        title = f"the step stopped after {plural(total, 'operation')}"
        found.find("trace", SKIPPED, title, *lines, **data)
    else:
        syncs = sum(each.count for each in trace.of("sync"))
        copies = sum(each.count for each in trace.of("transfer"))
        title = (
            f"{plural(total, 'operation')}, all on {trace.device}; "
            f"{plural(copies, 'transfer')}, {plural(syncs, 'host synchronization')}"
        )
        found.find("trace", PASSED, title, *lines, **data)
