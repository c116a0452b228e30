"""Show a diagnosis: verdicts first, then the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..phrases import plural
from .data.diagnosis import Diagnosis
from .data.events import Happening, Trace
from .data.verdict import WRONG, Verdict
from .text import cut, printable, size, table

_INDENT = 7  # columns of a severity
_LONGEST_MODULE = 60  # characters


@dataclass(frozen=True)
class ShownDiagnosis(Diagnosis):
    """A diagnosis that shows itself: printed, it is what `ckptmove doctor` shows."""

    def __str__(self) -> str:
        return "\n".join(diagnosis(self))


def diagnosis(found: Diagnosis, *, full: bool = False) -> Iterator[str]:
    """A diagnosis as text.

    Args:
        found: what is the matter.
        full: whether to shorten nothing.
    """
    yield printable(_summary(found))
    for verdict in found.verdicts:
        yield ""
        yield from _verdict(verdict)
    for note in found.notes:
        yield ""
        yield printable(f"{'note':<{_INDENT}}{note}")
    yield ""
    yield printable(f"machine: {_machine(found.facts)}")
    if found.report is not None:
        yield printable(f"model: {found.report['path']}: {found.report['verdict']}")
        for line in found.placed:
            yield f"  {line}"
    if found.trace is not None:
        yield from _ran(found.trace, full)


def _summary(found: Diagnosis) -> str:
    where = f"simulated {found.device}" if found.simulated else found.device
    subject = f"{found.subject} on {where}" if found.subject else where
    wrong = sum(each.severity == WRONG for each in found.verdicts)
    slow = len(found.verdicts) - wrong
    sorts = [f"{wrong:,} wrong"] if wrong else []
    sorts += [f"{slow:,} slow"] if slow else []
    return f"{subject}: {', '.join(sorts) or _nothing(found)}"


def _nothing(found: Diagnosis) -> str:
    """That nothing is wrong, as far as that can be said."""
    trace = found.trace
    if found.complete:
        watched = f"; {_watched(trace.steps)}" if trace is not None and trace.steps else ""
        return f"nothing is wrong{watched}"
    if trace is None or not trace.calls:
        return "could not be simulated" if found.not_simulated else "nothing was watched"
    much = "simulated" if found.not_simulated else "watched"
    return f"nothing wrong was found in the part that was {much}; {_watched(trace.steps)}"


def _watched(steps: int) -> str:
    if not steps:
        return "no step was watched"
    return f"{plural(steps, 'step')} {'was' if steps == 1 else 'were'} watched"


def _verdict(verdict: Verdict) -> Iterator[str]:
    yield printable(f"{verdict.severity:<{_INDENT}}{verdict.title}")
    yield printable(f"{'fix':<{_INDENT}}{verdict.fix}")
    for line in verdict.evidence:
        yield printable(f"{'':<{_INDENT}}{line}")


def _machine(facts: Mapping[str, Any]) -> str:
    """Python, torch and what it can use."""
    if not facts:
        return "torch is not installed"
    build = f"built for CUDA {facts['cuda']}" if facts.get("cuda") else "built for CPU only"
    build = f"built for ROCm {facts['hip']}" if facts.get("hip") else build
    devices = [f"{each['tag']} {each['name']}".strip() for each in facts.get("devices", ())]
    seen = ", ".join(devices) if devices else "no usable GPU"
    return f"Python {facts['python']}, torch {facts['torch']} ({build}), {seen}"


def _ran(trace: Trace, full: bool) -> Iterator[str]:
    """What ran where: operations, copies, waits."""
    counted_as = ((trace.calls, "call"), (trace.steps, "step"))
    times = [plural(n, what) for n, what in counted_as if n]
    ran = [f"{count:,} on {device}" for device, count in trace.operations.items()]
    yield printable(f"ran: {', '.join(times) or 'no step'}; operations: {', '.join(ran) or 'none'}")
    copies: dict[str, list[int]] = {}
    for each in trace.of("transfer"):
        copied = copies.setdefault(each.devices, [0, 0])
        copied[0] += each.count
        copied[1] += each.nbytes
    for devices, (count, nbytes) in copies.items():
        often = "once" if count == 1 else f"{count:,} times"
        yield printable(f"copied {devices}: {often}, {size(nbytes)}")
    syncs = trace.of("sync")
    if syncs:
        waited = sum(each.count for each in syncs)
        yield f"the host waited {'once' if waited == 1 else f'{waited:,} times'}"
    if full:
        yield from _modules(trace)
        yield from _happenings(trace.happenings)


def _modules(trace: Trace) -> Iterator[str]:
    """Operations by module and device, those first that are not all where they should be."""
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
    yield ""
    yield from table([("module", "device", "operations", "bytes made"), *rows], right=(2, 3))


def _happenings(happenings: Sequence[Happening]) -> Iterator[str]:
    yield ""
    for each in happenings:
        yield printable(f"{each.kind:<9}{each}")
