"""Find copies to another device that are never used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ....reports.events import Operand, Site
from .remembered import StorageNotes, key_of
from .tally import EventCount, Key
from .tensor_names import TensorNames

_MOST_COPIES = 1024


class UnusedCopy(NamedTuple):
    """A copy that was not used yet."""

    site: Site  #: where it was made
    devices: str  #: the source device and the target device
    nbytes: int  #: the size of the copy
    operand: Operand  #: the copied tensor
    source: int | None  #: the key of its storage
    discarded: bool  #: whether the statement drops the copy: `x.to(device)`


class UnusedCopies:
    """The latest copies that have not been used."""

    def __init__(self) -> None:
        self._unused: OrderedDict[int, UnusedCopy] = OrderedDict()
        self._kept = StorageNotes()  # copies and their sources, so that keys stay unique
        self._sources: set[int | None] = set()
        self._missed: set[int | None] = set()  # sources that were used after they were copied

    @property
    def watched(self) -> int:
        """How many copies are watched."""
        return len(self._unused)

    def watch(self, made: torch.Tensor, source: torch.Tensor, copy: UnusedCopy) -> None:
        """Watch the copy `made` of the tensor `source`."""
        key = key_of(made)
        if key is None:
            return
        self._kept.note(made, None)
        self._kept.note(source, None)
        self._unused[key] = copy
        self._sources.add(copy.source)
        if len(self._unused) > _MOST_COPIES:
            self._unused.popitem(last=False)

    def use(self, tensors: Sequence[torch.Tensor], *, moved: bool) -> None:
        """Note that tensors are used: they may be watched copies, or their sources.

        `moved` means that they are only copied to another device; for a source, this is no use.
        """
        if not self._unused:
            return
        for each in tensors:
            key = key_of(each)
            if key is not None and key in self._unused:
                del self._unused[key]
            elif key in self._sources and not moved:
                self._missed.add(key)

    def forget(self) -> None:
        """Forget all copies, because the next operations are not watched."""
        self._unused.clear()
        self._sources.clear()

    def noted(self, others: Mapping[Key, EventCount], names: TensorNames) -> dict[Key, EventCount]:
        """The events, with copies that were never used although their sources were used."""
        found = dict(others)
        for copy in self._unused.values():
            if copy.source not in self._missed:
                continue
            each = found.setdefault(("dropped", copy.site, copy.devices), EventCount())
            each.count += 1
            each.nbytes += copy.nbytes
            name = names.argument(copy.source)
            each.operands += (copy.operand._replace(name=name) if name else copy.operand,)
            each.asked = copy.discarded
        return found
