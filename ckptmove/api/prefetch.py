"""Implements `ckptmove.prefetch`: copy the next batch to a device while one is in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

    from ..live.transfer.prefetch import Prefetched

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch], device: str | int | torch.device, *, keep: str | Iterable[str] = ()
) -> Prefetched[Batch]:
    """Return a loader that copies the next batch to a device while the current one is in use.

    Batches are copied as `to_device` does. The copies overlap on accelerators with streams, such as
    GPUs, and come from pinned memory. There, the loader is one batch ahead, also in any progress
    that it reports. It must not reuse the memory of batches that are moved. On other devices, and
    while batches are on the device anyway, nothing is fetched ahead.

    The length and attributes are those of the loader, and it can be iterated as often. Nothing is
    fetched before the first batch is asked for. When the iteration ends (by a break, an exception
    or `close()`), the loader's own iteration is closed too, with its workers.

    Args:
        loader: a `DataLoader`, or any iterable of batches. Do not move batches in `collate_fn`:
            worker processes should not use devices.
        device: the device for the batches: `"cuda:0"`, 0 or a `torch.device`.
        keep: globs on names of tensors that stay where they are, as for `to_device`.

    Returns:
        An iterable of batches on the device.

    Raises:
        DeviceError: the device does not exist, or cannot be used on this machine.
        UsageError: `loader` gives no batches (it is a model, for example), or `keep` holds no valid
            glob.
    """
    from ..live.transfer.prefetch import Prefetched

    return Prefetched(loader, device, keep)
