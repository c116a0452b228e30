"""Describe plain tensors in compact form, of which there may be very many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import intern
from typing import Any

from ...errors import CorruptError
from ...pickles.nodes import Node
from ...pickles.opcodes.plain_tensors import Form, StorageReference, compact_form
from .persistent_ids import StorageId
from .strided import Tensor, reach_of, size_of


class PlainTensors:
    """What plain tensors have in common, which is found once for all that are alike."""

    def __init__(self, ids: Mapping[int, StorageId]) -> None:
        """`ids`: `id()` of a node → the storage that it stands for."""
        self.ids = ids
        # By form and dtype: the size of the elements, and the least size of the storage.
        self._sizes: dict[tuple[int, str], tuple[int, int, Form]] = {}
        self._devices: dict[str, str] = {}
        # The common fields of plain tensors, by all that they follow from.
        self._kinds: dict[tuple[int, str, str, int, int], tuple[Any, ...]] = {}

    def check_reach(self, form: Form, storage: StorageId, dtype: str) -> int:
        """The size of its elements in bytes; CorruptError if they reach outside their storage."""
        known = self._sizes.get((id(form), dtype))
        if known is None:
            reach = reach_of(form.shape, form.stride, form.offset, dtype)
            sizes = size_of(form.shape, dtype), reach
            known = self._sizes[id(form), dtype] = *sizes, form  # keeps the form and its id alive
        if known[1] > storage.nbytes:
            raise CorruptError(f"a tensor reaches outside its storage {storage.id!r}")
        return known[0]

    def plain_row(self, nodes: Iterable[Node]) -> list[tuple[Any, ...]] | None:
        """Describe plain tensors: the fields of a `TensorEntry` from `kind` to `requires_grad`.

        None if one of the nodes must be asked of `tensor`, which may refuse it.
        """
        found, ids, kinds = list[tuple[Any, ...]](), self.ids, self._kinds
        for node in nodes:
            form = compact_form(node)
            storage = None if form is None else ids.get(id(node.storage))  # type: ignore[union-attr] # it is compact
            if form is None or storage is None:
                return None
            name, _, use, dtype, _, nbytes, view_at = storage
            if type(use) is not StorageReference or dtype is None:
                return None
            alike = id(form), use.tag, dtype, nbytes, view_at
            kind = kinds.get(alike)
            if kind is None:
                try:
                    tensor = self.plain(form, storage, dtype)
                except CorruptError:
                    return None
                dtype, shape, device, size, what, layout, stride, at, *_ = tensor
                kind = kinds[alike] = what, layout, dtype, shape, stride, at, device, size
            found.append((*kind, name, form.requires_grad))
        return found

    def plain(self, form: Form, storage: StorageId, dtype: str) -> Tensor:
        """Like `tensor_at`, for a plain tensor."""
        _, offset, shape, stride, requires_grad = form
        nbytes, place = self.check_reach(form, storage, dtype), storage.tag
        device = self._devices.get(place) or self._devices.setdefault(place, intern(str(place)))
        at = offset + storage.view_at
        said = dtype, shape, device, nbytes, "tensor", "strided", stride, at, storage.id
        # the constructor would take twice as long, and there may be very many
        return tuple.__new__(Tensor, (*said, requires_grad, (), (), False))
