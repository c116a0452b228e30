"""The findings about how a model holds its tensors: each with one wording and its fix.

They are the warnings of `report`, and causes for the verdicts about a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ...display.phrases import join_names, quote
from ...manifest.manifest import Role, TensorEntry
from ...manifest.paths import Path, spell
from ...reports.doctor import SLOW, WRONG, Verdict
from .holdings import REGISTERED, HeldTensor, Holdings, Ownership
from .object_walk import attributes
from .offloaded import Offloads
from .ownership import MisplacedTensor, OwnershipReport, UnregisteredTensor, belonging


def warnings_of(
    found: Holdings, entries: Sequence[TensorEntry], offloads: Offloads
) -> Iterator[str]:
    """Problems to fix or to know before the model is moved, one sentence each."""
    together = belonging(found)
    held = list(zip(found.all, entries, strict=True))
    yield from map(str, _each_unregistered(together.unregistered))
    yield from packed_notes(found)
    yield from _lazy(entries)
    yield from map(str, without_values(entries))
    yield from _offloaded(held, offloads)
    yield from map(str, copied_verdicts(together))
    yield from map(str, untrained_verdicts(together))
    yield from map(str, misplaced_verdicts(together))
    yield from map(str, _batch(held, offloads))
    if found.full:
        yield (
            "the attributes of the modules hold more objects than ckptmove "
            "examines; tensors may be missing from this list"
        )


# -- tensors that Module.to doesn't move -----------------------------------------------------------


def unregistered_verdict(
    names: Sequence[str],
    fix: str,
    *,
    where: str = "behind",
    shared_by: str = "",
    evidence: Sequence[str] = (),
    severity: str = WRONG,
) -> Verdict:
    """Tensors that are not registered, or that a class holds for all its modules."""
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    why = "not registered, so model.to leaves"
    if shared_by:
        why = f"shared by every {shared_by}, so model.to and ckptmove.move leave"
    title = f"{join_names(names)} {are} {why} {them} {where}"
    return Verdict("unregistered-tensor", title, fix, tuple(evidence), severity)


def _each_unregistered(found: Iterable[UnregisteredTensor]) -> Iterator[Verdict]:
    """The unregistered tensors, grouped: one verdict for all modules of a class."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        shared_by = each.kind.__name__ if each.held is Ownership.CLASS else ""
        key = f"{each.kind}.{each.attribute}", each.advice, shared_by
        names.setdefault(key, []).append(each.name)
    for (_, advice, shared_by), those in names.items():
        yield unregistered_verdict(those, advice, shared_by=shared_by)


def packed_notes(found: Holdings) -> Iterator[str]:
    """A sentence about tensors of quantized modules that torch packed for the CPU, or nothing."""
    names = [
        spell((*path, name))
        for path, module in found.modules.items()
        for name, value in attributes(module)
        if type(value) is torch.ScriptObject  # not a subclass, such as a scripted module
    ]
    if names:
        yield (
            "tensors packed for the CPU are not listed and stay there: "
            f"{quote(names)}; to use another device, quantize the model again"
        )


# -- tensors without values ------------------------------------------------------------------------


def _is_lazy(entry: TensorEntry) -> bool:
    return entry.kind.startswith("torch.nn.parameter.Uninitialized")


def _lazy(entries: Sequence[TensorEntry]) -> Iterator[str]:
    lazy = [each.name for each in entries if each.held in REGISTERED and _is_lazy(each)]
    if lazy:
        yield f"{quote(lazy)}: no shape yet; run the model once before you move or train it"


def without_values(entries: Iterable[TensorEntry], device: str = "") -> Iterator[Verdict]:
    """Registered tensors on the meta device; `device` is where they should be."""
    registered = [e for e in entries if e.held in REGISTERED and e.part_of is None]
    meta = [each for each in registered if each.device == "meta" and not _is_lazy(each)]
    if meta:
        nbytes = sum(each.nbytes for each in meta)
        names = join_names([each.name for each in meta])
        title = f"{names}: on the meta device, without values ({nbytes:,} bytes)"
        valued = [each.path for each in registered if each.device != "meta"]
        yield Verdict("no-values", title, _filled(meta, valued, repr(device) if device else "…"))


def _filled(meta: Sequence[TensorEntry], valued: Iterable[Path], device: str) -> str:
    """The code that gives meta tensors values, and keeps the values of all others."""
    partly = {path[:n] for path in valued for n in range(len(path))}
    wholly: dict[Path, None] = {}  # the largest modules without any value
    saved, unsaved = [], []
    for each in meta:
        above = (each.path[:n] for n in range(len(each.path)))
        top = next((path for path in above if path not in partly), None)
        if top is not None:
            wholly[top] = None
        if each.held == Ownership.TRANSIENT:
            unsaved.append(each.name)
        elif top is None:
            saved.append(each.name)
    steps = []
    if () in wholly:
        steps.append(
            f"model.to_empty(device={device}), then load the state; or build the model outside of "
            'torch.device("meta")'
        )
    elif wholly:
        names = quote(list(map(spell, wholly)))
        steps.append(f"to_empty(device={device}) of {names}, then load the state")
    if saved:
        steps.append(f"load {quote(saved)} by model.load_state_dict(…, assign=True)")
    if unsaved:
        steps.append(f"assign {quote(unsaved)} again; no state dict has it")
    return "; ".join(steps)


