"""Implements `ckptmove.to_device`: copy a batch to a device."""

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
    """Return the same batch with its tensors on a device, however they are nested.

    These come back as what they are: dicts, lists, tuples, named tuples, sets and deques of any
    class, dataclasses, `UserDict`s such as `BatchEncoding`, `ModelOutput`s with their caches,
    packed sequences, and objects of classes written in Python. An object with its own `to(device)`
    method moves itself. Everything else stays the same object: keys of dicts, and objects that are
    more than what they hold (iterators, data sets, open files, locks, objects that hold a model).
    The batch itself is never changed, and none of the code of its classes runs, except a `to`
    method. If nothing moves, the same object comes back.

    Shared objects stay shared, and tensors that overlap in memory overlap in the copy too, with the
    same strides; only the bytes that they show are copied. Leaf tensors stay leaves, without their
    gradients. A tensor with a history is moved on its own, differentiably.

    Args:
        obj: the batch.
        device: the device: `"cuda:0"`, 0 or a `torch.device`.
        non_blocking: do not wait for copies from pinned memory to an accelerator; do not write to
            the batch until they are done. Ignored for all other copies, because a copy to the CPU
            could be read too early.
        keep: globs on dotted names (`lengths`, `*.lengths`) of what stays where it is, with
            everything below it.

    Returns:
        The batch on the device.

    Raises:
        DeviceError: the device does not exist, or cannot be used on this machine.
        UsageError: the batch holds a model, a tensor on `meta` (which has no values), or an object
            that cannot move itself; or `keep` holds no valid glob.
    """
    from ..live.transfer.to_device import to_device as moved

    return moved(obj, device, non_blocking=non_blocking, keep=keep)  # type: ignore[no-any-return]
