"""Decide which device everything goes to, from the user's rules and torch's own habits. No I/O.

`--to cuda:0` means *as training on cuda:0 would have saved it*: what torch always keeps on the CPU
stays there, and is reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ..display.phrases import plural, quote
from ..errors import RefusedError
from ..manifest.device import TagMap, kind_of
from ..manifest.manifest import Manifest, Role, Section, TensorEntry
from ..manifest.other_records import NamedDevice
from ..manifest.paths import Path
from .move_totals import Kept, Moved
from .rules import Rules

_WHY = {
    Role.STEP: "torch keeps optimizer steps on the CPU unless capturable or fused",
    Role.HYPERPARAMETER: "torch never moves hyper-parameters of an optimizer",
    Role.SCORE: "Lightning keeps the score to beat on the CPU until it has saved that many files",
    Role.RNG_STATE: "torch restores RNG states only from the CPU",
    Role.RANK_MAP: "the ranks of a device mesh stay on the CPU",
    Role.SHAPE: "the shape of a nested tensor stays on the CPU",
    Role.ARRAY: "numpy arrays have no device",
    Role.UNTAGGED: "its file stores no devices",
    Role.LENGTHS: "RNNs need the lengths of a packed sequence on the CPU",
}


@dataclass
class Moves:
    """The changes of devices, by the id of a storage or the index in a list of the manifest."""

    storages: dict[str, str] = field(default_factory=dict)  #: id → new location
    tensors: dict[int, str] = field(default_factory=dict)  #: tensors that store their own device
    meshes: dict[int, str] = field(default_factory=dict)  #: device mesh → new kind of device
    remotes: dict[int, str] = field(default_factory=dict)  #: device of a shard → new device
    values: dict[int, str] = field(default_factory=dict)  #: values to rewrite
    rewritable: list[int] = field(default_factory=list)  #: values that `values` would rewrite
    unchanged: list[int] = field(default_factory=list)  #: other values that name a moved device
    kept: list[Kept] = field(default_factory=list)  #: tensors that torch keeps where they are
    unmatched: list[str] = field(default_factory=list)  #: rules that match nothing, a sentence each
    warnings: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.storages, self.tensors, self.meshes, self.remotes, self.values))

    def totals(self, manifest: Manifest) -> dict[str, Moved]:
        """`cpu→cuda:0` → how much."""
        sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
        for key, device in self.storages.items():
            _, location, nbytes, _, _ = manifest.storages[key]
            sizes[location, device].append(nbytes)
        totals = {
            f"{location}→{device}": Moved(len(moved), sum(moved))
            for (location, device), moved in sizes.items()
        }
        for n, device in self.tensors.items():
            name = f"{manifest.tensors[n].device}→{device}"
            storages, nbytes, tensors = totals.get(name, Moved(0, 0))
            totals[name] = Moved(storages, nbytes, tensors + 1)
        return totals

    def values_by_outcome(self, manifest: Manifest) -> dict[str, tuple[NamedDevice, ...]]:
        """The user's values that name devices, grouped by outcome as in the report."""
        named = manifest.values_naming_devices
        return {
            "values_naming_devices": tuple(v for n, v in enumerate(named) if n not in self.values),
            "values_rewritten": tuple(named[n] for n in self.values),
            "values_rewritable": tuple(named[n] for n in self.rewritable),
            "values_unchanged": tuple(named[n] for n in self.unchanged),
        }


def place(manifest: Manifest, rules: Rules) -> Moves:
    """Decide what moves; raises RefusedError if rules split a storage or a tensor."""
    moves = Moves()
    targets = [_target(entry, rules, moves) for entry in manifest.tensors]
    _check_composites(manifest, targets)
    _place_storages(manifest, rules, targets, moves)
    for n, (entry, target) in enumerate(zip(manifest.tensors, targets, strict=True)):
        if entry.says_device and target != entry.device:
            moves.tensors[n] = target
    _place_meshes(manifest, targets, moves)
    _place_remotes(manifest, rules, targets, moves)
    if rules.values:
        _place_values(manifest, moves)
    _place_programs(manifest, rules, targets, moves)
    _note_values(manifest, rules, moves)
    moves.unmatched += _unmatched_rules(manifest, rules)
    moves.warnings += _unused_in_device_map(manifest, rules)
    moves.warnings += _consequences(manifest, rules, targets, moves)
    return moves


