"""Find why a model that runs is not trained: a wrong optimizer, or values cut from the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ....display.phrases import join_names
from ....reports.doctor import Verdict
from ...inventory import findings
from ...inventory.ownership import UnregisteredTensor
from ..program.source_lines import LAYER
from ..recording.history import with_code
from ..recording.operations import COPY
from ..recording.stale_copies import StaleCopy
from ..recording.updates import Read
from .evidence import MOST_LINES, Evidence
from .operand_causes import code_of_state


def training(case: Evidence) -> Iterator[Verdict]:
    """An optimizer that trains other parameters, or has its state on another device."""
    yield from findings.copied_verdicts(case.belonging)
    found: list[Verdict] = []
    if case.belonging.foreign and case.belonging.untrained:
        case.explain([name for name, _ in case.belonging.foreign])
        found += findings.untrained_verdicts(case.belonging)
    case.explain([each.name for each in case.belonging.misplaced])
    # An optimizer that takes steps has its state on the right device, or moves it there itself.
    steps = case.works and case.trace is not None and case.trace.steps > 0
    state = findings.misplaced_verdicts(case.belonging)
    found += [each for each in state if not steps or each.cause != "state-elsewhere"]
    line = (case.known.optimizer_line,) if case.known.optimizer_line else ()
    for each in found:
        if each.cause == "state-elsewhere":
            each = _state_explained(each, case)
        yield replace(each, evidence=(*each.evidence, *line))


def lost_changes(case: Evidence) -> Iterator[Verdict]:
    """Tensors that an optimizer changes, but that nothing reads any more."""
    if not case.known.stale:
        return
    names = join_names([each.name or "a tensor" for each in case.known.stale])
    yield Verdict(
        "parameter-moved",
        f"the optimizer trains {names} on cpu, but what is used is a copy that was made once, at "
        f"{case.known.stale[0].line}",
        "make it there, before the optimizer is created: torch.randn(…, device=…, "
        "requires_grad=True)",
    )


def stale_copies(found: Iterable[StaleCopy], device: str) -> Iterator[Verdict]:
    """Copies on the device that were made only once in a run, although their sources changed."""
    for each in found:
        yield Verdict(
            "stale-copy",
            f"what is used on {device} at {each.used} is a copy that was made once, at "
            f"{each.line}, of what {each.changed} changes on cpu: it never sees the changes",
            f"keep and change one tensor, on {device}; or make the copy again where it is used",
            (with_code(each.line), with_code(each.changed)),
        )


def gradients_of_copies(reads: Iterable[Read], device: str) -> Iterator[Verdict]:
    """Copies whose gradients are read, and stay None: only what was copied has a gradient."""
    for each in {read.copied: read for read in reads}.values():
        name = each.name or "a tensor"
        yield Verdict(
            "parameter-moved",
            f"{name} is a copy of what is trained, made at {each.copied or 'an unknown line'}: "
            f"{name}.grad stays None",
            f"make it on the device at once, with device={device!r} and requires_grad=True; or "
            "add .detach().requires_grad_() after the copy",
            tuple(filter(None, (with_code(each.copied), with_code(each.line)))),
        )


def _state_explained(found: Verdict, case: Evidence) -> Verdict:
    """Add to a verdict where the state on another device was made or loaded."""
    early = case.known.loaded_early
    if early is not None:
        line = with_code(early.line)
        line = f"{line} loaded it to where the parameters were then, on {early.device}"
        fix = f"load the optimizer's state after the model is moved; or {found.fix}"
        return replace(found, fix=fix, evidence=(*found.evidence, line))
    made: dict[str, str] = {}  # the code that made a state → its name
    for each in case.belonging.misplaced:
        if each.name in case.origins:
            made.setdefault(case.origins[each.name], each.name)
    if any(maker.startswith(LAYER) for maker in made):
        # The optimizer made it like its parameter, which was moved after that.
        return replace(found, fix=f"make the optimizer after the model is moved; or {found.fix}")
    lines = [f"{case.made_at(name)} is on cpu" for name in made.values()]
    maker, _, line = next(iter(made), "").partition(" at ")
    fix = f"at {line} {code_of_state(maker, case.device)}; or {found.fix}" if line else found.fix
    fix = f"bring it back before the next step: {found.fix}" if maker == COPY else fix
    return replace(found, fix=fix, evidence=(*found.evidence, *lines[:MOST_LINES]))


def hidden_parameters(case: Evidence) -> Iterator[Verdict]:
    """Parameters with a gradient that no optimizer has, because no module registers them."""
    found: dict[str, list[UnregisteredTensor]] = {}
    for each in case.belonging.unregistered if case.works else ():
        if each.untrained and each.name not in case.explained:
            found.setdefault(f"{each.kind}.{each.attribute}", []).append(each)
    for those in found.values():
        names, line = [each.name for each in those], those[0].line
        case.explain(names)
        yield Verdict(
            "unregistered-tensor",
            f"{join_names(names)} {'is' if len(names) == 1 else 'are'} not registered, so that no "
            "optimizer has them: they get a gradient, and are never trained",
            f"at {line}: {those[0].advice}" if line else those[0].advice,
            (case.known.optimizer_line,) if case.known.optimizer_line else (),
        )


def lost_gradients(case: Evidence) -> Iterator[Verdict]:
    """Parameters that get no gradient, or are no longer tied, because of a copy."""
    for line, names in case.known.cuts if case.works else ():
        yield Verdict(
            "no-gradient",
            f"{join_names(names)} get no gradient, though the optimizer has them: what they "
            f"compute is moved and cut from the graph at {line}",
            "move it by .to alone, which keeps the graph: no .detach(), torch.no_grad() or NumPy",
            (with_code(line),),
        )
    if case.works:
        yield from gradients_of_copies(case.known.reads, case.device)
    for each in case.known.lost if case.works and not case.belonging.copied else ():
        yield Verdict(
            "parameter-moved",
            f"what is used on {case.device} is a copy of {each.name or 'a parameter'}, made at "
            f"{each.line}: the parameter gets a gradient, and no optimizer has it",
            f'make it of values that are there, nn.Parameter(values.to("{case.device}")), and give '
            "it to the optimizer",
            (with_code(each.line),),
        )
    for copy, name, line in case.known.separated if case.works else ():
        yield Verdict(
            "parameter-moved",
            f"{copy} shared its values with {name}, and no longer does on {case.device}: .to moves "
            "each of them by itself",
            f"tie the parameter itself{f' at {line}' if line else ''}: {copy} = {name}, not its "
            ".data",
            (with_code(line),) if line else (),
        )
    for copy, name, line in case.known.lost_ties if case.works else ():
        yield Verdict(
            "parameter-moved",
            f"{copy} is a copy of {name}, and no longer tied to it: {line} makes a new parameter "
            f"of what .to gives on {case.device}",
            f"assign the parameter itself, and move the model after that: {copy} = {name}",
            (with_code(line),),
        )
