"""Find inputs of a run on another device: the batch, and tensors whose `.to` result is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ....display.phrases import join_names
from ....reports.doctor import WRONG, Verdict
from ....reports.events import Operand
from ...inventory import findings
from ..program.loop_tensors import LOOP
from ..program.source_lines import CALLED
from ..program.syntax import line_in_function, line_that_sets, runs_once
from ..recording.history import DOES_NOT_MOVE, with_code
from ..recording.operations import COPY
from .evidence import MOST_LINES, Evidence

_COPIED = f", made by {COPY} at "  # in the name of a tensor
_LEFT = " leaves it there"  # in the history's text about a `.to`
#: torch's text if a loss refuses its weights.
_WEIGHT = re.compile(r"but got (pos_)?weight is on ")


def dropped(case: Evidence) -> Iterator[Verdict]:
    """Copies that were made and not used, although a later operation needed them."""
    broken = {bare_name(each.name) for each in case.broken()}
    for each in case.happened("dropped"):
        names = list(dict.fromkeys(bare_name(operand.name) for operand in each.operands))
        in_vain = each.asked and case.failed is None and not case.works  # all ran elsewhere
        if not broken & set(names) and not in_vain:
            continue  # the unused copy did no harm
        case.explain(names)
        variables = [bare_name(operand.variable) for operand in each.operands]
        named = [*filter(root_variable, names)] or [*filter(root_variable, variables)]
        mended = list(dict.fromkeys(named)) or ["x"]
        fix = f"{code_to_bring(mended[:1], case.device)}; .to never moves a tensor in place"
        yield Verdict(
            "to-result-dropped",
            f"the result of .to is not used at {each.site.source or 'an unknown line'}: "
            f"{join_names(mended)} stay{'s' if len(mended) == 1 else ''} on "
            f"{each.devices.partition('→')[0]}",
            fix,
            (str(each),),
        )


def bare_name(name: str) -> str:
    """The name in `x, made by randn at train.py:3`."""
    return name.partition(", made by ")[0]


def root_variable(name: str) -> str:
    """The variable in `x` and in `batch['x']`; "" if there is none, or of other code."""
    found = re.fullmatch(r"([^\W\d]\w*)(\.[^\W\d]\w*|\.\d+|\[[^\[\]]*\])*", name)
    return "" if found is None else found[1]


def is_assignable(name: str) -> bool:
    """Whether code may assign to a name: `x`, `self.x`, `batch['x']`; but not `batch[0]`."""
    return re.fullmatch(r"(self\.)?[^\W\d]\w*(\[(['\"]).*\3\])?", name) is not None


def changed_operand(case: Evidence) -> Operand | None:
    """The tensor that the failed operation would have changed in place (an average), or None."""
    error = case.trace.error if case.trace is not None else None
    if error is None or case.trace is None or not case.trace.operands:
        return None
    name = error.op.partition(".")[2].partition(".")[0]
    return case.trace.operands[0] if name.endswith("_") else None


def code_to_bring(names: Sequence[str], device: str) -> str:
    """The code that brings tensors to a device: `x`, `batch['x']`; for `batch[0]` all of `batch`.

    Items of a tuple can't be assigned to, and a name with a dot or a number may be such an item.
    """
    first = names[0]
    if not is_assignable(first):
        variable = root_variable(first)
        return f'{variable} = ckptmove.to_device({variable}, "{device}")'
    others = [each for each in names[1:] if is_assignable(each)]
    likewise = f", likewise {join_names(others)}" if others else ""
    return f'{first} = {first}.to("{device}"){likewise}'


class Input(NamedTuple):
    """An argument of a model call on another device, or another tensor of the user's loop."""

    operand: Operand
    looped: bool  #: whether only the loop has it
    source: str  #: the line of the model call, or of the loop
    line: str  #: a line of evidence


def inputs_away(case: Evidence, of: str = "") -> dict[str, Input]:
    """The inputs that are not explained yet, by name; `of` restricts them to one model."""
    found: dict[str, Input] = {}
    for each in sorted(case.happened("input"), key=lambda each: each.site.op == LOOP):
        looped, source = each.site.op == LOOP, each.site.source
        where = f", of the same loop at {source}"
        if not looped:
            where = f" when {each.site.module} is called at {source}"
        for operand in each.operands:
            name = bare_name(operand.name)
            meant = operand.held == "input" and name not in case.explained
            if meant and name not in found and (not of or looped or each.site.module == of):
                found[name] = Input(operand, looped, source, f"{operand}{where}")
    return found


def _is_target(operand: Operand, case: Evidence) -> bool:
    """Whether an operand is a target of a loss that the user's loop made."""
    within = operand.module or operand.owner
    if operand.held != "made" or within or not root_variable(operand.variable):
        return False
    if _WEIGHT.search(case.failed or ""):  # class weights are no part of a batch
        return False
    error = case.trace.error if case.trace is not None else None
    return error is not None and any(each in error.op for each in ("loss", "cross_entropy"))


