"""Find memory of the host that is used before a copy ends, or that is copied back and forth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch

from ....reports.events import Site
from ..program.syntax import reads_at_once
from .operations import bytes_of, is_big
from .remembered import StorageNotes, key_of, storage_of
from .tensor_names import TensorNames

#: Methods that read a tensor on the CPU, or let NumPy read it, without an operation of torch.
HOST_READS = frozenset((torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__))
_MOST_RACES = 64
_LARGE = 1 << 19  # bytes of a tensor that is worth a word if it is copied again and again
_ENOUGH_TRIPS = 3  # fewer may be a snapshot that is restored


class Race(NamedTuple):
    """A line that uses pinned memory before a copy that the host did not wait for has ended."""

    copied: str  #: the line of the copy
    used: str  #: the line that uses the memory
    fills: bool  #: whether the copy fills the memory; otherwise it reads it


class _Pending(NamedTuple):
    line: str
    fills: bool


class PendingCopies:
    """Copies that may still run while the host goes on, and the pinned memory that they use.

    Attributes:
        is_pending: whether there may be such copies.
        races: the lines that use such memory too early.
        unjudged: the line of a copy into memory that NumPy was given before a wait; or "".
    """

    def __init__(self) -> None:
        self._pending = StorageNotes()
        self.is_pending = False
        self.races: dict[Race, None] = {}
        self.unjudged = ""

    def started(self, source: torch.Tensor, made: torch.Tensor, line: str, *, new: bool) -> None:
        """Record a copy with `non_blocking=True`; `new` tells whether torch made its target."""
        fills = made.device.type == "cpu"
        host = made if fills else source
        key = key_of(host)
        # CUDA waits if the memory is not pinned; torch pins the memory that it makes for a copy.
        if key is None or not (host.is_pinned() or (fills and new and source.is_cuda)):
            self.waited()
            return
        self._pending.pop(key, None)
        self._pending.note(host, _Pending(line, fills))
        self.is_pending = True

    def waited(self) -> None:
        """Record that the host waits for the device."""
        if self.is_pending:
            self._pending.clear()
            self.is_pending = False

    def use(
        self,
        tensors: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        changed: torch.Tensor | None,
        line: str,
    ) -> None:
        """Record an operation of the host that takes tensors, and changes one of them in place."""
        keys = {key_of(each) for each in made}
        for each in tensors:
            pending: _Pending | None = self._pending.about(each)
            is_view = each is not changed and key_of(each) in keys
            if pending is not None and not is_view and (pending.fills or each is changed):
                self._note(each, Race(pending.line, line, pending.fills))

    def read(self, tensor: torch.Tensor, method: str, line: str) -> None:
        """Record that a method reads a tensor, or gives its memory to NumPy."""
        pending: _Pending | None = self._pending.about(tensor)
        if pending is None or not pending.fills:
            return
        if reads_at_once(line, method):
            self._note(tensor, Race(pending.line, line, fills=True))
        else:
            self.unjudged = self.unjudged or pending.line

    def _note(self, tensor: torch.Tensor, race: Race) -> None:
        self._pending.pop(key_of(tensor) or 0, None)
        if len(self.races) < _MOST_RACES:
            self.races[race] = None


@dataclass
class RoundTrip:
    """A tensor on the host that is filled from the device, and brought back to it.

    Attributes:
        name: the variable of the tensor where it is filled.
        made: the code that made it, or "".
        filled: the first line that filled it.
        brought: the first line that copied it back to the device.
        times: how often it was filled, and then copied back.
    """

    name: str
    made: str
    filled: str
    brought: str = ""
    times: int = 0
    is_filled: bool = True


class RoundTrips:
    """The tensors on the host that the device fills, and that are copied back to it."""

    def __init__(self, names: TensorNames) -> None:
        self._names = names
        self._kept = StorageNotes()

    def filled(self, tensor: torch.Tensor, line: str, frame: FrameType | None) -> None:
        """Record that a tensor on the host is filled from the device."""
        found: RoundTrip | None = self._kept.about(tensor)
        if found is not None:
            found.is_filled = True
        elif is_big(tensor):
            name = self._names.kept(frame, tensor) or "a tensor"
            self._kept.note(tensor, RoundTrip(name, self._names.origin(tensor), line))

    def brought(self, tensor: torch.Tensor, line: str) -> None:
        """Record that a tensor is copied to the device."""
        found: RoundTrip | None = self._kept.about(tensor)
        if found is not None and found.is_filled:
            found.is_filled = False
            found.brought = found.brought or line
            found.times += 1

    @property
    def found(self) -> list[RoundTrip]:
        """Those that went back and forth several times."""
        trips: list[RoundTrip] = [each for _, each in self._kept.values()]
        return [each for each in trips if each.times >= _ENOUGH_TRIPS]


@dataclass
class RepeatedCopy:
    """A tensor on the host that is copied to the device again, though it did not change.

    Attributes:
        name: its variable where it is copied, or "".
        line: the line that copies it.
        nbytes: its size.
        steps: in how many steps it was copied.
    """

    name: str
    line: str
    nbytes: int
    steps: int = 0
    step: int = -1  # the latest of these steps
    version: int = 0


class RepeatedCopies:
    """Large tensors on the host that the program copies to the device, outside of its models."""

    def __init__(self, names: TensorNames) -> None:
        self._names = names
        self._kept = StorageNotes()

    def copied(self, tensor: torch.Tensor, step: int, line: str, frame: FrameType | None) -> None:
        """Record that a tensor is copied to the device."""
        nbytes, storage = bytes_of([tensor]), storage_of(tensor)
        whole = storage is not None and storage.nbytes() == nbytes
        if nbytes < _LARGE or not whole or tensor.requires_grad:
            return
        found: RepeatedCopy | None = self._kept.about(tensor)
        if found is None:
            name = "" if frame is None else self._names.kept(frame, tensor)
            found = RepeatedCopy(name or "a tensor", line, nbytes, version=tensor._version)
            self._kept.note(tensor, found)
        if found.step != step:
            found.steps += found.version == tensor._version
            found.step, found.version = step, tensor._version

    def found(self, steps: int) -> list[RepeatedCopy]:
        """Those that were copied in most steps of a run."""
        copies: list[RepeatedCopy] = [each for _, each in self._kept.values()]
        return [each for each in copies if each.steps >= max(_ENOUGH_TRIPS, steps / 2)]


class HostCopies:
    """The copies of a run from the host to the device, and back.

    Attributes:
        pending: those that the host does not wait for.
        trips: tensors that go back and forth.
        repeated: large tensors that are copied again and again.
    """

    def __init__(self, names: TensorNames) -> None:
        self.pending = PendingCopies()
        self.trips = RoundTrips(names)
        self.repeated = RepeatedCopies(names)

    def copied(
        self,
        source: torch.Tensor,
        made: torch.Tensor,
        site: Site,
        step: int,
        frame: FrameType | None,
        *,
        is_blocking: bool,
    ) -> None:
        """Record a copy between the host and the device, after so many steps."""
        new = not site.op.startswith("aten.copy_")
        if is_blocking:
            self.pending.waited()
        else:
            self.pending.started(source, made, site.source, new=new)
        if source.device.type == "cpu":
            self.trips.brought(source, site.source)
            if not site.phase:
                self.repeated.copied(source, step, site.source, frame)
        elif not new and made.device.type == "cpu":
            self.trips.filled(made, site.source, frame)
