"""The diagnosis that `doctor` and `trace` return: verdicts first, then the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..display.blocks import Block, Table, Wrong
from ..display.columns import Columns, Lanes, PageBlock
from ..display.phrases import plural
from ..display.plain import Key, Plain, derived_key
from ..display.report import Report
from ..display.text import cut, size
from ..errors import CheckFailed
from .events import Span, Trace

#: The severity: not what was asked for, or right but slower than necessary.
WRONG, SLOW = "wrong", "slow"
_WIDTHS = (5,)  # most verdicts of a severity
_LONGEST_MODULE = 60  # characters


@dataclass(frozen=True)
class Verdict(Plain):
    """One thing that is wrong, and how to fix it.

    Attributes:
        cause: a stable name for programs, for example `cpu-only-build`.
        title: the root cause in one line.
        fix: what to do: a command or a line of code where possible.
        evidence: the observations behind it, one line each.
        severity: `wrong`: not what was asked for; `slow`: correct, but slower than necessary.
    """

    cause: str
    title: str
    fix: str
    evidence: tuple[str, ...] = ()
    severity: Annotated[str, Key(after="cause")] = WRONG

    def __str__(self) -> str:
        return f"{self.title}. Fix: {self.fix}"


@dataclass(frozen=True)
class Diagnosis(Report):
    """What is wrong with a model on a device, from `doctor` or `trace`.

    `print` shows it as `ckptmove doctor` does.

    Attributes:
        subject: the examined object: the class of a model, or a script; "" for the machine alone.
        device: where everything should be.
        simulated: whether the device was simulated: for a script by one with real values, for a
            model by tensors without values.
        complete: whether everything that was asked for was watched. If not, an empty `verdicts`
            proves little.
        not_simulated: whether it is incomplete because the simulation could not continue.
        verdicts: what is wrong, root causes first.
        facts: what the machine and torch can do, as plain data.
        report: the manifest of the model after the last step, as `Manifest.to_json` gives it, or
            None.
        placed: where the modules of the model are, one line each.
        trace: what ran where, or None if nothing ran.
        not_run: parts of a script that were not run, such as `evaluation` and `saving`.
        notes: what else the user should know, one sentence each; also how a run ended that is not
            complete.
    """

    subject: str
    device: str
    simulated: bool = False
    complete: bool = True
    not_simulated: bool = False
    verdicts: tuple[Verdict, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    placed: tuple[str, ...] = ()
    trace: Trace | None = None
    not_run: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @derived_key(after="simulated")
    def ok(self) -> bool:
        """Whether nothing is wrong; findings that are only slow do not count.

        Also False if a run ended before a model was called, because then nothing is known.
        """
        return not (self.called_no_model or self.is_wrong)

    @property
    def is_wrong(self) -> bool:
        """Whether something was found to be wrong."""
        return any(each.severity == WRONG for each in self.verdicts)

    @property
    def called_no_model(self) -> bool:
        """Whether a run without known faults ended before a model or a gradient was used."""
        ran = self.trace is not None and (self.trace.calls or self.trace.phases.get("backward"))
        return not (self.complete or self.not_simulated or self.verdicts or ran)

    @derived_key(after="not_simulated")
    def unplayed(self) -> bool:
        """The old name of `not_simulated`."""
        return self.not_simulated

    def raise_if_wrong(self) -> None:
        """Raise if something is wrong.

        Raises:
            CheckFailed: something is wrong, or no model was called; the message names each root
                cause.
        """
        if self.called_no_model:
            raise CheckFailed("no model was called", path=self.subject or None)
        wrong = [each.title for each in self.verdicts if each.severity == WRONG]
        if wrong:
            raise CheckFailed("; ".join(wrong), path=self.subject or None)

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show the verdicts, the notes, the machine, the model, and what ran where."""
        yield _summary(self) if self.ok else Wrong(_summary(self))
        for verdict in self.verdicts:
            yield ""
            severity = verdict.severity
            severity = Wrong(severity) if severity == WRONG else severity
            rows = [(severity, verdict.title), ("fix", verdict.fix)]
            yield Table([*rows, *(("", line) for line in verdict.evidence)], widths=_WIDTHS)
        for note in self.notes:
            yield ""
            yield Table([("note", note)], widths=_WIDTHS)
        yield ""
        yield f"machine: {_machine(self.facts)}"
        if self.report is not None:
            yield f"model: {self.report['path']}: {self.report['verdict']}"
            yield from (f"  {line}" for line in self.placed)
        if self.trace is not None:
            yield from _ran(self.trace, full)
        if self.not_run and (self.verdicts or not self.complete):  # otherwise the top says so
            yield _missed(self)

    def page(self) -> Iterator[PageBlock]:
        """Show the verdicts, the timeline of a step, and then modules and events as tables."""
        yield from self.blocks()
        if self.trace is not None:
            yield from _timeline(self.trace)
            yield _modules(self.trace)
            yield _events(self.trace)


def _summary(found: Diagnosis) -> str:
    where = f"simulated {found.device}" if found.simulated else found.device
    subject = f"{found.subject} on {where}" if found.subject else where
    wrong = sum(each.severity == WRONG for each in found.verdicts)
    slow = len(found.verdicts) - wrong
    sorts = [f"{wrong:,} wrong"] if wrong else []
    sorts += [f"{slow:,} slow"] if slow else []
    return f"{subject}: {', '.join(sorts) or _nothing(found)}"


