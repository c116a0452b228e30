"""Build the Python object that an opened checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import CorruptError
from ..graph.edit.narrow import leave
from ..graph.fill import fill
from ..pickles.nodes import Persistent
from .checkpoint import Checkpoint

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
    found.check_unchanged()
    return loaded
