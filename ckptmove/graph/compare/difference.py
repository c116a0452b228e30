"""Collect the differences between two checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from ...manifest.dtypes import BITS
from ...manifest.manifest import NOT_STORED
from ...pickles.nodes import Node
from ...reports.difference import Difference, Kind
from ...torch_pickle.values.strided import Tensor, reach_of
from ..draft import CheckpointGraph, StorageBytes, View
from .tree_position import TreePosition

#: A range of bytes: its container, start and end.
Extent: TypeAlias = "tuple[Hashable, int, int]"

_FLOATING = ("float", "bfloat", "complex")


class StoredElements(NamedTuple):
    """The elements of a storage that a tensor of a draft shows."""

    draft: CheckpointGraph
    stored: StorageBytes
    view: View


class ComparedTensor(NamedTuple):
    """A tensor at a place in one of the checkpoints."""

    where: TreePosition
    node: Node
    tensor: Tensor
    #: its elements; None if it is made of other tensors, or has none
    shown: StoredElements | None
    draft: CheckpointGraph
    #: whether its bytes are missing, as for example inputs
    is_left_out: bool
    #: the place of its bytes; None if it has no storage, or if they are missing
    extent: Extent | None

    @property
    def name(self) -> str:
        """Its dotted name."""
        return self.where.name


class StorageSpan(NamedTuple):
    """Where the elements of a tensor begin and end in its storage, in bytes."""

    start: int
    end: int

    def within(self, stored: StorageBytes) -> Extent | None:
        """Return the place of the bytes of a tensor in this storage; None if it lacks them."""
        start, end = self
        if end > stored.nbytes:
            return None
        if stored.content is not None:
            return stored.id, start, end
        return stored.source, stored.start + start, stored.start + end


def span_in_storage(tensor: Tensor) -> StorageSpan:
    """Return where the elements of a tensor begin and end in its storage."""
    start = tensor.offset * BITS[tensor.dtype] // 8
    end = reach_of(tensor.shape, tensor.stride, tensor.offset, tensor.dtype)
    return StorageSpan(start, end)


def can_cast(old: str, new: str) -> bool:
    """Whether elements of one floating-point dtype can be cast to the other."""
    kinds = [each.startswith("complex") for each in (old, new) if each.startswith(_FLOATING)]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def unlike(*pair: ComparedTensor) -> Iterator[tuple[Kind, Any, Any]]:
    """Yield the differences of two tensors except their elements; a value is `requires_grad`.

    A tensor stored without a device would be loaded on the CPU, so it differs from every other
    device. For tensors merged from files of ranks on both sides, the devices of the files count.
    """
    old, new = pair[0].tensor, pair[1].tensor
    if (old.kind, old.layout) != (new.kind, new.layout):
        mine, other = (
            each.kind if each.layout == "strided" else f"{each.kind}, {each.layout}"
            for each in (old, new)
        )
        yield Kind.TYPE, mine, other
    if old.dtype != new.dtype:
        yield Kind.RETYPED, old.dtype, new.dtype
    if old.shape != new.shape:
        yield Kind.RESHAPED, list(old.shape), list(new.shape)
    devices = _devices(*pair)
    if devices[0] != devices[1]:
        yield Kind.MOVED, *devices
    if old.requires_grad != new.requires_grad:
        yield Kind.VALUE, old.requires_grad, new.requires_grad


def _devices(*pair: ComparedTensor) -> tuple[str, str]:
    devices = pair[0].tensor.device, pair[1].tensor.device
    if not (pair[0].draft.untagged or pair[1].draft.untagged):
        return devices
    said = [each.draft.untagged.get(each.tensor.storage or "") for each in pair]
    if said[0] and said[1]:
        return said[0], said[1]
    if devices[0] == devices[1]:
        return devices[0], devices[1]
    old, new = (
        device if tags is None else NOT_STORED for tags, device in zip(said, devices, strict=True)
    )
    return old, new


class SharedBytes:
    """Finds the tensors that share bytes in only one of two checkpoints."""

    def __init__(self) -> None:
        self._places: list[TreePosition] = []
        # their extents in both checkpoints
        self._olds: list[Extent] = []
        self._news: list[Extent] = []

    def add(self, where: TreePosition, old: Extent | None, new: Extent | None) -> None:
        """Add a tensor that both have."""
        if old is not None and new is not None:
            self._places.append(where)
            self._olds.append(old)
            self._news.append(new)

    def differences(self) -> Iterator[Difference]:
        """Yield the groups that share bytes in only one checkpoint."""
        yield from sharing_differences(
            self._places, overlapping(self._olds), overlapping(self._news)
        )


def sharing_differences(
    places: Sequence[TreePosition], old: Sequence[Hashable], new: Sequence[Hashable]
) -> Iterator[Difference]:
    """Yield groups of common objects that are the same object in only one checkpoint.

    Each object has a label in both checkpoints; equal labels mean the same object there.
    """
    if all(len(set(labels)) == len(labels) for labels in (old, new)):
        return
    for kind, mine, others in ((Kind.UNSHARED, old, new), (Kind.SHARED, new, old)):
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for n, label in enumerate(mine):
            groups[label].append(n)
        for group in groups.values():
            if len({others[n] for n in group}) > 1:
                same = tuple(dict.fromkeys(places[n].name for n in group))
                yield Difference(kind, same[0], names=same)


def overlapping(listed: Sequence[Extent]) -> list[int]:
    """Return a number for each half-open range; ranges that share bytes get the same number.

    A range is a container, a start and an end.
    """
    numbers = list(range(len(listed)))
    of: dict[Hashable, list[tuple[int, int, int]]] = defaultdict(list)
    for n, (what, start, end) in enumerate(listed):
        if start < end:
            of[what].append((start, n, end))
    for members in of.values():
        members.sort()
        first, reached = 0, -1
        for start, n, end in members:
            if start >= reached:
                first = n
            numbers[n] = first
            reached = max(reached, end)
    return numbers