def _target(entry: TensorEntry, rules: Rules, moves: Moves) -> str:
    """Return the target device of a tensor, which may be its present one."""
    wanted = rules.device_for(entry)
    if wanted is None or wanted == entry.device:
        return entry.device
    target, why = wanted, None
    if entry.device == "meta" and entry.storage is None and not entry.says_device:
        target, why = "meta", "a meta tensor has no data to load"
    elif entry.role is not None and _stays(entry, wanted, rules):
        target, why = "cpu", _WHY[entry.role]
    if why is not None:
        moves.kept.append(Kept(entry.name, target, why))
    return target


def _stays(entry: TensorEntry, wanted: str, rules: Rules) -> bool:
    """Whether torch keeps tensors with this role on the CPU; an RNG state even returns to it."""
    if entry.role in (Role.ARRAY, Role.UNTAGGED):
        return True
    at_home = entry.device == "cpu" or entry.role is Role.RNG_STATE
    return at_home and wanted != "cpu" and not rules.everything


def _place_storages(manifest: Manifest, rules: Rules, targets: list[str], moves: Moves) -> None:
    owner: dict[str, TensorEntry] = {}
    goes, storages = moves.storages, manifest.storages
    for entry, wanted in zip(manifest.tensors, targets, strict=True):
        key = entry.storage
        if key is None:
            continue
        location = storages[key].location
        target = location if entry.says_device else wanted
        if owner.setdefault(key, entry) is not entry and goes.get(key, location) != target:
            raise RefusedError(
                f"{owner[key].name!r} and {entry.name!r} share a storage, so they can't be on "
                f"{goes.get(key, location)} and on {target}",
                hint="place them on the same device",
            )
        if target != location:
            goes[key] = target
    if len(owner) == len(storages):
        return
    for key, storage in storages.items():
        wanted_by_tag = None if key in owner else rules.tags.of(storage.location)
        if wanted_by_tag not in (None, storage.location):
            goes[key] = str(wanted_by_tag)


def _check_composites(manifest: Manifest, targets: list[str]) -> None:
    """Refuse to split a composite tensor: its parts, and the device that it stores itself."""
    if all(entry.part_of is None for entry in manifest.tensors):
        return
    owners: dict[Path, str] = {}
    names = {entry.path: entry.name for entry in manifest.tensors}
    for entry, target in zip(manifest.tensors, targets, strict=True):
        if entry.part_of is not None and entry.role not in (Role.RANK_MAP, Role.SHAPE):
            whole = owners.setdefault(_owner(entry, names), target)
            if whole != target:
                raise RefusedError(
                    f"{entry.name!r} is part of {entry.part_of!r}, so it can't be on {target} "
                    f"while the rest is on {whole}",
                    hint="place the whole tensor on one device",
                )
        if entry.says_device or entry.storage is not None:
            owners[entry.path] = target


def _owner(part: TensorEntry, names: Mapping[Path, str]) -> Path:
    """Return the path of the composite tensor that a tensor is a part of."""
    depths = range(len(part.path) - 1, 0, -1)
    return next((part.path[:n] for n in depths if names.get(part.path[:n]) == part.part_of), ())


def _place_meshes(manifest: Manifest, targets: list[str], moves: Moves) -> None:
    """Set the device type of device meshes to that of the DTensors on them."""
    if not manifest.meshes:
        return
    kinds: dict[str, str] = {}
    for entry, target in zip(manifest.tensors, targets, strict=True):
        if entry.kind.endswith(".DTensor"):
            kinds.setdefault(kind_of(target), entry.name)
    if len(kinds) > 1:
        (kind, name), (other_kind, other) = list(kinds.items())[:2]
        raise RefusedError(
            f"{name!r} and {other!r} are DTensors with one device mesh, so they "
            f"can't be on {kind} and on {other_kind}",
            hint="place them on the same device",
        )
    for kind in kinds:
        moves.meshes = {n: kind for n, mesh in enumerate(manifest.meshes) if mesh != kind}


