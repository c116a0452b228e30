"""Find the root causes of what a trace shows: why a model is not where it should be.

Symptoms that a cause explains are not reported again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch.utils._device import _device_constructors

from ...manifest.manifest import Manifest
from ...placement.device import kind_of
from ...reports.display.phrases import join_names, plural
from ...reports.doctor import SLOW, WRONG, Verdict
from ...reports.events import Operand, Trace
from ..inventory import findings
from ..inventory.holdings import REGISTERED, Ownership
from ..inventory.ownership import OwnershipReport
from .batch_causes import (
    bare_name,
    batch_away,
    brought,
    changed_operand,
    copied_away,
    dropped,
    inputs_away,
    is_assignable,
)
from .costs import runs_apart, waits
from .device_choice import Choice
from .evidence import DEVICES, MOST_LINES, UNKNOWN, Evidence
from .library_calls import LibraryCall
from .operations import COPY
from .refusals import refusal
from .source_lines import CALLED, LAYER
from .tensor_names import OUTPUT, PARAMETER

_NO_MODEL = Manifest(path="", format="live model", nbytes=0, tensors=(), storages={})
_OFFLOADED = "(offloaded)"
#: Functions that take `device=`.
_MAKERS = {f"torch.{each.__name__}" for each in _device_constructors()} | {"torch.tensor"}
_HIDDEN = (Ownership.UNREGISTERED, Ownership.HOOK)


def causes(
    device: str,
    manifest: Manifest,
    belonging: OwnershipReport = UNKNOWN,
    trace: Trace | None = None,
    failed: str | None = None,
    variable: str = "",
    choice: Choice | None = None,
    origins: Mapping[str, str] | None = None,
    library: LibraryCall | None = None,
    *,
    trained: bool = True,
) -> tuple[Verdict, ...]:
    """What is wrong with a run, root causes first, each with its fix.

    `failed` is the exception that ended the run, in one line; `variable` the user's name of the
    model, or ""; `choice` what chose another device for it; `origins` where its tensors were made;
    `library` a call that should have been given a device; `trained`, whether it has an optimizer.
    """
    refused = None if failed is None else refusal(failed, device)
    if refused is not None:
        return (refused,)
    case = Evidence(
        device,
        manifest,
        belonging,
        trace,
        failed,
        variable,
        choice,
        library,
        origins or {},
        trained,
    )
    found = [*_model(case)]
    moved = not any(each.cause == "model-never-moved" for each in found)
    if moved:
        found += _others(case)
        found += dropped(case)
        found += batch_away(case)
        found += _hidden(case)
        found += _made(case)
    found += _training(case)
    if moved:
        if not any(each.severity != SLOW for each in found):
            found += _elsewhere(case)
            found += runs_apart(case)
        found += waits(case)
    if failed is not None and not any(each.severity != SLOW for each in found):
        found.append(_unexplained(failed, trace))
    return tuple(found)


def _unexplained(failed: str, trace: Trace | None) -> Verdict:
    """An exception that no cause explains."""
    where = f": {trace.error}" if trace is not None and trace.error is not None else ""
    if DEVICES.search(failed):
        sampled = trace is not None and trace.watched < trace.steps
        return Verdict(
            "operand-elsewhere",
            "an operation takes tensors on several devices"
            + (", perhaps in a step that was not watched" if sampled else ""),
            "watch each step to see which: ckptmove.trace(…, every=1)"
            if sampled
            else "read the exception, and move what is on the other device",
            (f"{failed}{where}",),
        )
    title = "the step failed for a reason that has nothing to do with devices"
    return Verdict("step-failed", title, "read the exception", (f"{failed}{where}",))


def before_a_model(device: str, trace: Trace | None, failed: str) -> tuple[Verdict, ...]:
    """What is wrong with a run that failed before it called a model, if devices are the cause."""
    found = causes(device, _NO_MODEL, UNKNOWN, trace, failed)
    return tuple(each for each in found if each.cause != "step-failed")


# -- the model -------------------------------------------------------------------------------------


def _model(case: Evidence) -> Iterator[Verdict]:
    entries = [e for e in case.manifest.tensors if e.held in REGISTERED and e.part_of is None]
    entries = [e for e in entries if not e.device.endswith(_OFFLOADED)]
    swapped = case.failed is not None and "meta" not in case.failed  # by torch.func
    if case.device != "meta":
        yield from () if swapped else findings.without_values(entries, case.device)
        entries = [e for e in entries if e.device != "meta"]
    away = [e for e in entries if case.is_away(e.device)]
    if not away:
        return
    where = " and ".join(sorted({e.device for e in away}))
    if len(away) == len(entries):
        ran = case.trace.operations if case.trace is not None else {}
        lines = [f"{plural(count, 'operation')} ran on {device}" for device, count in ran.items()]
        kind, name = case.manifest.path, case.variable or "model"
        the = "" if name == "model" else f" {name} ({kind})"
        most = case.works and 2 * ran.get(case.device, 0) > sum(ran.values())
        why = f"nothing moved {'it' if the else kind} to {case.device}"
        fix = f'{name}.to("{case.device}")'
        if case.trained:
            both = f'ckptmove.move({name}, optimizer, to="{case.device}")'
            fix = f"{fix} before the optimizer is created; or move both: {both}"
        if case.choice is None or not case.choice.title:
            inputs = inputs_away(case)
            lines += [each.line for each in inputs.values()][:MOST_LINES]
            fix += f"; and each batch: {brought(list(inputs), case.device)}" if inputs else ""
        if case.library is not None and case.library.moves_model:
            why = f"{case.library.name} at {case.library.line} is given no device"
            fix = f"give it: {case.library.given(case.device)}"
        elif case.choice is not None:
            why, fix = case.choice.title or why, case.choice.fix or fix
            lines = [*case.choice.evidence, *lines]
        if case.broken():
            operands = join_names([str(each) for each in case.broken()])
            lines.append(f"{case.trace and case.trace.error} takes {operands}")
        yield Verdict(
            "model-never-moved",
            f"the model{the} is on {where}: {why}",
            fix,
            tuple(lines),
            SLOW if most else WRONG,  # it was meant, perhaps
        )
        return
    broken = {each.name for each in case.broken()}
    same_kind = all(kind_of(e.device) == kind_of(case.device) for e in away)
    if same_kind and not broken:
        return  # placed over several devices, and it works
    names = [e.name for e in away]
    case.explain(names)
    yield Verdict(
        "partly-moved",
        f"part of the model is on {where}: {join_names(names)}",
        f'model.to("{case.device}") moves all of it'
        if not same_kind
        else "move the tensors that go from one part to the next: x = "
        "x.to(next(part.parameters()).device)",
        tuple(f"{case.made_at(e.name)} is on {e.device}" for e in away[:MOST_LINES]),
        SLOW if case.works else WRONG,
    )


def _others(case: Evidence) -> Iterator[Verdict]:
    """Other modules that stayed behind: a loss with weights, another network."""
    owned: dict[str, list[Operand]] = {}
    for each in case.broken():
        if each.held == OUTPUT:
            yield _of_another(each, case)
        if each.held in REGISTERED and each.owner and each.name not in case.explained:
            owned.setdefault(each.owner, []).append(each)
    for owner, operands in owned.items():
        names = [each.name for each in operands]
        case.explain(names)
        trained = any(each.held == Ownership.PARAMETER for each in operands)
        yield Verdict(
            "model-never-moved" if trained else "criterion-never-moved",
            f"{owner} was never moved: its {join_names(names)} "
            f"{'is' if len(names) == 1 else 'are'} on {operands[0].device}",
            f'{owner}.to("{case.device}"), as the model',
            tuple(each for each in (operands[0].source, case.failed) if each),
        )


def _of_another(given: Operand, case: Evidence) -> Verdict:
    """A model that runs elsewhere, and gives what the model here can't take."""
    case.explain([given.name])
    inputs = inputs_away(case, of=given.module)
    case.explain(list(inputs))
    it = given.owner if given.owner == given.module else f"{given.owner} ({given.module})"
    before = f", and {brought(list(inputs), case.device)}" if inputs else ""
    return Verdict(
        "model-never-moved",
        f"{it} is on {given.device}: what it gives at {given.source} is used on {case.device}, as "
        f"{given.name}",
        f'{given.owner}.to("{case.device}"){before}; or, if it is to stay, '
        f"{brought([given.name], case.device)}",
        (*(each.line for each in inputs.values()), *([case.failed] if case.failed else [])),
    )


