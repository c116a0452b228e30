"""Collect the differences between two checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...manifest.dtypes import BITS
from ...manifest.manifest import NOT_STORED
from ...pickles.nodes import Node
from ...reports.difference import Difference, Kind
from ...torch_pickle.values.strided import Tensor, reach_of
from ..draft import CheckpointGraph, StorageBytes, View

_FLOATING = ("float", "bfloat", "complex")


class Shown(NamedTuple):
    """Elements of a storage, as a tensor of a draft shows them."""

    draft: CheckpointGraph
    stored: StorageBytes
    view: View


class Held(NamedTuple):
    """A tensor that one of the checkpoints holds under a name."""

    name: str
    node: Node
    tensor: Tensor
    #: its elements; None where it is made of other tensors, or has none
    shown: Shown | None
    draft: CheckpointGraph
    #: whether its bytes are not there, as those of example inputs
    is_left_out: bool

    @property
    def extent(self) -> tuple[Hashable, int, int] | None:
        """Where its bytes lie: in what, from where, to where; None if it has no storage."""
        tensor = self.tensor
        if tensor.storage is None or self.is_left_out:
            return None
        stored = self.draft.stored[tensor.storage]
        start = tensor.offset * BITS[tensor.dtype] // 8
        end = reach_of(tensor.shape, tensor.stride, tensor.offset, tensor.dtype)
        if stored.content is not None:
            return stored.id, start, end
        return stored.source, stored.start + start, stored.start + end


def is_left_out(tensor: Tensor, draft: CheckpointGraph) -> bool:
    """Whether a tensor has a storage, and that not the bytes that it needs."""
    if tensor.storage is None:
        return False
    reach = reach_of(tensor.shape, tensor.stride, tensor.offset, tensor.dtype)
    return reach > draft.stored[tensor.storage].nbytes


def can_cast(old: str, new: str) -> bool:
    """Whether elements of one floating dtype are cast to the other."""
    kinds = [each.startswith("complex") for each in (old, new) if each.startswith(_FLOATING)]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def unlike(*pair: Held) -> Iterator[tuple[Kind, Any, Any]]:
    """What two tensors differ in, but for their elements; a value is `requires_grad`.

    What is stored without a device differs from any but the CPU, where it would be loaded; of what
    both put together of files of ranks, those of the files count.
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


def _devices(*pair: Held) -> tuple[str, str]:
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


def shared(pairs: Iterable[tuple[Held, Held]]) -> Iterator[Difference]:
    """Which tensors have bytes in common in one of two checkpoints only."""
    names: list[str] = []
    olds: list[tuple[Hashable, int, int]] = []
    news: list[tuple[Hashable, int, int]] = []
    for old, new in pairs:
        mine, other = old.extent, new.extent
        if mine is not None and other is not None:
            names.append(old.name)
            olds.append(mine)
            news.append(other)
    yield from regrouped(names, overlapping(olds), overlapping(news))


def regrouped(
    names: Sequence[str], old: Sequence[Hashable], new: Sequence[Hashable]
) -> Iterator[Difference]:
    """Which of the things that both checkpoints have are no longer one and the same, or became so.

    Each has a label in both; things with equal labels are one and the same there.
    """
    for kind, mine, others in ((Kind.UNSHARED, old, new), (Kind.SHARED, new, old)):
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for n, label in enumerate(mine):
            groups[label].append(n)
        for group in groups.values():
            if len({others[n] for n in group}) > 1:
                same = tuple(dict.fromkeys(names[n] for n in group))
                yield Difference(kind, same[0], names=same)


def overlapping(listed: Sequence[tuple[Hashable, int, int]]) -> list[int]:
    """A number for each half-open range of something, the same for those that share bytes.

    A range is: of what, from where, to where.
    """
    numbers = list(range(len(listed)))
    of: dict[Hashable, list[int]] = defaultdict(list)
    for n, (what, start, end) in enumerate(listed):
        if start < end:
            of[what].append(n)
    for members in of.values():
        members.sort(key=lambda n: listed[n][1])
        first, reached = members[0], -1
        for n in members:
            _, start, end = listed[n]
            if start >= reached:
                first = n
            numbers[n] = first
            reached = max(reached, end)
    return numbers
