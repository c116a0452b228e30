"""Find correct code that is slower than necessary: models on another device, host waits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ....display.phrases import join_names, plural
from ....display.text import size
from ....manifest.device import kind_of
from ....reports.doctor import SLOW, Verdict
from ....reports.events import Happening, Site
from ..program.syntax import code_at
from ..recording.history import History, with_code
from ..recording.host_copies import PendingCopies
from ..recording.recorder import Recorder
from .evidence import MOST_LINES, Evidence

#: Code that puts a module on the CPU, whatever else it chooses.
_ON_PURPOSE = re.compile(r"""\.cpu\(\)|\.to\((device=)?(torch\.device\()?["']cpu["']""")
#: Operations that give the host values that it may not need (it needs shapes).
_TOLD = ("_local_scalar_dense", "_to_copy", "copy_", "equal", "is_nonzero", "item")


def runs_apart(case: Evidence) -> Iterator[Verdict]:
    """Models that run on another device at each step, while the main model is on the right one."""
    often = max(1, case.often - 1)  # such calls are recorded from the second step on
    apart = [each for each in case.happened("apart") if case.works and each.turns >= often]
    apart = [each for each in apart if each.site.module != case.known.variable]
    yield from ran_elsewhere(apart, case.device, "at each step")


def ran_elsewhere(calls: Iterable[Happening], device: str, when: str) -> Iterator[Verdict]:
    """Models that were called on another device, while the main model is on the right one."""
    models: dict[tuple[str, str], list[Happening]] = {}
    for each in calls:
        models.setdefault((each.site.module, each.devices), []).append(each)
    for (name, where), those in models.items():
        kind = those[0].operands[0].owner
        the = f"{name} ({kind})" if name != kind else name
        made = dict.fromkeys(each.operands[0].source for each in those if each.operands[0].source)
        lines = join_names([each.site.source for each in those])
        count = sum(each.count for each in those)
        there = next(filter(_ON_PURPOSE.search, made), "").rpartition("; ")[2]
        leave = f"; or leave it there, if {there} is on purpose" if there else ""
        yield Verdict(
            "runs-elsewhere",
            f"{the} runs on {where} {when}, beside the model on {device}, at {lines}",
            f'{name}.to("{device}") before that, and give it what is there{leave}',
            (f"it was called {plural(count, 'time')} after the first step", *made),
            SLOW,
        )


def found_at_end(recorder: Recorder, device: str) -> Iterator[Verdict]:
    """The verdicts about a whole run: copies and moves that are made again, or not waited for."""
    yield from _not_waited_for(recorder.pending)
    yield from _there_and_back(recorder.history, recorder.steps)
    for each in recorder.host.repeated.found(recorder.sampling.watched):
        yield Verdict(
            "copied-each-step",
            f"{each.name} ({size(each.nbytes)}) is copied to {device} at {each.line} in "
            f"{plural(each.steps, 'step')}, and does not change",
            f"copy it once, before the loop; or only what a step uses of it: {each.name}[…].to(…)",
            (f"`{code_at(each.line)}` at {each.line}",),
            SLOW,
        )
    for trip in recorder.host.trips.found:
        yield Verdict(
            "kept-elsewhere",
            f"{trip.name} stays on cpu: {trip.filled} fills it from {device}, and {trip.brought} "
            f"copies it back, {plural(trip.times, 'time')}",
            f"make it on {device}, and drop both copies; or leave it there, if the device has no "
            "memory for it",
            (f"it was made by {trip.made}",) if trip.made else (),
            SLOW,
        )


def _there_and_back(history: History, steps: int) -> Iterator[Verdict]:
    """Models that are moved away and back at each step, perhaps with a new optimizer."""
    swings = [(*lines, count) for lines, count in history.swings.items()]
    remade = [line for line, count in history.replaced.items() if count > 1]
    for away, back, count in swings:
        if count > 1 and remade:
            yield Verdict(
                "optimizer-made-anew",
                f"the optimizer is made anew at {remade[0]}, after the model was moved away and "
                f"back, {plural(count, 'time')}: the state of the one before is lost",
                "keep the optimizer, and the model on its device; to save it from there, copy its "
                "weights: {k: v.cpu() for k, v in model.state_dict().items()}",
                (with_code(away), with_code(back)),
            )
        elif count > 2 and 2 * count >= steps:
            yield Verdict(
                "moved-each-step",
                f"a model is moved away at {away}, and back at {back}, {plural(count, 'time')}",
                "leave it on its device, and copy only what is needed elsewhere: p.detach().cpu()",
                (with_code(away), with_code(back)),
                SLOW,
            )


def _not_waited_for(pending: PendingCopies) -> Iterator[Verdict]:
    """Copies that the host does not wait for, though it uses their memory."""
    for copied, used, fills in pending.races:
        code, done = f"`{code_at(used)}` at {used}", "reads" if fills else "changes"
        start = f"the copy that `{code_at(copied)}` at {copied} starts"
        wait = "torch.cuda.synchronize() before it reads the memory"
        if not fills:
            wait = "record an event after the copy, and event.synchronize() before that line"
        yield Verdict(
            "copy-not-waited-for",
            f"{code} {done} pinned memory without a wait for {start} with non_blocking=True: the "
            f"values may be wrong",
            f"{wait}; or drop non_blocking=True at {copied}",
        )


def wrong_autocast(case: Evidence) -> Iterator[Verdict]:
    """Autocast for a kind of device that is not the model's."""
    history = case.known.history
    kind, entered = kind_of(case.device), {} if history is None else history.autocasts
    if not case.works or not entered or kind in entered.values():
        return
    line, other = next(iter(entered.items()))
    yield Verdict(
        "autocast-elsewhere",
        f"autocast at {line} is for {other}, and the model runs on {case.device}: nothing is cast",
        f'torch.autocast("{kind}", …)',
        (f"`{code_at(line)}` at {line}",),
        SLOW,
    )


def waits(case: Evidence) -> Iterator[Verdict]:
    """Values that the host waits for at every step."""
    if case.trace is None or kind_of(case.device) == "cpu" or not case.trace.steps:
        return
    syncs = [
        each
        for each in case.happened("sync")
        if each.asked
        and each.turns >= case.often
        and not case.is_away(each.devices)
        and each.site.op.partition(".")[2].partition(".")[0] in _TOLD
        and each.site.source not in case.explained
    ]
    if not syncs:
        return
    count = sum(each.count for each in syncs) / case.often
    times = "once a step" if count == 1 else f"{count:g} times a step"
    lines = [f"{_read(each.site)}, {plural(each.count, 'time')}" for each in syncs]
    yield Verdict(
        "host-waits",
        f"{_read(syncs[0].site)} waits for {case.device}; the host waits {times}",
        "keep values on the device (loss.detach()), and read them (.item(), .cpu(), "
        ".tolist(), if tensor:) only once in many steps",
        tuple(lines[:MOST_LINES]),
        SLOW,
    )


def _read(site: Site) -> str:
    """The code that reads a value, and its line."""
    return f"`{code_at(site.source) or site.op}` at {site.source}"
