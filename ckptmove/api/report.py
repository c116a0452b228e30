"""Implements `ckptmove.report`: list the tensors of a model in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..reports.live import LiveManifest

if TYPE_CHECKING:
    import torch


def report(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer
    | Iterable[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer]
    | None = None,
    scheduler: object = None,
    batch: object = None,
    **others: object,
) -> LiveManifest:
    """List every tensor of a model in memory: its device, dtype and size.

    This covers parameters, buffers, gradients, the state and hyper-parameters of optimizers, and
    tensors in plain attributes, containers and hooks. The result is what `inspect` gives for a
    file: the same verdict, totals, names and JSON. Nothing is copied, no value is read, and the
    result keeps no tensor alive.

    Args:
        model: the model.
        optimizer: its optimizer, or several.
        scheduler: its learning-rate scheduler.
        batch: a batch of inputs: tensors in any containers.
        **others: anything else that belongs to the model, by keyword: `ema=averages`,
            `scaler=scaler`, more optimizers.

    Returns:
        The manifest of the model, which `print` and notebooks show. Sizes are in bytes; each
        storage counts once.

    Raises:
        UsageError: `model` is not a module, `optimizer` is not an optimizer, or one of the others
            cannot hold anything on a device.
    """
    from ..live.inventory.holdings import holdings
    from ..live.inventory.manifest import report_of

    names = "optimizer", "scheduler", "batch"
    return report_of(holdings(model, optimizer, scheduler, batch, others, parameters=names), model)
