"""Copy a batch to a device: every tensor in nested containers, and nothing else.

First, each object in the batch is found once. Then the tensors are copied together. Then containers
with a new tensor are rebuilt, inner ones first if necessary.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ...display.phrases import first_line
from ...errors import CkptmoveError, UsageError
from ...graph.patterns import covers
from ..inventory.containers import (
    MOST_VALUES,
    ContainerKind,
    Fields,
    LabeledObject,
    container,
    kind_by_attributes,
    kind_with_fields,
    rebuild_containers,
)
from ..inventory.object_walk import Reach
from ..inventory.opaque_types import holds_tensors, is_divisible, is_shared
from .copy import Copying
from .devices import reachable
from .plain_batch import is_there, send_plain

_MOVE_THEMSELVES = ("tensordict", "torch_geometric")  # libraries of batches
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)  # copied byte by byte


@dataclass
class Delivery:
    """A batch on a device."""

    value: Any  #: the batch
    tensors: list[torch.Tensor] = field(default_factory=list)  #: tensors that were copied there
    movers: list[Any] = field(default_factory=list)  #: objects that moved themselves there
    #: Sources of copies that may still be running.
    pinned: list[torch.Tensor] = field(default_factory=list)


def to_device(
    obj: Any, device: Any, *, non_blocking: bool = False, keep: str | Iterable[str] = ()
) -> Any:
    """The same batch on a device; see `ckptmove.to_device`."""
    if not keep and not non_blocking and isinstance(device, (str, torch.device)):
        named = _named(device)
        if named is not None:
            if is_there(obj, named):
                return obj
            found = send_plain(obj, named)
            if found is not None:
                return found
    return deliver(obj, reachable(device), non_blocking=non_blocking, keep=keep).value


@functools.lru_cache(maxsize=64)  # asking torch is slow for a single tensor
def _named(device: str | torch.device) -> torch.device | None:
    """The device, if it is the CPU or has an index; None if `reachable` must check it."""
    try:
        named = torch.device(device)
    except RuntimeError:
        return None
    return named if named.index is not None or named.type == "cpu" else None


def deliver(
    obj: Any,
    device: torch.device,
    *,
    non_blocking: bool = False,
    keep: str | Iterable[str] = (),
    pin: bool = False,
) -> Delivery:
    """Copy a batch to a device from `reachable`; `pin` pins memory before copies."""
    found = _Contents(patterns_of(keep))
    found.add(obj)
    going = found.leaves
    if found.kept:
        staying = _Contents()
        for each in found.kept:
            staying.add(each)
        going = {key: each for key, each in going.items() if key not in staying.seen}
    tensors = {key: each for key, each in going.items() if isinstance(each, torch.Tensor)}
    for each in going.values():
        if isinstance(each, torch.nn.Module):
            raise UsageError(
                f"a model ({type(each).__name__}) is a model, not a batch",
                hint="use ckptmove.move to move a model and everything that belongs to it",
            )
    away = {key: each for key, each in tensors.items() if each.device != device}
    copying = Copying(device, non_blocking=non_blocking, pin=pin)
    swapped = dict(zip(away, copying.copy_tensors(list(away.values())), strict=True))
    delivery = Delivery(obj, list(swapped.values()), pinned=copying.pinned)
    for key, each in going.items():
        if key not in tensors:
            found.check_keeps_nothing_in(each)
            try:
                new = _asked(each, device, non_blocking)
            except (CkptmoveError, torch.cuda.OutOfMemoryError):
                raise
            except Exception as error:  # the class may be any class of a user or library
                raise _refused(found.name(key), each, device, error) from error
            if new is not each:
                swapped[key] = new
                delivery.movers.append(new)
    holding = found.holding(swapped)
    rebuild_containers(holding, swapped)
    places = dict.fromkeys({each.device for each in away.values()}, device)
    for key, (kind, whole) in holding.items():
        if isinstance(kind, Fields):
            kind.follow(whole, swapped[key], places)
    delivery.value = swapped.get(id(obj), obj)
    return delivery


def patterns_of(keep: Any) -> tuple[str, ...]:
    """The patterns in a user's `keep`; raises UsageError if they are not patterns."""
    what = type(keep).__name__
    if isinstance(keep, str):
        return (keep,)
    if isinstance(keep, Iterable) and not isinstance(keep, (bytes, bytearray)):
        found = tuple(keep)
        wrong = [each for each in found if not isinstance(each, str)]
        if not wrong:
            return found
        what = f"{what} with {wrong[0]!r} in it"
    raise UsageError(
        f"keep must be a pattern on names, or a list of patterns, not a {what}",
        hint="for example keep='lengths', or keep=['lengths', '*.words']",
    )