def _place_remotes(manifest: Manifest, rules: Rules, targets: list[str], moves: Moves) -> None:
    """Move the devices that sharded tensors name; RefusedError if rules contradict these."""
    if not manifest.remotes:
        return
    for n, device in enumerate(manifest.remotes):
        moved = rules.tags.of(device)
        if moved not in (None, device):
            moves.remotes[n] = str(moved)
    for entry, target in zip(manifest.tensors, targets, strict=True):
        listed = rules.tags.of(entry.device) or entry.device
        if entry.kind.endswith(".ShardedTensor") and target != listed:
            raise RefusedError(
                f"{entry.name!r} is a sharded tensor: if it moved to {target}, its "
                f"shards on other machines would still be listed on {listed}",
                hint="use --to or --map for sharded tensors",
            )


def _place_values(manifest: Manifest, moves: Moves) -> None:
    """Sort the user's values that name a device from which everything moves to one other device."""
    if not manifest.values_naming_devices:
        return
    moved: dict[str, set[str]] = defaultdict(set)
    for key, device in moves.storages.items():
        moved[manifest.storages[key].location].add(device)
    for n, value in enumerate(manifest.values_naming_devices):
        devices = moved.get(value.value, ())
        if len(devices) == 1 and not value.fixed and not value.follows:
            moves.values[n] = next(iter(devices))


def _place_programs(manifest: Manifest, rules: Rules, targets: list[str], moves: Moves) -> None:
    """Map the devices that a program names like its tensors, the same for all on one device."""
    values = [(n, value) for n, value in enumerate(manifest.values_naming_devices) if value.follows]
    if not values:
        return
    goes: dict[str, dict[str, str]] = defaultdict(dict)  # device → where its tensors go → a name
    for entry, target in zip(manifest.tensors, targets, strict=True):
        goes[entry.device].setdefault(target, entry.name)
    for key, storage in manifest.storages.items():
        goes[storage.location].setdefault(moves.storages.get(key, storage.location), key)
    for _, value in sorted(values, key=lambda each: ":" not in each[1].value):
        if value.kind == "graph" and value.value not in goes and value.value != "meta":
            for device in _of_kind(goes, value.value) or (rules.tags.of(value.value),):
                goes[value.value].setdefault(device or value.value, value.name)
    for n, value in values:
        found = dict(goes.get(value.value, {}))
        if value.kind == "autocast":
            found.update(_of_kind(goes, value.value))
            found = {kind_of(device): name for device, name in found.items()}
        if len(found) > 1:
            (one, name), (two, other) = list(found.items())[:2]
            raise RefusedError(
                f"the program names {value.value} at {value.name!r}, and would be "
                f"split: {name!r} would be on {one}, {other!r} on {two}",
                hint="use --to or --map, which move everything on a device",
            )
        for device in found:
            if device != value.value:
                moves.values[n] = device


def _of_kind(goes: Mapping[str, Mapping[str, str]], kind: str) -> dict[str, str]:
    """Return the target of everything on devices of a kind."""
    found = (each for device, each in goes.items() if kind_of(device) == kind and device != kind)
    return {device: name for each in found for device, name in each.items()}


def _note_values(manifest: Manifest, rules: Rules, moves: Moves) -> None:
    """Note the user's values that name a moved device and are not changed."""
    if not manifest.values_naming_devices:
        return
    if not rules.values:
        rewrite = replace(moves, values={})
        _place_values(manifest, rewrite)
        moves.rewritable += rewrite.values
    left = _left_devices(manifest, moves)
    decided = {*moves.values, *moves.rewritable}
    for n, value in enumerate(manifest.values_naming_devices):
        if value.value in left and not value.follows and n not in decided:
            moves.unchanged.append(n)