# -- tensors of the model's own --------------------------------------------------------------------


def _used(case: Evidence) -> Iterator[tuple[Operand, str, str]]:
    """Each operand on another device, with its effect and a severity."""
    error = case.trace.error if case.trace is not None else None
    broken = {each.name for each in case.broken()}
    for operand in case.broken():
        yield operand, f"{error} does not accept it", WRONG
    for each in case.happened("mixed", "stray"):
        for operand in each.operands:
            if operand.name in broken:  # what was computed of it before
                yield operand, f"{each}", WRONG
    for each in case.happened("transfer"):
        if not each.asked or each.site.phase != "forward" or each.turns < case.often:
            continue
        for operand in each.operands:
            if operand.shape and each.devices.endswith(f"→{case.device}"):
                yield operand, f"it is copied again each time: {each}", SLOW


def _hidden(case: Evidence) -> Iterator[Verdict]:
    entries = {e.name: e for e in case.manifest.tensors}
    advice = {each.name: each.advice for each in case.belonging.unregistered}
    lines: dict[str, list[str]] = {}
    worst: dict[str, str] = {}
    names: dict[str, list[str]] = {}  # of what is kept in the same list of modules
    for operand, what, severity in _used(case):
        if operand.held in _HIDDEN and operand.name not in case.explained:
            entry = entries.get(operand.name)
            group = operand.name
            if entry.kind == "parameter" if entry is not None else "." in group:
                group = operand.name.rpartition(".")[0]
            if operand.name not in names.setdefault(group, []):
                names[group].append(operand.name)
            if what not in lines.setdefault(group, []):
                lines[group].append(what)
            worst[group] = min(worst.get(group, severity), severity, key=_rank)
    for group, told in lines.items():
        names[group] += _beside(names[group], case)
        made = {name: case.made_at(name) for name in names[group]}
        told += [f"{each} is on cpu" for name, each in made.items() if each != name]
        case.explain(names[group])
        entry = entries.get(names[group][0])
        those = sorted(names[group])
        where = "cpu" if entry is None else entry.device
        attribute = those[0].rpartition(".")[2]
        registered = f'self.register_buffer("{attribute}", …, persistent=False)'
        there = f'move it to the device of the model: .to("{case.device}")'
        if entry is None and "." in those[0]:  # of what an object that is not registered holds
            holder = re.split(r"[.\[]", those[0], maxsplit=1)[0]
            registered = f'{holder}.to("{case.device}"); or register {holder}, if it is a module'
        fix = advice.get(those[0], registered if attribute.isidentifier() else there)
        yield findings.unregistered(
            those, fix, where=f"on {where}", evidence=told[:MOST_LINES], severity=worst[group]
        )