class _Contents:
    """The objects in a batch, by `id()`."""

    def __init__(self, patterns: tuple[str, ...] = ()) -> None:
        self.leaves: dict[int, Any] = {}  #: tensors, and objects that can move themselves
        self.containers: dict[int, tuple[ContainerKind, Any]] = {}  #: the containers that hold them
        #: Objects that a pattern of `keep` covers; they were not searched.
        self.kept: list[Any] = []
        self.seen: set[int] = set()  #: all objects except those in `kept`
        self._patterns = patterns
        self._kinds = dict(_COMMON)
        self._holders: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, root: Any) -> None:
        if self._is_kept(""):
            self.kept.append(root)
            return
        stack: list[tuple[str, Any, _Search | None]] = [("", root, None)]
        while stack:
            name, each, around = stack.pop()
            key = id(each)
            if key in self.seen or (around is not None and around.left <= 0):
                continue
            self.seen.add(key)
            kind = self._kind(type(each))
            if kind is _Leaf or kind is _Mover:
                if kind is _Leaf or _is_asked(each, around is not None):
                    self.leaves[key] = each
                continue
            if kind is None:
                continue
            if not kind.declares:
                if is_shared(kind.parts(each)):
                    continue
                around = around or _Search()
            self.containers[key] = kind, each
            inside = self._inside(name, key, around)
            stack += [(below, part, around) for below, part in reversed(inside)]

    def check_keeps_nothing_in(self, mover: Any) -> None:
        """Refuse a pattern of `keep` for a part of an object that moves itself as a whole."""
        if not self._patterns or isinstance(mover, _STORAGES):
            return
        name, own = self.name(id(mover)), dict(kind_by_attributes(type(mover)).own(mover))
        for path, _ in Reach().within(own, ()):
            keys = [str(key) for key in path if not str(key).startswith("_")]
            for n in range(len(keys)):  # users may not know the outer attributes
                inner = ".".join([*([name] if name else []), *keys[n:]])
                if self._is_kept(inner):
                    kind = type(mover).__name__
                    raise UsageError(
                        f"keep covers {inner}, which is in a {kind} that moves itself as a whole",
                        hint=f"use keep={name!r}, and move what else is in it"
                        if name
                        else "move what else is in it, one by one",
                    )

    def name(self, key: int) -> str:
        """The name of an object; "" for the batch itself."""
        labels: list[str] = []
        met: set[int] = set()
        while key not in met and self._holders.get(key):
            met.add(key)
            holder = self._holders[key][0]
            kind, whole = self.containers[holder]
            parts = kind.parts(whole)
            labels.append(next(label for label, part in parts if id(part) == key))
            key = holder
        return ".".join(label for label in reversed(labels) if label)

    def holding(self, changed: Mapping[int, Any]) -> dict[int, tuple[ContainerKind, Any]]:
        """The containers that hold a changed object, at any depth."""
        found: dict[int, tuple[ContainerKind, Any]] = {}
        work = list(changed)
        while work:
            for holder in self._holders.get(work.pop(), ()):
                if holder not in found:
                    found[holder] = self.containers[holder]
                    work.append(holder)
        return found

    def _inside(self, name: str, key: int, around: _Search | None) -> list[tuple[str, Any]]:
        inside: list[tuple[str, Any]] = []
        kind, whole = self.containers[key]
        parts = kind.parts(whole)
        for label, part in parts if around is None else around.looked_at(parts):
            inner = self._kind(type(part))
            if inner is None:
                continue
            if around is not None and inner is _Leaf:
                if isinstance(part, torch.nn.Module):  # it belongs to the object, not to the batch
                    continue
                around.left = math.inf
            below = ""
            if self._patterns:
                below = f"{name}.{label}" if name and label else name or label
                if self._is_kept(below):
                    self.kept.append(part)
                    continue
            self._holders[id(part)].append(key)
            inside.append((below, part))
        return inside

    def _is_kept(self, name: str) -> bool:
        return any(covers(pattern, name) for pattern in self._patterns)

    def _kind(self, kind: type) -> Any:
        """The `ContainerKind` of a container, `_Leaf`, `_Mover`, or None for others."""
        try:
            return self._kinds[kind]
        except KeyError:
            found = self._kinds[kind] = _kind(kind)
            return found


class _Leaf:
    """The kind of objects that are moved as a whole."""


class _Mover:
    """The kind of objects that may move themselves, because they have a method `to`."""


class _Search:
    """The search of one object of any class."""

    def __init__(self) -> None:
        #: How many more values are searched; no limit once a tensor is found.
        self.left: float = MOST_VALUES

    def looked_at(self, parts: Iterable[LabeledObject]) -> Iterator[LabeledObject]:
        """The parts, up to the limit."""
        for part in parts:
            if self.left <= 0:
                return
            self.left -= 1
            yield part


