"""Build the Python object that an opened checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from ..errors import CorruptError
from ..graph.edit.narrow import leave
from ..graph.fill import fill
from ..graph.plain_tensors import is_plain, is_untouched
from ..pickles.nodes import Call, Node, Persistent, Tuple
from ..pickles.opcodes.plain_tensors import PlainTensor, compact_form
from ..torch_pickle.values.persistent_ids import is_size
from .checkpoint import Checkpoint
from .safetensors.file import TensorsCheckpoint
from .torch.zip import TorchZipContainer

if TYPE_CHECKING:
    import torch

    from ..runtime.storages import Restoring

_Plain: TypeAlias = "tuple[Node, int, tuple[int, ...], tuple[int, ...], bool]"

#: The only callable besides tensors that a pickle of plain tensors calls.
_ORDERED = "collections.OrderedDict"
_ARGUMENTS = 6  # of `_rebuild_tensor_v2`, without metadata


def object_in(
    found: Checkpoint,
    restoring: Restoring,
    *,
    select: Sequence[str] = (),
    weights: str | None = None,
    strict: bool = False,
) -> object:
    """Build the object that a checkpoint holds; nothing in the checkpoint is executed.

    UntrustedError if `strict` and something would stay an `Opaque`; DeviceError if a device that it
    is tagged with, or mapped to, is not available.
    """
    from ..runtime.build import build_object
    from ..runtime.mapped_tensors import Odd
    from ..runtime.storages import Storages

    if not (select or weights):
        with suppress(Odd):  # what was made before it was raised is freed
            plain = _plain_object(found, restoring)
            found.check_unchanged()
            return plain
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
        loaded = build_object(
            draft.graph.root, storage_of, strict=strict, before_values=storages.finish_copies
        )
    storages.finish_copies()
    storages.check_read()
    found.check_unchanged()
    return loaded


def _plain_object(found: Checkpoint, restoring: Restoring) -> object:
    """The object of a common checkpoint, built without a draft; Odd if the checkpoint is unusual.

    Common are a safetensors file, built from its header, in which each tensor has its own storage;
    and a file of torch.save whose pickle names only plain tensors and ordered dicts.
    """
    from ..runtime.build import build_object
    from ..runtime.mapped_tensors import MappedTensors, Odd

    mapped = MappedTensors(found.sources, restoring)
    if isinstance(found, TensorsCheckpoint):
        plain = found.plain()
        if plain is None:
            raise Odd
        made = {
            name: mapped.tensor(source, file.start, entry.start, entry.dtype, entry.shape)
            for name, (entry, file, source) in plain.items()
        }
        mapped.finish_copies()
        return made
    container = found.container
    if not isinstance(container, TorchZipContainer) or container.big_endian:
        raise Odd
    (stream,), ((path, root),) = container.streams, container.roots
    pickle, tensors = stream.pickle, dict[int, object]()
    if path or stream.nested or stream.unread or pickle.blobs:
        raise Odd
    for call in pickle.calls:
        if type(call) is not PlainTensor and call.qualname == _ORDERED:
            continue
        plainly = _plain_form(call)
        said = None if plainly is None else container.ids.get(id(plainly[0]))
        if plainly is None or said is None or said.dtype != container.storages[said.id].dtype:
            raise Odd
        tensors[id(call)] = mapped.view(container.storages[said.id], *plainly[1:])
    if len(tensors) != len(pickle.persistents):
        raise Odd  # something else refers to storages

    def storage_of(_: Persistent) -> torch.UntypedStorage:
        raise Odd

    loaded = build_object(root, storage_of, made=tensors)
    mapped.finish_copies()
    return loaded


def _plain_form(call: Call) -> _Plain | None:
    """The storage of a plain tensor; its offset, shape and stride; whether it requires a gradient.

    None for any other call. When there are many tensors, only the first have no compact form.
    """
    form = compact_form(call)
    if form is not None and isinstance(call, PlainTensor):
        return call.storage, form.offset, form.shape, form.stride, form.requires_grad
    items = call.args.items if isinstance(call.args, Tuple) else []
    if not is_plain(call) or len(items) != _ARGUMENTS or not is_untouched(call):
        return None
    storage, offset, shape, stride, grad = items[:5]
    if not (is_size(offset) and isinstance(shape, Tuple) and isinstance(stride, Tuple)):
        return None
    sizes, steps = tuple(shape.items), tuple(stride.items)
    usual = len(sizes) == len(steps) and all(map(is_size, (*sizes, *steps)))
    return (storage, offset, sizes, steps, grad) if usual and isinstance(grad, bool) else None  # type: ignore[return-value] # they are sizes