def _offloaded(held: Iterable[tuple[HeldTensor, TensorEntry]], offloads: Offloads) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    devices = set()
    for each, entry in held:
        if entry.device.endswith(" (offloaded)"):
            names.setdefault(entry.device.partition(" ")[0], []).append(entry.name)
            devices.add(offloads.runs_on(each.path[:-1]) or "its device")
    for place, those in names.items():
        yield (
            f"accelerate keeps the data of {quote(those)} on {place}, and moves it "
            f"to {' or '.join(sorted(devices))} whenever the module runs; "
            "torch shows meta in between"
        )


# -- optimizers ------------------------------------------------------------------------------------


def untrained_verdicts(together: OwnershipReport) -> Iterator[Verdict]:
    """Parameters of the optimizer that the model does not have, and untrained parameters."""
    foreign = [name for name, _ in together.foreign]
    names = join_names([name for name, _ in together.untrained])
    if foreign and names:
        lines = (f"{len(foreign):,} of its tensors are not parameters of the model",)
        shapes = [[shape for _, shape in each] for each in (together.foreign, together.untrained)]
        if shapes[0] == shapes[1] or together.shared:
            yield Verdict(
                "optimizer-of-old-parameters",
                f"the optimizer holds old parameters: the model now has new ones, so {names} will "
                "never change",
                "create the optimizer after the step that replaces parameters: copying the model, "
                "load_state_dict(assign=True), wrapping it, a new head",
                lines,
            )
            return
        yield Verdict(
            "optimizer-of-other-parameters",
            f"the optimizer holds other parameters than the model, so {names} will never change",
            f"create it from this model: optimizer = {together.kind}(model.parameters())",
            lines,
        )
    elif foreign:
        yield Verdict(
            "foreign-parameters",
            f"the optimizer holds parameters that the model does not have: {join_names(foreign)}",
            "create it from model.parameters() after the step that replaces them",
        )
    elif names:
        yield Verdict(
            "untrained-parameters",
            f"no optimizer trains {names}, though requires_grad is True",
            "add it to the optimizer, or set requires_grad to False",
        )


def copied_verdicts(together: OwnershipReport) -> Iterator[Verdict]:
    """Attributes that should be parameters, but are copies of one."""
    for name, line in together.copied:
        where = f" at {line}" if line else ""
        yield Verdict(
            "parameter-moved",
            f"{name} is no parameter of the model, and is never trained: nn.Parameter(…).to(…)"
            f"{where} gives a copy",
            "move the values, not the parameter: nn.Parameter(values.to(device)), or let "
            "model.to move the parameter",
        )


def misplaced_verdicts(together: OwnershipReport) -> Iterator[Verdict]:
    """State and gradients that are not on their parameter's device, and steps not on the CPU."""
    groups: dict[tuple[str, str, bool], list[MisplacedTensor]] = {}
    for each in together.misplaced:
        groups.setdefault((each.device, each.wanted, each.role is Role.STEP), []).append(each)
    for (device, home, is_step), those in groups.items():
        to = device if is_step else home
        fix = f'ckptmove.move(model, optimizer, to="{to}") puts each where it belongs'
        title = f"{join_names([each.name for each in those])}: on {device}, "
        if is_step:
            title += "so the host waits for each of them at every step"
            fix += "; or make the optimizer with capturable=True or fused=True"
            yield Verdict("step-on-device", title, fix, severity=SLOW)
        else:
            title += f"and the parameter on {home}"
            if all(each.held is Ownership.GRADIENT for each in those):
                fix = f"zero_grad() drops them; or {fix}"
            yield Verdict("state-elsewhere", title, fix)


# -- inputs of the model ---------------------------------------------------------------------------


def batch(names: Sequence[str], where: str, fix: str, evidence: Sequence[str] = ()) -> Verdict:
    """The inputs of a model that are not on the model's device."""
    title = f"the batch is on {where}: {join_names(names)}"
    return Verdict("batch-never-moved", title, fix, tuple(evidence))


def batch_fix(device: str) -> str:
    """The line of code that copies a whole batch to a device."""
    return f'batch = ckptmove.to_device(batch, "{device}")'


def _batch(held: Sequence[tuple[HeldTensor, TensorEntry]], offloads: Offloads) -> Iterator[Verdict]:
    first = next(((h, e) for h, e in held if h.held is Ownership.PARAMETER), None)
    if first is None or offloads.runs_on(first[0].path[:-1]) is not None:
        return
    home = first[1].device
    away = [e for h, e in held if h.held is Ownership.BATCH and e.device != home]
    away = [e for e in away if not (e.role and e.device == "cpu")]
    if away and home != "meta":
        where = " and ".join(sorted({each.device for each in away}))
        yield batch([each.name for each in away], where, batch_fix(home))
