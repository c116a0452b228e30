"""Find copies on the device that were made only once, though their sources change."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .remembered import StorageNotes, key_of, shape_of

_MOST_COPIES = 256
_MOST_FRAMES = 32  # between a copy and the call of `.to` that makes it


class StaleCopy(NamedTuple):
    """A copy that is still used although its source was changed."""

    line: str  #: where it was made
    changed: str  #: where its source is changed
    used: str  #: where it is used


class _Copy:
    def __init__(self, made: int, line: str) -> None:
        self.made = made
        self.line = line
        self.is_of_move = _is_of_move()
        self.changed = ""
        self.steps: set[int] = set()  # the steps in which its source was changed
        self.used = ""


class StaleCopies:
    """The latest copies to the device, each from a storage on another device.

    Attributes:
        is_watching: whether the source of a copy was changed.
    """

    def __init__(self) -> None:
        self._kept = StorageNotes()  # copies and their sources, so that keys stay unique
        # By the key of the source's storage: by the place in it.
        self._copies: OrderedDict[int, dict[int, _Copy]] = OrderedDict()
        self._again: set[tuple[int, int]] = set()  # sources that were copied more than once
        # The first copies of the same source by `.to` of a module, by their keys.
        self._twins: list[tuple[int, int]] = []
        self._changed: dict[int, _Copy] = {}  # by the key of the copy
        self._ties = StorageNotes()  # the parameter that a copy was made of, and its line
        self.is_watching = False

    def copied(self, source: torch.Tensor, made: torch.Tensor, line: str) -> None:
        """Record that a tensor on another device was copied to the device."""
        key, own = key_of(source), key_of(made)
        if key is None or own is None:
            return
        at = int(source.storage_offset())
        before = self._copies.get(key, {}).pop(at, None)
        self._kept.note(made, None)
        if before is not None or (key, at) in self._again:
            self._again.add((key, at))
            of_move = before is not None and before.is_of_move and _is_of_move()
            if before is not None and of_move and len(self._twins) < _MOST_COPIES:
                self._twins.append((before.made, own))
            self._changed.pop(before.made if before is not None else own, None)
            return
        self._kept.note(source, None)
        self._copies.setdefault(key, {})[at] = _Copy(own, line)
        if len(self._copies) > _MOST_COPIES:
            self._copies.popitem(last=False)
        if source.requires_grad and source.is_leaf and shape_of(source) == shape_of(made):
            self._ties.note(made, (weakref.ref(source), line))

    def changed(self, tensor: torch.Tensor, step: int, line: str) -> None:
        """Record that a tensor was changed in place; it may be the source of a copy."""
        key = key_of(tensor)
        for found in () if key is None else self._copies.get(key, {}).values():
            found.changed = found.changed or line
            found.steps.add(step)
            self._changed[found.made] = found
            self.is_watching = True

    def use(self, tensors: Sequence[torch.Tensor], step: int, line: str) -> None:
        """Record that tensors are used on the device."""
        for each in tensors:
            key = key_of(each)
            found = None if key is None else self._changed.get(key)
            if found is not None and not found.used and any(n < step for n in found.steps):
                found.used = line

    @property
    def stale(self) -> list[StaleCopy]:
        """Those that were used in a step after one in which their source was changed; by lines."""
        used = [each for each in self._changed.values() if each.used and len(each.steps) > 1]
        found = {(each.line, each.changed): each.used for each in reversed(used)}
        return [StaleCopy(*lines, at) for lines, at in reversed(found.items())]

    def separated(self, model: nn.Module) -> list[tuple[str, str]]:
        """Tensors of a model that `.to` copied from the same memory, and have their own since then.

        Each item is the name of the second one, and of the first; one of them is trained.
        """
        tensors = dict([*model.named_buffers(), *model.named_parameters()])
        names = {key_of(each): name for name, each in tensors.items()}
        pairs = [(names.get(second, ""), names.get(first, "")) for first, second in self._twins]
        return [
            (second, first)
            for second, first in pairs
            if first and second and (tensors[first].requires_grad or tensors[second].requires_grad)
        ]

    def lost_ties(self, models: Iterable[nn.Module]) -> list[tuple[str, str, str]]:
        """Parameters that are a copy of another one of the same model: both names, and the line."""
        found: dict[str, tuple[str, str, str]] = {}
        for model in models:
            named = dict(model.named_parameters())
            names = {id(each): name for name, each in named.items()}
            for name, each in named.items():
                tie = self._ties.about(each)
                source = None if tie is None else tie[0]()
                of = "" if source is None or source is each else names.get(id(source), "")
                if of and tie is not None:
                    found.setdefault(tie[1], (name, of, tie[1]))
        return list(found.values())


def _is_of_move() -> bool:
    """Whether the copy that is being made is one of a module's tensors, by a call that moves it."""
    frame = sys._getframe(1).f_back
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code is nn.Module._apply.__code__:
            return frame is not None
        frame = frame.f_back
    return False
