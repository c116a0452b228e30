"""Move a model in memory, and the objects that belong to it: decide, copy, swap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from ...display.phrases import first_line, quote
from ...errors import RefusedError, StrPath, UsageError
from ...manifest.device import Device
from ...manifest.manifest import Manifest, Role, Section, TensorEntry
from ...manifest.paths import Path, spell
from ...placement.place import place as placed
from ...placement.rules import Rules, rules_of
from ...reports.move import MoveReport
from ..inventory.findings import packed_notes
from ..inventory.holdings import HeldTensor, Holdings, Optimizers, Ownership, holdings
from ..inventory.manifest import manifest_of, tag_of
from ..inventory.ownership import unregistered_tensors
from .devices import Renaming, reachable, renaming
from .movable import check_movable, holder_of, to_empty_hint
from .parametrized import ComputedAttribute, computed_attributes, renew, without_computed
from .swap_storages import Exchange, TensorMove, is_plain

#: Tensors that torch itself does not move.
_FREE = (Ownership.UNREGISTERED, Ownership.HOOK)
#: Objects that may share tensors with the model; then the model decides.
_GIVEN = (Ownership.OTHER, Ownership.BATCH)


def move(
    model: nn.Module,
    optimizer: Optimizers = None,
    scheduler: object = None,
    batch: object = None,
    others: Mapping[str, object] | None = None,
    *,
    to: Device | None = None,
    place: Mapping[str, Device] | None = None,
    device_map: Mapping[str, Device] | StrPath | None = None,
    non_blocking: bool = False,
    values: bool = True,
    dry_run: bool = False,
) -> MoveReport:
    """Move everything, or nothing; the arguments are those of `ckptmove.move`.

    Raises RefusedError if something can't be moved; then nothing was moved.
    """
    started = time.monotonic()
    if to is None and not place and device_map is None:
        raise UsageError("the device is missing", hint='for example to="cuda:0"')
    rules = rules_of(to=to, place=place, device_map=device_map, tag_of=_reachable_device)
    found = holdings(model, optimizer, scheduler, batch, others)
    roots = [each for each in (model, *(others or {}).values()) if isinstance(each, nn.Module)]
    check_movable(roots, found)
    weights = list(computed_attributes((spell(path), each) for path, each in found.modules.items()))
    anew = {id(each.value) for each in weights}
    found.all = [each for each in found.all if id(each.tensor) not in anew]  # they have graphs
    warnings: list[str] = []
    results: list[Path] = []
    going = replace(found, all=list(_subject(found, warnings, results)))
    # A caught error keeps this frame alive, but the frame must not keep graphs alive.
    found.all = [each for each in found.all if each.tensor.is_leaf]
    manifest = replace(
        manifest_of(going, model, warn=False), capturable=(), values_naming_devices=()
    )
    entries = [entry for entry in manifest.tensors if entry.part_of is None]
    groups = [group for each in found.optimizers.values() for group in each.param_groups]
    rules = rules._replace(fixed=_fixed(going, manifest, rules, groups))
    manifest = _freed(manifest, rules)
    _check_valued(going, entries, rules)
    moves = placed(manifest, rules)
    targets = _targets(manifest, moves.storages, moves.tensors)
    pairs = list(zip(going.all, entries, targets, strict=True))
    named = renaming(found.naming, pairs, values)
    warnings += [*moves.unmatched, *moves.warnings, *_capturable(pairs, groups)]
    if to is None or _reachable_device(to) != "cpu":
        warnings += packed_notes(found)
    if found.full:
        warnings.append(
            "the attributes hold more objects than ckptmove examines; the rest stays where it is"
        )
    free = {each.name for each, entry, to in pairs if each.held in _FREE and to != entry.device}
    advice = {each.name: each.advice for each in unregistered_tensors(found) if each.name in free}
    exchange = Exchange(non_blocking=non_blocking, suspects=_some(results))
    warnings += _exchange(found, pairs, named, weights, exchange, dry_run)
    totals = moves.totals(manifest)
    return MoveReport(
        model=type(model).__name__,
        done=not dry_run,
        moved=totals,
        kept=tuple(moves.kept),
        unregistered=advice,
        values_naming_devices=tuple(named.staying),
        values_rewritten=tuple(named.rewritten),
        rewritten_to=tuple(named.rewritten_to),
        values_rewritable=tuple(named.rewritable),
        values_unchanged=tuple(named.unchanged),
        warnings=tuple(warnings),
        nbytes=sum(moved.nbytes for moved in totals.values()),
        seconds=time.monotonic() - started,
    )


# -- deciding --------------------------------------------------------------------------------------


def _reachable_device(device: Device) -> str:
    """The name of an available device in torch; `cuda` means the current one."""
    tag = tag_of(reachable(device))
    if tag == "meta":
        raise UsageError(
            "moving to meta would delete every value",
            hint='model.to("meta") does that; to measure a model without using memory, '
            "create it on meta",
        )
    return tag


def _subject(found: Holdings, warnings: list[str], results: list[Path]) -> Iterator[HeldTensor]:
    """The tensors to which the rules apply; adds warnings about the others, which stay."""
    foreign = _foreign(found)
    met: set[int] = set()
    for each in found.all:
        tensor = each.tensor
        if each.path in foreign or each.owner in foreign or each.held is Ownership.CLASS:
            continue
        if each.held is Ownership.GRADIENT and not tensor.is_leaf:
            raise RefusedError(
                f"{each.name!r} is itself the result of a differentiable computation",
                hint="call optimizer.zero_grad() before moving",
            )
        if each.held in _GIVEN and id(tensor) in met:
            continue  # its place in the model decides
        met.add(id(tensor))
        if not tensor.is_leaf:
            results.append(each.path)
        elif each.role is not Role.RNG_STATE or tensor.device.type == "cpu":
            yield each
    shared = [each.path for each in found.of(Ownership.CLASS)]
    if shared:
        warnings.append(
            f"{_some(shared)}: they belong to the class, not to this model only, so "
            "they stay where they are"
        )
    if foreign:
        warnings.append(
            "the optimizer has parameters that the model does not have, "
            f"{_some(foreign)}: they and their state stay where they are unless you also pass "
            "the object that they belong to"
        )
    if results:
        warnings.append(
            f"{_some(results)}: results of an earlier computation that autograd "
            "still refers to; they stay where they are until they are computed again"
        )


def _foreign(found: Holdings) -> dict[Path, None]:
    """The optimizer's own parameters, except those that share bytes with the model's."""
    plain = [each for each in found.all if is_plain(each.tensor)]
    storages = {id(each.tensor): each.tensor.untyped_storage()._cdata for each in plain}
    own = {storages[id(e.tensor)] for e in plain if e.section is Section.MODEL}
    return {e.path: None for e in found.foreign if storages.get(id(e.tensor)) not in own}


def _fixed(
    going: Holdings, manifest: Manifest, rules: Rules, groups: list[dict[str, Any]]
) -> dict[Path, str]:
    """The required devices of state and gradients, by path."""
    entries = [entry for entry in manifest.tensors if entry.part_of is None]
    homes: dict[Path, str] = {}
    sharing: dict[str | None, str] = {}
    fixed: dict[Path, str] = {}
    for each, entry in zip(going.all, entries, strict=True):
        home = homes.setdefault(each.path, rules.device_for(entry) or entry.device)
        if each.section is Section.MODEL:
            sharing.setdefault(entry.storage, home)
        elif each.held is Ownership.FOREIGN:
            homes[each.path] = fixed[each.path] = sharing.get(entry.storage, home)
    capturable = {id(t) for g in groups if g.get("capturable") for t in _tensors_of(g)}
    for each, entry in zip(going.all, entries, strict=True):
        home = homes.get(each.owner, "") if each.owner is not None else ""
        if each.role is Role.STEP:
            if entry.device != "cpu":
                fixed[each.path] = "cpu"
        elif each.role is Role.HYPERPARAMETER:
            follows = entry.device != "cpu" or id(each.tensor) in capturable
            if home and follows:
                fixed[each.path] = home
        elif home:
            fixed[each.path] = home
    for entry in manifest.tensors:
        if entry.part_of is not None:
            whole = next((entry.path[:n] for n in _depths(entry) if entry.path[:n] in fixed), None)
            if whole is not None:
                fixed[entry.path] = fixed[whole]
    return fixed


def _depths(entry: TensorEntry) -> range:
    return range(len(entry.path) - 1, 0, -1)


def _tensors_of(group: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in group.values():
        several = value if isinstance(value, tuple) else (value,)  # betas
        yield from (each for each in several if isinstance(each, torch.Tensor))


def _freed(manifest: Manifest, rules: Rules) -> Manifest:
    """The manifest without roles that would keep tensors away from their parameter."""
    entries = (
        entry._replace(role=None)
        if entry.role is Role.HYPERPARAMETER and entry.path in rules.fixed
        else entry
        for entry in manifest.tensors
    )
    return replace(manifest, tensors=tuple(entries))


def _check_valued(going: Holdings, entries: Iterable[TensorEntry], rules: Rules) -> None:
    """Refuse to move tensors without values."""
    for each, entry in zip(going.all, entries, strict=True):
        wanted = rules.device_for(entry)
        if each.tensor.is_meta and wanted not in (None, "meta"):
            raise RefusedError(
                f"{each.name!r} is on the meta device: it has no values to move",
                hint=to_empty_hint(each, going, wanted or "cpu"),
            )


def _targets(
    manifest: Manifest, storages: Mapping[str, str], tensors: Mapping[int, str]
) -> list[str]:
    """The device of each tensor, without parts of others."""
    parts: dict[str, str] = {}
    for entry in manifest.tensors:
        if entry.part_of is not None and entry.role is None and entry.storage is not None:
            parts[entry.part_of] = storages.get(entry.storage, entry.device)
    targets = []
    for n, entry in enumerate(manifest.tensors):
        if entry.part_of is None:
            by_bytes = storages.get(entry.storage or "", parts.get(entry.name, entry.device))
            targets.append(tensors.get(n, by_bytes))
    return targets


_Pairs = list[tuple[HeldTensor, TensorEntry, str]]


def _capturable(pairs: _Pairs, groups: list[dict[str, Any]]) -> Iterator[str]:
    on_cpu = {id(each.tensor) for each, _, target in pairs if target == "cpu"}
    if any(g.get("capturable") and any(id(p) in on_cpu for p in g["params"]) for g in groups):
        yield (
            "the optimizer is capturable, and torch asserts at the first step of such an optimizer "
            "on the CPU: set capturable=False in its param_groups"
        )


def _some(paths: Iterable[Path]) -> str:
    return quote([spell(path) for path in paths])


# -- doing -----------------------------------------------------------------------------------------


def _exchange(
    found: Holdings,
    pairs: _Pairs,
    named: Renaming,
    weights: list[ComputedAttribute],
    exchange: Exchange,
    dry_run: bool,
) -> list[str]:
    """Move the tensors to their targets, or only check; returns warnings of minor problems."""
    modules = {id(each): each for each in found.modules.values()}
    rnns = [each for each in modules.values() if isinstance(each, nn.RNNBase)]
    holding = {
        id(tensor): holder
        for root in modules.values()
        if (holder := holder_of(root)) is not None
        for tensor in (*root.parameters(), *root.buffers())
    }
    goings = [
        TensorMove(each.name, each.tensor, torch.device(target), holding.get(id(each.tensor)))
        for each, entry, target in pairs
        if target != entry.device
    ]
    if not goings and not named.going:
        return []
    gone = {id(each.tensor) for each in goings}
    weights = [each for each in weights if _is_of(each, gone)]
    with _unreferred(rnns):
        if dry_run:
            held = {id(tensor) for each in weights for tensor in _own(each.module)}
            free = [each for each in goings if id(each.tensor) not in held]
            exchange.check(free, (each.tensor for each in found.all))
            return []
        exchange.prepare(goings, (each.tensor for each in found.all))
        with without_computed(weights):
            exchange.commit(lambda undoing: _finish(named, weights, undoing))
    return list(_flatten(rnns, gone))


def _is_of(weight: ComputedAttribute, gone: set[int]) -> bool:
    """Whether a tensor that a weight is computed from is moved."""
    return any(id(each) in gone for each in _own(weight.module))


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _finish(
    named: Renaming, weights: list[ComputedAttribute], undoing: Callable[[Callable[[], None]], None]
) -> None:
    named.perform(undoing)
    renew(weights, undoing)


@contextmanager
def _unreferred(rnns: list[nn.RNNBase]) -> Iterator[None]:
    """Drop the RNNs' weak references to their weights, because they prevent swapping."""
    referring = [each for each in rnns if getattr(each, "_flat_weight_refs", None)]
    for each in referring:
        each._flat_weight_refs = []
    try:
        yield
    finally:
        for each in referring:
            each._flat_weight_refs = [w if w is None else ref(w) for w in each._flat_weights]


def _flatten(rnns: list[nn.RNNBase], gone: set[int]) -> Iterator[str]:
    """Let RNNs with moved weights lay them out for the device; yields warnings of failures."""
    for each in rnns:
        if any(id(parameter) in gone for parameter in each.parameters()):
            try:
                each.flatten_parameters()
            except RuntimeError as error:
                why = first_line(error)
                yield f"the weights of a {type(each).__name__} are not in one piece: {why}"