def copied_away(
    name: str, device: str, source: str, evidence: Sequence[str], severity: str = WRONG
) -> Verdict:
    """A tensor that was copied away from the device, and is used with tensors there."""
    return Verdict(
        "operand-elsewhere",
        f"{name} was copied to {device} at {source}, and is used with what stayed on the device",
        f"leave it on the device at {source}: no .cpu(); or bring it back before it is used",
        tuple(evidence),
        severity,
    )


def _line_that_sets(variable: str, given: Input | None, case: Evidence) -> str:
    """The line that gave a variable the value that the failed code used; or ""."""
    error = case.trace.error if case.trace is not None else None
    lines = [each.source for each in (given, error) if each is not None] + [case.known.given_at]
    found = (line_that_sets(each.partition(CALLED)[0], variable) for each in lines)
    return next(filter(None, found), "")


def batch_away(case: Evidence) -> Iterator[Verdict]:
    """Inputs of the model, and other inputs of the failed operation from outside."""
    broken = [each for each in case.broken() if bare_name(each.name) not in case.explained]
    targets = [each for each in broken if _is_target(each, case)]
    broken = [each for each in broken if each.held in ("", "input") or each in targets]
    broken = [each for each in broken if each != changed_operand(case)]
    if not broken:
        return
    copied = [each for each in broken if _COPIED in each.name]
    for operand in copied:
        name, _, source = operand.name.partition(_COPIED)
        case.explain([name])
        yield copied_away(name, operand.device, source, [case.failed or ""])
    broken = [each for each in broken if each not in copied]
    if not broken:
        return
    names = {each.variable if each in targets else bare_name(each.name): each for each in broken}
    case.explain([each.name for each in targets])
    lines, looped = [f"{each}" for each in targets], list[str]()
    inputs = inputs_away(case)
    for name, each in inputs.items():
        if each.looped and name in names:
            continue
        lines.append(each.line)
        if not each.looped and "len" not in name:  # lengths of sequences belong on the host
            names.setdefault(name, each.operand)
        looped += [name] if each.looped else []
    case.explain(list(names))
    first = next(iter(names))
    variable = root_variable(first)
    if not variable:  # an expression; its code may be unknown
        first = f"what {case.trace.error} takes" if case.trace is not None else first
        first = f"`{code}`" if (code := broken[0].variable) else first
        names = {first: broken[0]}
    where = " and ".join(sorted({each.device for each in names.values()}))
    made = ""
    if not variable:
        to = f'"{case.device}")'
        fix = f"bring it before: .to({to}; of a batch, all of it: ckptmove.to_device(…, {to}"
    else:
        one = code_to_bring([*names, *looped], case.device)
        whole = code_to_bring([f"{variable}[0]"], case.device)
        item = first.startswith(f"{variable}[") and one != whole
        made = _line_that_sets(variable, inputs.get(first), case)
        when = f"after {made}" if made and not item else "before it is used"
        fix = f"{one} {when}" + (f"; or the whole batch: {whole}" if item else "")
    left = next((each.source for each in names.values() if _LEFT in each.source), "")
    if left:
        lines.insert(0, left)
        fix = f'give that call "{case.device}": {left.partition(_LEFT)[0]}'
    method = next((each.source for each in names.values() if DOES_NOT_MOVE in each.source), "")
    if method:
        lines.insert(0, method)
        method = method.removesuffix(DOES_NOT_MOVE)
        field = f"self.{first.rpartition('.')[2]}"
        kept = with_code(line_in_function(method.rpartition(" at ")[2], field))
        fix = f"move it in {method}, too, as its other tensors" + (f": {kept}" if kept else "")
    if case.known.library is not None:  # the library moves each batch
        fix = case.known.library.fix(case.device)
        lines.insert(0, case.known.library.why)
    lines = lines or [f"{each}" for each in broken if bare_name(each.name) != each.name]
    lines += [f"{with_code(made)} sets {first}"] if made else []
    error, given = case.trace and case.trace.error, case.known.given_at
    called = f"{CALLED}{case.known.called_at}" if case.known.called_at else ""
    used = [f"{error}{called} does not accept it"] if error else []
    used += [f"it was given there at {given}"] if given and given not in called else []
    evidence = [*lines[:MOST_LINES], *used] or ([case.failed] if case.failed else [])
    told = findings.batch(list(names), where, fix, evidence)
    if all(_is_made_once(each, made if name == first else "") for name, each in names.items()):
        are = "is" if len(names) == 1 else "are"
        told = replace(told, title=f"{join_names(list(names))} {are} on {where}")
    yield told


def _is_made_once(operand: Operand, made: str) -> bool:
    """Whether an operand was made before the loop, and is no input of a model: no batch."""
    line = made or operand.name.partition(", made by ")[2].rpartition(" at ")[2]
    return operand.held != "input" and runs_once(line.partition(CALLED)[0])
