"""Find tensors on another device that a model does not register, or that the code makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch.utils._device import _device_constructors

from ....reports.doctor import SLOW, WRONG, Verdict
from ....reports.events import Operand
from ...inventory import findings
from ...inventory.holdings import Ownership
from ...inventory.ownership import UnregisteredTensor
from ..program.given_device import choice_of_argument
from ..program.source_lines import CALLED, LAYER
from ..program.syntax import function_at, is_method, keeps_argument
from ..recording.operations import COPY, LOAD
from ..recording.tensor_names import PARAMETER, TRAINED
from .batch_causes import copied_away, is_assignable
from .evidence import MOST_LINES, Evidence

#: Functions that take `device=`.
_MAKERS = {f"torch.{each.__name__}" for each in _device_constructors()} | {"torch.tensor"}
_HIDDEN = (Ownership.UNREGISTERED, Ownership.HOOK, Ownership.CLASS)


def _used(case: Evidence) -> Iterator[tuple[Operand, str, str]]:
    """Each operand on another device, with its effect and a severity."""
    error = case.trace.error if case.trace is not None else None
    broken = {each.name for each in case.broken()}
    for operand in case.broken():
        yield operand, f"{error} does not accept it", WRONG
    for each in case.happened("mixed", "stray"):
        for operand in each.operands:
            if operand.name in broken:  # it was computed from this operand before
                yield operand, f"{each}", WRONG
    for each in case.happened("transfer"):
        if not each.asked or each.site.phase != "forward" or each.turns < case.often:
            continue
        for operand in each.operands:
            if operand.shape and each.devices.endswith(f"→{case.device}"):
                yield operand, f"it is copied again each time: {each}", SLOW


def hidden_tensors(case: Evidence) -> Iterator[Verdict]:
    """Tensors that the model holds, but has not registered."""
    entries = {e.name: e for e in case.manifest.tensors}
    old_values = case.known.old_values
    advice = {
        each.name: _advice(each, old_values.get(each.name, ""))
        for each in (*case.known.unregistered, *case.belonging.unregistered)
    }
    shared_by = {
        each.name: each.kind.__name__
        for each in case.belonging.unregistered
        if each.held is Ownership.CLASS
    }
    untrained = {each.name for each in case.belonging.unregistered if each.untrained}
    given = {each.name for each in case.belonging.unregistered if keeps_argument(each.line)}
    givers = dict[str, str]()  # by the name of a tensor that its module was given
    lines: dict[str, list[str]] = {}
    worst: dict[str, str] = {}
    names: dict[str, list[str]] = {}  # tensors that are kept in the same list of modules
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
            if operand.name in given and operand.source:
                givers[operand.name] = operand.source
            severity = WRONG if operand.name in untrained else severity
            worst[group] = min(worst.get(group, severity), severity, key=_rank)
    for group, told in lines.items():
        if set(names[group]) <= case.explained:  # explained beside another one
            continue
        names[group] += _beside(names[group], case)
        if any(name in untrained for name in names[group]):
            told.insert(0, "no optimizer has it: it is never trained")
        made = {name: case.made_at(name) for name in names[group]}
        told += [f"{each} is on cpu" for name, each in made.items() if each != name]
        told += [f"{name} was given by {givers[name]}" for name in names[group] if name in givers]
        case.explain(names[group])
        entry = entries.get(names[group][0])
        those = sorted(names[group])
        where = "cpu" if entry is None else entry.device
        attribute = those[0].rpartition(".")[2]
        registered = f'self.register_buffer("{attribute}", …, persistent=False)'
        there = f'move it to the device of the model: .to("{case.device}")'
        holder = re.split(r"[.\[]", those[0], maxsplit=1)[0]
        if entry is None and "." in those[0] and holder.isidentifier():  # it is not registered
            registered = f'{holder}.to("{case.device}"); or register {holder}, if it is a module'
        fix = advice.get(those[0], registered if attribute.isidentifier() else there)
        if old := old_values.get(those[0], ""):
            told.insert(0, f"it holds the values that {old} had before the model was moved")
        fix += code_to_make_anew(those, case)
        yield findings.unregistered_verdict(
            those,
            fix,
            where=f"on {where}",
            shared_by=shared_by.get(those[0], ""),
            evidence=told[:MOST_LINES],
            severity=worst[group],
        )


def _advice(found: UnregisteredTensor, parameter: str) -> str:
    """The code to write instead, and where; it may hold the old values of a parameter."""
    tied = f"use {parameter} itself, which is still trained, and not its .data"
    advice = tied if parameter else found.advice
    return f"at {found.line}: {advice}" if found.line else advice


def code_to_make_anew(names: Sequence[str], case: Evidence) -> str:
    """A further fix if a method makes such a tensor anew, perhaps after the model is moved."""
    for name in names:
        maker, _, line = case.origins.get(name, "").partition(" at ")
        method = function_at(line)
        if maker.startswith(LAYER) or method == "__init__" or not is_method(line):
            continue
        where = f"; where {method} makes it anew at {line}: "
        if maker in _MAKERS:
            return f"{where}{maker}(…, device=next(self.parameters()).device)"
        return f"{where}keep it on the device of the model"
    return ""


def code_of_state(maker: str, device: str) -> str:
    """The fix for an optimizer's state that the function `maker` made on another device."""
    if maker in _MAKERS:
        return f"make it like the parameter: torch.zeros_like(p), or {maker}(…, device=p.device)"
    if maker == LOAD:
        return f'load it there: torch.load(…, map_location="{device}")'
    return "bring it to its parameter: .to(p.device)"


def _beside(names: Sequence[str], case: Evidence) -> list[str]:
    """Other tensors of the same module on another device; they would fail next."""
    modules = {name.rpartition(".")[0] for name in names}
    return [
        each.name
        for each in case.manifest.tensors
        if each.held in _HIDDEN and each.name not in names and case.is_away(each.device)
        if each.name.rpartition(".")[0] in modules and "[" not in each.name
    ]


def _rank(severity: str) -> bool:
    return severity == SLOW


def tensors_made(case: Evidence) -> Iterator[Verdict]:
    """Tensors that are made on another device and used."""
    lines: dict[str, list[str]] = {}
    worst: dict[str, str] = {}
    first: dict[str, Operand] = {}
    for operand, what, severity in _used(case):
        if operand.held in ("made", TRAINED) and operand.name not in case.explained:
            first.setdefault(operand.name, operand)
            if what not in lines.setdefault(operand.name, []):
                lines[operand.name].append(what)
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
        if op == LOAD:
            fix, known = f'torch.load(…, map_location="{case.device}"); or {bring}', True
        if op == "torch.clone":  # perhaps of weights that are changed in place
            fix, known = (
                f"make that copy after the model is moved to {case.device}, or bring it there "
                "once, where it is made",
                True,
            )
        if operand.held == TRAINED and op != "torch.clone":
            fix, known = (
                f"make it at once of values on {case.device}, with requires_grad=True, before the "
                "optimizer is made; .to of it gives a copy that none trains",
                True,
            )
        if CALLED in source and op != "torch.clone":  # the tensor is made in a library
            what = bring if operand.variable else "move what it makes: .to(x.device)"
            fix, known = f"give that call what is on {case.device}; or {what}", True
        choice = choice_of_argument(source, operand.device, case.device)
        if choice is not None and not again:
            told = [choice.title, *choice.evidence, *told]
            fix, known = choice.fix, True
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