def _left_devices(manifest: Manifest, moves: Moves) -> set[str]:
    """Return devices that tensors leave; also `cuda`, if the target is of another kind."""
    went = [(manifest.storages[key].location, device) for key, device in moves.storages.items()]
    went += [(manifest.tensors[n].device, device) for n, device in moves.tensors.items()]
    left = {device for device, _ in went}
    left.update(kind_of(old) for old, new in set(went) if kind_of(old) != kind_of(new))
    return left


def _unmatched_rules(manifest: Manifest, rules: Rules) -> Iterator[str]:
    """Return the rules that match nothing, which is usually a mistake."""
    for glob, device in rules.place:
        if not any(fnmatchcase(entry.name, glob) for entry in manifest.tensors):
            yield f"no tensor's name matches {glob!r}, which should move to {device}"
    if all(pattern == "*" for pattern, _ in rules.tags.rules):
        return
    tags = {storage.location for storage in manifest.storages.values()}
    tags.update(entry.device for entry in manifest.tensors)
    tags.update(value.value for value in manifest.values_naming_devices if value.follows)
    for pattern, device in rules.tags.rules:
        if pattern != "*" and not any(TagMap(((pattern, device),)).of(tag) for tag in tags):
            yield f"nothing is on {pattern}, which should move to {device}"


def _unused_in_device_map(manifest: Manifest, rules: Rules) -> Iterator[str]:
    """The keys of the device map that speak of nothing here, as modules without tensors do."""
    used = {rules.map_key(entry) for entry in manifest.tensors} if rules.device_map else set()
    unused = [key for key in rules.device_map if key and key not in used]
    if unused:
        yield f"no tensor name matches {quote(unused)} of the device map"
    if rules.device_map and None in used:
        stay = [e.name for e in manifest.tensors if rules.device_for(e) is None]
        if stay:
            yield f"no rule matches {quote(stay)}; they stay where they are"


def _consequences(
    manifest: Manifest, rules: Rules, targets: list[str], moves: Moves
) -> Iterator[str]:
    """Yield hints about what the user may have to do with the result."""
    lost = sum(device == "meta" for device in moves.storages.values())
    if lost:
        yield (
            f"on meta tensors have no data: torch.load will not read the bytes of "
            f"{plural(lost, 'storage')}, which stay in the file until you relocate it again"
        )
    if manifest.capturable and "cpu" in moves.storages.values():
        yield (
            f"the optimizer at {quote(manifest.capturable)} is capturable, and torch asserts at "
            "the first step of such an optimizer on the CPU: set capturable=False after loading"
        )
    values = manifest.values_naming_devices
    follow = [n for n in moves.rewritable if values[n].kind.startswith("code")]
    stay = [n for n in moves.unchanged if values[n].kind.startswith("code")]
    if follow or stay:
        named = [values[n].name for n in sorted(follow + stay)]
        remedy = "; --values rewrites devices written as torch.device(...)" if follow else ""
        yield (
            f"the code itself names devices, at {quote(named)}; moving the tensors "
            f"does not change those, and neither does map_location{remedy}"
        )
    if not rules.place and not rules.device_map:
        return
    where: dict[Section, set[str]] = defaultdict(set)
    for entry, target in zip(manifest.tensors, targets, strict=True):
        known = entry.section is Section.OPTIMIZER and entry.state_key is not None
        if entry.role is None and not known and entry.path not in rules.fixed:
            where[entry.section].add(target)
    model, optimizer = where[Section.MODEL], where[Section.OPTIMIZER]
    if optimizer and not model <= optimizer:
        yield (
            f"the optimizer's state is on {', '.join(sorted(optimizer))}, the model on "
            f"{', '.join(sorted(model))}: the names do not show whose state it is; "
            "torch moves it to its parameters when the optimizer loads it"
        )
