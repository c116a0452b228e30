"""to_device: a batch, on the device where the model is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Batch = TypeVar("Batch")


def to_device(
    obj: Batch,
    device: str | int | torch.device,
    *,
    non_blocking: bool = False,
    keep: str | Iterable[str] = (),
) -> Batch:
    """The same batch with its tensors on a device, however they are nested.

    Dicts, lists, tuples, named tuples, sets and deques of any class, dataclasses, `UserDict`s such
    as `BatchEncoding`, `ModelOutput`s with their caches, packed sequences and objects of any class
    that is made in Python come back as what they are; what has a `to` that takes a device moves
    itself; all else, keys of dicts too, stays the same object. So do objects that are more than
    what they hold: iterators, data sets, what is opened or locked, and objects with a model in
    them. The batch is never changed, none of the code of its classes runs but a `to`, and where
    nothing moves, the same object comes back.

    What was one object is one again, and tensors that show the same memory do so there, with the
    strides they had; no more memory is copied than they show. Leaves stay leaves, without their
    gradients; a tensor with a history is moved as torch does it, differentiably and by itself.

    Args:
        obj: the batch.
        device: where to, as torch takes it.
        non_blocking: not to wait for copies from pinned memory to an accelerator; the batch must
            not be written to until they are done. Ignored for all other copies, since a copy to the
            CPU could be read before it is there.
        keep: patterns on dotted names (`lengths`, `*.lengths`): what goes by such a name, and all
            below it, stays where it is, though it may have other names.

    Raises:
        DeviceError: there is no such device, or it can't be used here.
        UsageError: there is a model in it, a tensor on meta, which has no values, or what can't
            move itself; or `keep` is no pattern.
    """
    from ..live.transfer.to_device import to_device as moved

    return moved(obj, device, non_blocking=non_blocking, keep=keep)  # type: ignore[no-any-return]
