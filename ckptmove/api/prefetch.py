"""prefetch: the batches of a loader, each on the device by the time it is asked for."""

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
    """A loader whose batches are on a device, as `to_device` brings them there.

    On an accelerator with streams, a GPU above all, the next batch is copied from pinned memory
    while the current one is used. For that the loader is one batch ahead, in what it tells of its
    progress too, and must no longer write into what of a batch isn't moved; it may into what is.
    Elsewhere, and while batches are on the device anyway, nothing is taken ahead.

    Its length and its attributes are the loader's; it can be iterated as often as that can. Nothing
    is taken before the first batch is asked for, and what is left of the loader's iteration is shut
    down, workers too, once its own ends: by a break, an exception or `close()`.

    Args:
        loader: a `DataLoader`, or any iterable of batches. Batches are best moved here, not by
            `collate_fn`: worker processes had better leave devices alone.
        device: where to, as torch takes it.
        keep: patterns on names of what stays where it is, as `to_device` takes them.

    Raises:
        DeviceError: there is no such device, or it can't be used here.
        UsageError: the loader gives no batches, a model say, or `keep` is no pattern.
    """
    from ..live.transfer.prefetch import Prefetched

    return Prefetched(loader, device, keep)
