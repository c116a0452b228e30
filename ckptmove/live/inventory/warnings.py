"""Warnings about a model in memory, one sentence each, with what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ...manifest.manifest import TensorEntry
from ...manifest.paths import Path, spell
from ...phrases import quote
from .holdings import REGISTERED, HeldTensor, Holdings, Ownership
from .object_walk import attributes
from .offloaded import Offloads
from .ownership import OwnershipReport, belonging


def oddities(found: Holdings, entries: Sequence[TensorEntry], offloads: Offloads) -> Iterator[str]:
    """What a user may want to mend, or to know before moving the model."""
    held = list(zip(found.all, entries, strict=True))
    together = belonging(found)
    yield from _unregistered(together)
    yield from _packed(found)
    yield from _without_values(found, held)
    yield from _offloaded(found, held, offloads)
    yield from _optimizers(found, together)
    yield from _apart(together)
    yield from _batch(found, held, offloads)
    if found.full:
        yield (
            "the attributes of the modules hold more objects than ckptmove "
            "examines; tensors may be missing from this list"
        )


# -- what Module.to doesn't know -------------------------------------------------------------------


def _unregistered(together: OwnershipReport) -> Iterator[str]:
    """Each advice once, for all modules of a class."""
    names: dict[tuple[type, str, str, bool], list[str]] = {}
    for each in together.unregistered:
        key = each.kind, each.attribute, each.advice, each.held is Ownership.CLASS
        names.setdefault(key, []).append(each.name)
    for (kind, _, advice, is_shared), those in names.items():
        is_, it = ("are", "them") if len(those) > 1 else ("is", "it")
        why = "not registered, and Module.to leaves"
        if is_shared:
            why = f"shared by every {kind.__name__}, and Module.to and ckptmove.move leave"
        yield f"{quote(those)} {is_} {why} {it} behind: {advice}"


def _packed(found: Holdings) -> Iterator[str]:
    names = [
        spell((*path, name))
        for path, module in found.modules.items()
        for name, value in attributes(module)
        if type(value) is torch.ScriptObject  # what a scripted module is, is none
    ]
    if names:
        yield (
            "tensors packed for the CPU are not listed and stay there: "
            f"{quote(names)}; to use another device, quantize the model again"
        )


# -- what has no values here -----------------------------------------------------------------------


def _without_values(
    found: Holdings, held: Iterable[tuple[HeldTensor, TensorEntry]]
) -> Iterator[str]:
    of_modules = [(each, entry) for each, entry in held if each.held in REGISTERED]
    lazy = [e.name for each, e in of_modules if nn.parameter.is_lazy(each.tensor)]
    if lazy:
        yield f"{quote(lazy)}: no shape yet; run the model once before you move or train it"
    unlazy = [(each, e) for each, e in of_modules if not nn.parameter.is_lazy(each.tensor)]
    meta = [(each, e) for each, e in unlazy if e.device == "meta"]
    if not meta:
        return
    names = quote([entry.name for _, entry in meta])
    nbytes = sum(entry.nbytes for _, entry in meta)
    valued = [each.path for each, e in of_modules if e.device != "meta"]
    yield (
        f"{names}: on the meta device, without values ({nbytes:,} bytes): "
        f"{_filled(found, meta, valued)}"
    )


def _filled(
    found: Holdings, meta: Sequence[tuple[HeldTensor, TensorEntry]], valued: Iterable[Path]
) -> str:
    """How what is on meta gets values, and nothing else loses any."""
    partly = {path[:n] for path in valued for n in range(len(path))}
    wholly: dict[Path, None] = {}  # the largest modules without any value
    saved, unsaved = [], []
    for each, entry in meta:
        top = next(
            (each.path[:n] for n in range(len(each.path)) if each.path[:n] not in partly), None
        )
        top = None if top is None or top not in found.modules else top
        if top is not None:
            wholly[top] = None
        if each.held is Ownership.TRANSIENT:
            unsaved.append(entry.name)
        elif top is None:
            saved.append(entry.name)
    said = []
    if () in wholly:
        said.append(
            "model.to_empty(device=…), then load the state; or build the model outside of "
            'torch.device("meta")'
        )
    elif wholly:
        said.append(f"to_empty(device=…) of {quote(list(map(spell, wholly)))}, then load the state")
    if saved:
        said.append(f"load {quote(saved)} by model.load_state_dict(…, assign=True)")
    if unsaved:
        said.append(f"assign {quote(unsaved)} again; no state dict has it")
    return "; ".join(said)


def _offloaded(
    found: Holdings, held: Iterable[tuple[HeldTensor, TensorEntry]], offloads: Offloads
) -> Iterator[str]:
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


# -- what trains it --------------------------------------------------------------------------------


def _optimizers(found: Holdings, together: OwnershipReport) -> Iterator[str]:
    for path in found.optimizers:
        foreign = [each.name for each in found.foreign if each.path[: len(path)] == path]
        if foreign:
            yield (
                f"the {spell(path)} holds parameters that the model does not have: "
                f"{quote(foreign)}; create it from model.parameters() after the "
                "step that replaces them"
            )
    if together.untrained:
        names = [name for name, _ in together.untrained]
        yield f"no optimizer trains {quote(names)}, though requires_grad is True"


def _apart(together: OwnershipReport) -> Iterator[str]:
    """Gradients and state that are not where their parameters are, or steps not on the CPU."""
    names: dict[tuple[Ownership, str, str, bool], list[str]] = {}
    for each in together.misplaced:
        key = each.held, each.device, each.wanted, each.role is not None
        names.setdefault(key, []).append(each.name)
    for (how, device, home, is_step), those in names.items():
        if is_step:
            yield (
                f"optimizer steps on {device}, and the host waits for each: {quote(those)}; "
                "ckptmove.move moves them to the CPU; or make the optimizer capturable or fused"
            )
            continue
        what = "gradients" if how is Ownership.GRADIENT else "optimizer state"
        remedy = (
            "zero_grad() drops them"
            if how is Ownership.GRADIENT
            else "optimizer.load_state_dict(optimizer.state_dict()) moves it there"
        )
        yield f"{what} on {device}, of parameters on {home}: {quote(those)}; {remedy}"


def _batch(
    found: Holdings, held: Iterable[tuple[HeldTensor, TensorEntry]], offloads: Offloads
) -> Iterator[str]:
    held = list(held)
    first = next(((h, e) for h, e in held if h.held is Ownership.PARAMETER), None)
    if first is None or offloads.runs_on(first[0].path[:-1]) is not None:
        return
    home = first[1].device
    away = [
        e
        for h, e in held
        if h.held is Ownership.BATCH and e.device != home and not (e.role and e.device == "cpu")
    ]
    if away and home != "meta":
        names = quote([entry.name for entry in away])
        yield f"{names} of the batch on {away[0].device}, but inputs go to {home}"
