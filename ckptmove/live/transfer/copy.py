"""Copy the tensors of one batch to another device, and keep how they overlap in memory.

Tensors that share bytes also share them in the copy: the range that they span is copied once,
without other bytes of their storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ...errors import UsageError

#: Devices to which tensors are copied one by one: their tensors have no storage to share.
_WITHOUT_STORAGE = ("xla", "lazy", "vulkan", "maia", "ipu", "ort", "mkldnn")
#: Devices whose copies are complete when the call returns.
_AT_ONCE = ("cpu", "meta")
_WIDEST = 16  # bytes of the largest element
_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


class Copying:
    """Copies tensors to a device."""

    def __init__(
        self, device: torch.device, *, non_blocking: bool = False, pin: bool = False
    ) -> None:
        """`pin` pins memory first; `non_blocking` does not wait for copies from pinned memory.

        For other copies, the host always waits: it could read bytes too early, or overwrite them
        before they are copied.
        """
        accelerated = device.type not in _AT_ONCE
        self._device = device
        self._hurries = non_blocking and accelerated
        self._pins = pin and accelerated
        self._is_without_storage = device.type in _WITHOUT_STORAGE
        self.pinned: list[torch.Tensor] = []  #: sources of copies that may still be running

    def copy_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors from other devices; raises UsageError if a tensor has no values."""
        made: dict[int, torch.Tensor] = {}
        storages: defaultdict[int, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            if tensor.is_meta:
                raise UsageError(
                    "a tensor on the meta device has no values to move",
                    hint="create it with values, or leave it where it is with keep",
                )
            if self._is_plain(tensor):
                storages[tensor.untyped_storage()._cdata].append(index)
            else:
                made[index] = self._asked(tensor)
        for indices in storages.values():
            if len(indices) == 1 and is_whole(tensors[indices[0]]):
                made[indices[0]] = self._sent(tensors[indices[0]])
                continue
            for group in _overlapping([(index, _bare(tensors[index])) for index in indices]):
                bare = [tensor for _, tensor in group]
                there = self._alone(bare[0]) if len(bare) == 1 else self._together(bare)
                for (index, _), new in zip(group, there, strict=True):
                    made[index] = _dressed(new, tensors[index])
        return [made[index] for index in range(len(tensors))]

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is only bytes in a storage."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_leaf:
            return False
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return False
        if is_functorch_wrapped_tensor(tensor):
            return False
        if self._is_without_storage or tensor.device.type in _WITHOUT_STORAGE:
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if tensor.nbytes == nbytes and not tensor.storage_offset() and tensor.is_contiguous():
            return True
        return _Span.of(tensor).end <= nbytes

    def _asked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy with the tensor's own `to`: sparse or nested tensors, subclasses, and non-leaves."""
        if not (tensor.requires_grad and tensor.is_leaf):
            return tensor.to(self._device)
        with torch.no_grad():
            new = tensor.to(self._device)
        if isinstance(tensor, torch.nn.Parameter) and type(new) is torch.Tensor:
            new = torch.Tensor._make_subclass(type(tensor), new, True)
        return new.requires_grad_()

    def _alone(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copy a tensor that shares no bytes, without the gaps between its elements."""
        if tensor.is_contiguous():
            return [self._sent(tensor)]
        once = _once(tensor)
        if _Span.of(once).nbytes <= once.numel() * once.element_size():
            return self._together([tensor])
        packed = self._sent(torch.empty_like(once).copy_(once))
        pairs = zip(tensor.stride(), packed.stride(), strict=True)
        strides = [0 if old == 0 else new for old, new in pairs]
        return [_viewed_as(tensor, packed.untyped_storage(), 0, strides)]

    def _together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the spans of tensors of one storage."""
        spans = [_Span.of(tensor) for tensor in tensors]
        start = min(span.start for span in spans) // _WIDEST * _WIDEST  # keeps all elements aligned
        nbytes = max(span.end for span in spans) - start
        once = [_once(tensor) for tensor in tensors]
        if nbytes > sum(each.numel() * each.element_size() for each in once) + _WIDEST:
            found = self._without_holes(tensors, once)
            if found is not None:
                return found
        there = self._sent(_flat(tensors[0], torch.uint8, start, nbytes)).untyped_storage()
        return [
            _viewed_as(
                tensor, there, (span.start - start) // tensor.element_size(), tensor.stride()
            )
            for tensor, span in zip(tensors, spans, strict=True)
        ]

    def _without_holes(
        self, tensors: Sequence[torch.Tensor], once: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Tensors of one storage without unused elements; None if strides can't express that.

        Each used element moves to its rank among them.
        """
        width = tensors[0].element_size()
        if any(tensor.element_size() != width for tensor in tensors):
            return None
        places = [_places(int(each.storage_offset()), each.shape, each.stride()) for each in once]
        groups = _sharing(places)
        if len(groups) > 1:
            made: dict[int, torch.Tensor] = {}
            for group in groups:
                some = [tensors[index] for index in group]
                there = self._alone(some[0]) if len(some) == 1 else self._together(some)
                made.update(zip(group, there, strict=True))
            return [made[index] for index in range(len(tensors))]
        used = torch.unique(torch.cat([each.reshape(-1) for each in places]))
        looks: list[tuple[int, list[int]]] = []
        for tensor, place in zip(tensors, places, strict=True):
            ranks = torch.searchsorted(used, place)
            first = int(ranks.reshape(-1)[0])
            strides = [
                int(ranks.transpose(0, axis)[1].reshape(-1)[0]) - first if size > 1 else 0
                for axis, size in enumerate(place.shape)
            ]
            if not torch.equal(_places(first, place.shape, strides), ranks):
                return None
            pairs = zip(tensor.shape, strides, strict=True)
            looks.append((first, [1 if size == 1 else stride for size, stride in pairs]))
        low, count = int(used[0]), int(used[-1] - used[0]) + 1
        flat = _flat(tensors[0], _CARRIERS[width], low, count)
        squeezed = self._sent(flat[(used - low).to(flat.device)]).untyped_storage()
        return [
            _viewed_as(tensor, squeezed, *look) for tensor, look in zip(tensors, looks, strict=True)
        ]

    def _sent(self, source: torch.Tensor) -> torch.Tensor:
        """Copy a tensor without gaps and without a graph to the device."""
        if not (self._hurries and source.device.type == "cpu" and source.numel()):
            return source.to(self._device)
        if self._pins and not source.is_pinned():
            with suppress(RuntimeError):  # no memory, or no more memory, can be pinned
                source = source.pin_memory()
        if not source.is_pinned():
            return source.to(self._device)
        self.pinned.append(source)
        return source.to(self._device, non_blocking=True)


class _Span(NamedTuple):
    """The range of bytes in a storage from a tensor's first byte to its last."""

    start: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Span:
        width, start = tensor.element_size(), int(tensor.storage_offset())
        if not tensor.numel():
            return cls(0, 0)
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        last = start + sum((size - 1) * stride for size, stride in pairs)
        return cls(start * width, (last + 1) * width)

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def _overlapping(
    tensors: Iterable[tuple[int, torch.Tensor]],
) -> list[list[tuple[int, torch.Tensor]]]:
    """Tensors of one storage, grouped by overlapping spans."""
    tensors = list(tensors)
    if len(tensors) == 1:
        return [tensors]
    groups: list[list[tuple[int, torch.Tensor]]] = []
    end = -1
    for span, pair in sorted(
        ((_Span.of(pair[1]), pair) for pair in tensors), key=lambda both: both[0]
    ):
        if span.nbytes and span.start < end:
            groups[-1].append(pair)
        else:
            groups.append([pair])
        end = max(end, span.end)
    return groups


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is exactly its storage, in order."""
    if tensor.requires_grad or type(tensor) is not torch.Tensor or not tensor.is_contiguous():
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The values in memory, without the conjugate and negative bits."""
    bare = tensor.detach()
    bare = bare.conj() if bare.is_conj() else bare
    return torch._neg_view(bare) if bare.is_neg() else bare


def _dressed(new: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Bare values as a leaf tensor like the original one."""
    new = _flipped(new, tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(new, tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


def _flipped(new: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Bare values with the conjugate and negative bits of a tensor."""
    new = new.conj() if tensor.is_conj() else new
    return torch._neg_view(new) if tensor.is_neg() else new


def view_like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a storage that is like a tensor's view of its own storage."""
    made = _viewed_as(tensor, storage, int(tensor.storage_offset()), tensor.stride())
    return _flipped(made, tensor)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the repetition of expanded dimensions."""
    if 0 not in tensor.stride():
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = [size if stride else min(size, 1) for size, stride in pairs]
    return tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())


def _flat(tensor: torch.Tensor, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
    """A range of a tensor's storage."""
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (count,), (1,))


def _viewed_as(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, strides: Sequence[int]
) -> torch.Tensor:
    """A storage viewed with the shape and dtype of a tensor."""
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, offset, tensor.shape, tuple(strides))


def _places(start: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The index in its storage of each element of a tensor."""
    places = torch.full((), start, dtype=torch.int64, device="cpu")
    for size, stride in zip(shape, strides, strict=True):
        places = places[..., None] + torch.arange(size, device="cpu") * stride
    return places


def _sharing(places: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indices of tensors, grouped by places that they share, directly or indirectly."""
    owners = [torch.full((each.numel(),), n, device="cpu") for n, each in enumerate(places)]
    flat, order = torch.sort(torch.cat([each.reshape(-1) for each in places]))
    owner = torch.cat(owners)[order]
    same = flat[1:] == flat[:-1]
    pairs = torch.unique(torch.stack((owner[:-1][same], owner[1:][same])), dim=1)
    groups = {index: [index] for index in range(len(places))}
    for one, two in pairs.t().tolist():
        if groups[one] is not groups[two]:
            groups[one] += groups[two]
            groups.update(dict.fromkeys(groups[two], groups[one]))
    return list({id(group): group for group in groups.values()}.values())