def _beside(names: Sequence[str], case: Evidence) -> list[str]:
    """Other tensors elsewhere that the same module holds, which would fail next."""
    modules = {name.rpartition(".")[0] for name in names}
    return [
        each.name
        for each in case.manifest.tensors
        if each.held in _HIDDEN and each.name not in names and case.is_away(each.device)
        if each.name.rpartition(".")[0] in modules and "[" not in each.name
    ]


def _rank(severity: str) -> bool:
    return severity == SLOW


def _made(case: Evidence) -> Iterator[Verdict]:
    """Tensors that are made on another device and used."""
    lines: dict[str, list[str]] = {}
    worst: dict[str, str] = {}
    first: dict[str, Operand] = {}
    for operand, what, severity in _used(case):
        if operand.held == "made" and operand.name not in case.explained:
            first.setdefault(operand.name, operand)
            lines.setdefault(operand.name, []).append(what)
            worst[operand.name] = min(worst.get(operand.name, severity), severity, key=_rank)
    for name, told in lines.items():
        case.explain([name])
        operand = first[name]
        module = f", in {operand.module}," if operand.module else ""
        op, _, source = name.removeprefix("what ").partition(" makes at ")
        made = operand.variable or "a tensor"
        if op == COPY:
            yield copied_away(made, operand.device, source, told[:MOST_LINES], worst[name])
            continue
        known = op in _MAKERS
        again = made == PARAMETER or op.startswith(LAYER)  # a module is made at each call
        fix = (
            f"create it on the device of the tensor that it is used with: {op}(…, device=x.device)"
        )
        bring = f"{made} = {made}.to(x.device)" if is_assignable(made) else "it.to(x.device)"
        if CALLED in source:  # in a library
            what = bring if operand.variable else "move what it makes: .to(x.device)"
            fix, known = f"give that call what is on {case.device}; or {what}", True
        if again:
            fix = "make the module once, in __init__: there model.to moves it, and it is trained"
        yield Verdict(
            "made-elsewhere",
            f"{op} at {source}{module} makes {made} on {operand.device}",
            fix
            if known or again
            else "create it on the device of the tensor that it is used with, or move it "
            f"there: {bring}",
            tuple(told[:MOST_LINES]),
            worst[name],
        )


