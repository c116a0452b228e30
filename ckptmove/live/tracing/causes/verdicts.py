"""Find the root causes in a trace: why a model or a tensor is on the wrong device.

Symptoms that a cause explains are not reported again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ....display.phrases import join_names, plural
from ....manifest.device import kind_of
from ....manifest.manifest import Manifest
from ....reports.doctor import SLOW, WRONG, Verdict
from ....reports.events import Operand, Trace
from ...inventory import findings
from ...inventory.holdings import REGISTERED, Ownership
from ...inventory.ownership import OwnershipReport
from ..recording.tensor_names import OUTPUT
from .background import UNKNOWN_PROGRAM, Background
from .batch_causes import (
    bare_name,
    batch_away,
    changed_operand,
    code_to_bring,
    dropped,
    inputs_away,
)
from .costs import runs_apart, waits, wrong_autocast
from .device_exceptions import refusal
from .evidence import DEVICES, MOST_LINES, UNKNOWN, Evidence
from .operand_causes import code_to_make_anew, hidden_tensors, tensors_made
from .training_causes import hidden_parameters, lost_changes, lost_gradients, training

_NO_MODEL = Manifest(path="", format="live model", nbytes=0, tensors=(), storages={})
_OFFLOADED = "(offloaded)"


def causes(
    device: str,
    manifest: Manifest,
    belonging: OwnershipReport = UNKNOWN,
    trace: Trace | None = None,
    failed: str | None = None,
    known: Background = UNKNOWN_PROGRAM,
    origins: Mapping[str, str] | None = None,
    *,
    trained: bool = True,
) -> tuple[Verdict, ...]:
    """The verdicts about a run, root causes first, each with its fix.

    `failed` is the exception that ended the run, in one line. `known` has facts about the program,
    and `origins` the code that made the model's tensors. `trained`: the model has an optimizer.
    """
    refused = None if failed is None else refusal(failed, device, known)
    if refused is not None:
        return (refused,)
    case = Evidence(device, manifest, belonging, trace, failed, known, origins or {}, trained)
    found = [*_model(case)]
    moved = not any(each.cause == "model-never-moved" for each in found)
    if moved:
        found += _others(case)
        found += dropped(case)
        found += batch_away(case)
        found += hidden_tensors(case)
        found += tensors_made(case)
    if moved or not known.was_there:  # else the state stayed on the device
        found += training(case)
    found += lost_changes(case)
    found += lost_gradients(case)
    found += hidden_parameters(case)
    if moved:
        found += wrong_autocast(case)
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


def before_a_model(
    device: str, trace: Trace | None, failed: str, known: Background
) -> tuple[Verdict, ...]:
    """The verdicts about a run that failed before it called a model, if devices are the cause."""
    found = causes(device, _NO_MODEL, UNKNOWN, trace, failed, known)
    return tuple(each for each in found if each.cause != "step-failed")


def without_a_model(device: str, trace: Trace | None, known: Background) -> tuple[Verdict, ...]:
    """The verdicts about a run without modules that trained tensors mostly on other devices."""
    case = Evidence(device, _NO_MODEL, UNKNOWN, trace, None, known)
    ran = {} if trace is None else trace.operations
    if not known.variables or 2 * ran.get(device, 0) > sum(ran.values()):
        return ()
    names = list(known.variables)
    where = " and ".join(sorted(each for each in ran if each != device))
    lines = [f"{plural(count, 'operation')} ran on {each}" for each, count in ran.items()]
    made = [f"{name}, made by {line}, is trained" for name, line in known.variables.items() if line]
    fix = f'make it there before the optimizer is made: device="{device}", requires_grad=True'
    trained = Verdict(
        "model-never-moved",
        f"the optimizer trains {join_names(names)} on {where}, and not on {device}",
        fix if len(names) == 1 else fix.replace("it", "them", 1),
        (*lines, *made[:MOST_LINES]),
    )
    return (trained, *dropped(case))


# -- the model -------------------------------------------------------------------------------------


def _model(case: Evidence) -> Iterator[Verdict]:
    entries = [e for e in case.manifest.tensors if e.held in REGISTERED and e.part_of is None]
    entries = [e for e in entries if not e.device.endswith(_OFFLOADED)]
    own = any(each.held in REGISTERED for each in case.broken())
    if case.known.was_there and case.failed is not None and not own and case.known.choice is None:
        return  # the model was moved away after it had run
    swapped = case.failed is not None and "meta" not in case.failed  # by torch.func, perhaps
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
        kind, name = case.manifest.path, case.known.variable or "model"
        the = "" if name == "model" else f" {name} ({kind})"
        most = case.works and 2 * ran.get(case.device, 0) > sum(ran.values())
        if case.works and case.known.was_there and list(ran) == [case.device]:
            return  # it was taken back after it had done its work
        why = f"nothing moved {'it' if the else kind} to {case.device}"
        why = f"it was on {case.device} before" if case.known.was_there else why
        why = case.known.added[0] if case.known.added else why
        fix = f'{name}.to("{case.device}")'
        if case.trained:
            both = f'ckptmove.move({name}, optimizer, to="{case.device}")'
            when = "after that, and before" if case.known.added else "before"
            fix = f"{fix} {when} the optimizer is created; or move both: {both}"
        if case.known.choice is None or not case.known.choice.title:
            inputs = inputs_away(case)
            lines += [each.line for each in inputs.values()][:MOST_LINES]
            fix += f"; and each batch: {code_to_bring(list(inputs), case.device)}" if inputs else ""
        if case.known.library is not None and case.known.library.moves_model:
            why, fix = case.known.library.why, case.known.library.fix(case.device)
        elif case.known.choice is not None:
            why, fix = case.known.choice.title or why, case.known.choice.fix or fix
            lines = [*case.known.choice.evidence, *lines]
        if case.broken():
            operands = join_names([str(each) for each in case.broken()])
            lines.append(f"{case.trace and case.trace.error} takes {operands}")
        yield Verdict(
            "model-never-moved",
            f"the model{the} is on {where}: {why}",
            fix,
            tuple(lines),
            SLOW if most else WRONG,  # perhaps this is intended
        )
        return
    broken = {each.name for each in case.broken()}
    same_kind = all(kind_of(e.device) == kind_of(case.device) for e in away)
    if same_kind and not broken:
        return  # the model works, spread over several devices
    names = [e.name for e in away]
    case.explain(names)
    after = " after that" if case.known.added else ""
    fix = f'model.to("{case.device}"){after} moves all of it'
    for path, method in case.belonging.own_moves:
        if any(not path or name.startswith(f"{path}.") for name in names):
            fix = f"move {join_names(names)} in {method}, too, which is called instead of torch's"
    yield Verdict(
        "partly-moved",
        f"part of the model is on {where}: {join_names(names)}",
        fix + code_to_make_anew(names, case) + _or_leave(case)
        if not same_kind
        else "move the tensors that go from one part to the next: x = "
        "x.to(next(part.parameters()).device)",
        (
            *case.known.added,
            *(f"{case.made_at(e.name)} is on {e.device}" for e in away[:MOST_LINES]),
        ),
        SLOW if case.works else WRONG,
    )


def _or_leave(case: Evidence) -> str:
    """A further way to mend a part that works elsewhere: what it gives is moved in each forward."""
    for each in case.happened("transfer") if case.works else ():
        here = each.devices.endswith(f"→{case.device}")
        if here and each.asked and each.site.phase == "forward":
            return f"; or leave it, if what it gives is moved at {each.site.source} on purpose"
    return ""


def _others(case: Evidence) -> Iterator[Verdict]:
    """Other modules that were not moved: a loss with weights, another network."""
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
    """A model on another device whose output this model can't take."""
    case.explain([given.name])
    inputs = inputs_away(case, of=given.module)
    case.explain(list(inputs))
    it = given.owner if given.owner == given.module else f"{given.owner} ({given.module})"
    before = f", and {code_to_bring(list(inputs), case.device)}" if inputs else ""
    return Verdict(
        "model-never-moved",
        f"{it} is on {given.device}: what it gives at {given.source} is used on {case.device}, as "
        f"{given.name}",
        f'{given.owner}.to("{case.device}"){before}; or, if it is to stay, '
        f"{code_to_bring([given.name], case.device)}",
        (*(each.line for each in inputs.values()), *([case.failed] if case.failed else [])),
    )


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
    # A run with a backward pass trains the model; without one, the outputs are what matters.
    phase = "backward" if case.trace.phases.get("backward") else "forward"
    often = case.trace.watched or 1  # without a step, a loss runs as often as a model
    strays = [h for h in case.happened("stray") if h.site.phase == phase and h.turns >= often]
    strays = [h for h in strays if any(each.shape for each in h.operands)]
    strays = [h for h in strays if kind_of(h.devices) != kind_of(case.device)]
    if phase == "backward":  # it belongs to the model if it continues there
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
    if back and not any(operand.shape for each in back for operand in each.operands):
        return  # single numbers, such as losses, cost little there
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