def _nothing(found: Diagnosis) -> str:
    """Return the line for no problems, as far as that is certain."""
    trace = found.trace
    if found.complete:
        host = found.device == "cpu" and not found.simulated
        rest = "; of a GPU this says nothing" if host else ""
        missed = f"; {_missed(found)}" if found.not_run else ""
        if host and not found.subject:
            return f"torch can use the CPU{rest}"
        if trace is None or not (trace.steps or trace.calls):
            return f"nothing is wrong{rest}"
        if not trace.steps:
            return f"no device fault in {plural(trace.calls, 'call')} of a model{missed}{rest}"
        if trace.watched < trace.steps:
            first = f"{trace.watched:,} of {trace.steps:,} training steps that were watched"
            return f"no device fault in the {first}{missed}{rest}"
        first = "training step" if trace.steps == 1 else f"{trace.steps:,} training steps"
        return f"no device fault in the first {first}{missed}{rest}"
    if found.called_no_model:
        return "no model was called"
    if trace is None or not (trace.calls or trace.phases.get("backward")):
        return "could not be simulated"
    much = "simulated" if found.not_simulated else "watched"
    return f"nothing wrong was found in the part that was {much}; {_watched(trace)}"


def _missed(found: Diagnosis) -> str:
    missed = " and ".join((", ".join(found.not_run[:-1]), found.not_run[-1])).removeprefix(" and ")
    were = "was" if found.not_run in (("evaluation",), ("saving",)) else "were"
    return f"{missed} {were} not run"


def _watched(trace: Trace) -> str:
    steps = trace.watched
    if not steps:
        return "no step was watched"
    if steps < trace.steps:
        return f"{steps:,} of {trace.steps:,} steps were watched"
    return f"{plural(steps, 'step')} {'was' if steps == 1 else 'were'} watched"


def _machine(facts: Mapping[str, Any]) -> str:
    """Return lines about Python, torch and its devices."""
    if not facts:
        return "no torch"
    build = f"built for CUDA {facts['cuda']}" if facts.get("cuda") else "built for CPU only"
    build = f"built for ROCm {facts['hip']}" if facts.get("hip") else build
    devices = [f"{each['tag']} {each['name']}".strip() for each in facts.get("devices", ())]
    seen = ", ".join(devices) if devices else "no usable GPU"
    return f"Python {facts['python']}, torch {facts['torch']} ({build}), {seen}"


def _ran(trace: Trace, full: bool) -> Iterator[Block]:
    """Show what ran where: operations, copies, waits."""
    counted_as = ((trace.calls, "call"), (trace.steps, "step"))
    times = [plural(n, what) for n, what in counted_as if n]
    ran = [f"{count:,} on {device}" for device, count in trace.operations.items()]
    much = f"; watched {trace.watched:,} of {plural(trace.steps, 'step')}"
    much = much if trace.watched < trace.steps else ""
    yield f"ran: {', '.join(times) or 'no step'}{much}; operations: {', '.join(ran) or 'none'}"
    copies: dict[str, list[int]] = {}
    for each in trace.of("transfer"):
        copied = copies.setdefault(each.devices, [0, 0])
        copied[0] += each.count
        copied[1] += each.nbytes
    for devices, (count, nbytes) in copies.items():
        often = "once" if count == 1 else f"{count:,} times"
        yield f"copied {devices}: {often}, {size(nbytes)}"
    syncs = trace.of("sync")
    if syncs:
        waited = sum(each.count for each in syncs)
        yield f"the host waited {'once' if waited == 1 else f'{waited:,} times'}"
    if full:
        yield ""
        yield _modules(trace)
        yield ""
        yield from (f"{each.kind:<9}{each}" for each in trace.happenings)


def _timeline(trace: Trace) -> Iterator[PageBlock]:
    """Show what a step did, in order: drawn by module, line and device, and as a table."""
    spans, left_out, step = trace.timeline
    if not spans:
        return
    yield f"step {step:,}, in order" if step else "what ran last, in order"
    lanes = dict.fromkeys((trace.device, *(each.device for each in spans)))
    yield Columns(
        ("phase", "module", "line", "device", "operations", "bytes made", ""),
        (
            [each.phase or "between" for each in spans],
            [each.module for each in spans],
            [each.source for each in spans],
            [each.device for each in spans],
            [each.operations for each in spans],
            [each.nbytes for each in spans],
            [_besides(each) for each in spans],
        ),
        right=(4, 5),
        counts=(4,),
        what="spans",
        drawn=Lanes((0,), 1, (2,), 3, tuple(lanes), 4, "operations", "copied or waited"),
    )
    if left_out:
        yield f"and {plural(left_out, 'operation')} of this step after these"


def _besides(span: Span) -> str:
    """Return how much was copied there, and how often the host waited."""
    said = [f"copied {devices}: {size(nbytes)}" for devices, nbytes in span.copied.items()]
    if span.waits:
        said.append("waited" + (f" {span.waits:,} times" if span.waits > 1 else ""))
    return ", ".join(said)


def _events(trace: Trace) -> Table:
    """Return a table of all notable events."""
    rows = [
        (each.kind, str(each.site), each.devices, f"{each.count:,}", size(each.nbytes))
        for each in trace.happenings
    ]
    return Table(rows, ("event", "where", "device", "times", "bytes"), right=(3, 4))


def _modules(trace: Trace) -> Table:
    """Return operations by module and device, first the modules with some on other devices."""
    rows = [
        (
            cut(name, _LONGEST_MODULE) or "(itself)",
            device,
            f"{usage.operations:,}",
            size(usage.nbytes),
        )
        for name, each in sorted(
            trace.modules.items(), key=lambda item: set(item[1]) == {trace.device}
        )
        for device, usage in each.items()
    ]
    head = "module", "device", "operations", "bytes made"
    return Table(rows, head, right=(2, 3))