# -- the optimizer ---------------------------------------------------------------------------------


def _training(case: Evidence) -> Iterator[Verdict]:
    """An optimizer that trains other parameters, or state on another device."""
    yield from findings.copied(case.belonging)
    if case.belonging.foreign and case.belonging.untrained:
        case.explain([name for name, _ in case.belonging.foreign])
        yield from findings.untrained(case.belonging)
    case.explain([each.name for each in case.belonging.misplaced])
    yield from findings.misplaced(case.belonging)


# -- the rest --------------------------------------------------------------------------------------


def _elsewhere(case: Evidence) -> Iterator[Verdict]:
    """Operations on another device for no known reason."""
    broken = case.broken()
    if broken:
        error = case.trace.error if case.trace is not None else None
        fix = f'x = x.to("{case.device}") before'
        if broken[0] == changed_operand(case):
            name = bare_name(broken[0].name)
            fix = f"create {name} after the model is moved, or move it before it is first changed"
        elif broken[0].held in REGISTERED:
            before = " before the optimizer is created" if case.trained else ""
            fix = f'move what holds it{before}: .to("{case.device}")'
        yield Verdict(
            "operand-elsewhere",
            f"{error} takes tensors on several devices: "
            f"{join_names([str(each) for each in broken])}",
            fix,
            () if case.failed is None else (case.failed,),
        )
        return
    if case.trace is None or case.failed is not None:
        return
    # What is differentiated is trained; else the model runs for its outputs' sake.
    phase = "backward" if case.trace.phases.get("backward") else "forward"
    often = case.trace.watched or 1  # without a step, a loss is called as often as the model
    strays = [h for h in case.happened("stray") if h.site.phase == phase and h.turns >= often]
    strays = [h for h in strays if any(each.shape for each in h.operands)]
    strays = [h for h in strays if kind_of(h.devices) != kind_of(case.device)]
    if phase == "backward":  # it is of the model's pass if it goes on there
        onward = {
            h.devices
            for h in case.happened("transfer")
            if h.site.phase == phase and h.turns >= often
        }
        strays = [h for h in strays if f"{h.devices}→{case.device}" in onward]
    elif case.trace.operations.get(case.device):
        return
    if not strays:
        return
    ran = plural(sum(each.count for each in strays), "operation")
    back = [
        each
        for each in case.happened("transfer")
        if each.asked and each.turns >= case.often and each.devices.startswith(f"{case.device}→")
    ]
    first = f"the first: {strays[0].site}"
    if back:
        line = back[0].site.source
        case.explain([line])
        first = f"because the output of the model is copied there at {line}"
    yield Verdict(
        "computed-elsewhere",
        f"{ran} of the {phase} pass ran on {strays[0].devices}, {first}",
        "keep the tensors on the device of the model: no .cpu() before the loss, "
        "and device= for new tensors",
        tuple(map(str, [*back, *strays][:MOST_LINES])),
        SLOW,
    )