#: The usual classes in batches, cached.
_COMMON: dict[type, Any] = {
    torch.Tensor: _Leaf,
    **dict.fromkeys((int, float, bool, str, bytes, type(None), torch.device, torch.dtype)),
}
_COMMON |= {kind: container(kind) for kind in (dict, list, tuple)}


def _kind(kind: type) -> Any:
    if issubclass(kind, (torch.Tensor, torch.nn.Module)):
        return _Leaf
    found = container(kind)
    if found is not None:
        return found
    if callable(getattr(kind, "to", None)) and not issubclass(kind, type):
        return _Mover
    return kind_with_fields(kind) or (
        kind_by_attributes(kind, declares=False) if is_divisible(kind) else None
    )


# -- objects that move themselves ------------------------------------------------------------------


def _is_asked(mover: Any, within: bool) -> bool:
    """Whether an object's `to` moves it to a device, and does not convert units or formats.

    `within` means that another object holds it: then it is left alone if it holds a model, a lock
    or the like.
    """
    if within and is_shared(kind_by_attributes(type(mover)).parts(mover)):
        return False
    if isinstance(mover, _STORAGES) or type(mover).__module__.partition(".")[0] in _MOVE_THEMSELVES:
        return True
    return bool(_parameters(mover) & {"device", "device="}) or holds_tensors(mover)


def _gives_another(mover: Any) -> bool:
    """Whether `to` returns a new object: a TensorDict, whose copy would lose its lock."""
    is_one = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return is_one is not None and bool(is_one(mover))


def _refused(name: str, mover: Any, device: torch.device, error: Exception) -> UsageError:
    kind = type(mover).__name__
    why = f"{type(error).__name__}: {first_line(error)}"
    hint = f"use keep={name!r}" if name else "move what is in it"
    what = f"{name or 'the batch'}, a {kind},"
    return UsageError(f"{what} can't move itself to {device}: {why}", hint=hint)


def _asked(mover: Any, device: torch.device, non_blocking: bool) -> Any:
    """The result of an object's own `to`, called on a copy, because it may change the object."""
    twin = mover
    if not isinstance(mover, _STORAGES) and not _gives_another(mover):
        with suppress(Exception):  # any error of an object that can't be copied
            twin = copy.copy(mover)
    before = dict(kind_by_attributes(type(twin)).own(twin))
    held = [tensor for _, tensor in Reach().within(before, ())]
    is_flat = twin is mover or not _part_from(twin, before)
    accepted = _parameters(twin)
    options: dict[str, Any] = {}
    if non_blocking and device.type not in ("cpu", "meta") and accepted & {"non_blocking", "**"}:
        options["non_blocking"] = True
    new = twin.to(device=device, **options) if "device=" in accepted else twin.to(device, **options)
    if new is None:
        new = twin
    if new is twin and twin is not mover and not _is_flat(before):
        # `to` may have changed its inner objects.
        return mover if _is_unchanged(new, held, device) else new
    after = getattr(new, "__dict__", None)
    if new is twin and is_flat and after is not None and after.keys() == before.keys():
        return mover if all(after[name] is value for name, value in before.items()) else new
    return new


def _is_unchanged(mover: Any, held: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether an object holds the same tensors as before, all on the device."""
    now = [
        tensor for _, tensor in Reach().within(dict(kind_by_attributes(type(mover)).own(mover)), ())
    ]
    same = len(now) == len(held) and all(a is b for a, b in zip(now, held, strict=True))
    return bool(held) and same and all(each.device == device for each in held)


def _is_flat(attributes: Mapping[str, Any]) -> bool:
    """Whether attributes are only tensors, numbers and the like, so that a change is visible."""
    return all(
        isinstance(
            each, (torch.Tensor, torch.device, torch.dtype, str, bytes, int, float, type(None))
        )
        for each in attributes.values()
    )


def _part_from(twin: Any, attributes: Mapping[str, Any]) -> bool:
    """Copy containers that a copy shares with the original; returns whether there are any."""
    found = _Contents()
    for value in attributes.values():
        found.add(value)
    if not found.containers:
        return False
    swapped: dict[int, Any] = {}
    rebuild_containers(found.containers, swapped)
    for name, value in attributes.items():
        if id(value) in swapped:
            twin.__dict__[name] = swapped[id(value)]
    return True


def _parameters(mover: Any) -> set[str]:
    """The parameters of an object's `to`: `**` for any keyword, `device=` if keyword-only."""
    try:
        parameters = inspect.signature(mover.to).parameters
    except (TypeError, ValueError):  # such as a method in C
        return set()
    names = set(parameters)
    for name, each in parameters.items():
        if each.kind is each.VAR_KEYWORD:
            names.add("**")
        elif each.kind is each.KEYWORD_ONLY and name == "device":
            names.add("device=")
    return names
