"""Build the Python object that an opened checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import CorruptError
from ..graph.edit.narrow import leave
from ..graph.fill import fill
from ..pickles.nodes import Persistent
from ..torch_pickle.values.strided import contiguous_stride
from .checkpoint import Checkpoint
from .safetensors.file import TensorsCheckpoint

if TYPE_CHECKING:
    import torch

    from ..runtime.storages import Restoring


def object_in(
    found: Checkpoint,
    restoring: Restoring,
    *,
    select: Sequence[str] = (),
    weights: str | None = None,
    strict: bool = False,
) -> object:
    """The object that a checkpoint holds, of which nothing is executed.

    UntrustedError if `strict` and something would stay an `Opaque`; DeviceError if a device that
    it is tagged with, or mapped to, is not there.
    """
    from ..runtime.build import built
    from ..runtime.storages import Storages

    if isinstance(found, TensorsCheckpoint) and not (select or weights):
        tensors = _tensors_in(found, restoring)
        if tensors is not None:
            return tensors
    draft = found.draft(nested=bool(weights or select))
    leave(draft, weights=weights, select=select)
    fill(draft)
    storages = Storages(draft.sources, restoring)

    def storage_of(node: Persistent) -> torch.UntypedStorage:
        said = draft.graph.ids.get(id(node))
        if said is None:
            raise CorruptError("it refers to something outside that is no storage")
        return storages.storage(draft.stored[said.id])

    with restoring.rebuilding():
        loaded = built(draft.graph.root, storage_of, strict=strict)
    storages.check_read()
    found.check_unchanged()
    return loaded


def _tensors_in(found: TensorsCheckpoint, restoring: Restoring) -> dict[str, torch.Tensor] | None:
    """The tensors of a file that holds nothing else, right from its header; None if one is odd.

    Each is made as it would be from its node: what is refused there is left to it.
    """
    from ..runtime.rebuild import WHOLE, plain_tensor
    from ..runtime.storages import Storages

    plain = None if restoring.is_fake else found.plain()
    if plain is None or not all(each.dtype in WHOLE and all(each.shape) for _, _, each in plain):
        return None
    storages = Storages(found.sources, restoring)
    loaded: dict[str, torch.Tensor] = {}
    for name, stored, entry in plain:
        stride = contiguous_stride(entry.shape)
        storage = storages.storage(stored)
        tensor = plain_tensor(storage, entry.dtype, 0, entry.shape, stride, requires_grad=False)
        if tensor is None:
            return None
        loaded[name] = tensor
    found.check_unchanged()
    return loaded
