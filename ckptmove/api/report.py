"""report: where a living model is, and all that belongs to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..reports.manifests import LiveManifest

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
    """List every tensor that a model in memory holds: on which device, of what dtype, how large.

    Parameters, buffers, gradients, an optimizer's state and hyper-parameters, and tensors that hide
    as plain attributes, in containers and in hooks. It is what `inspect` gives for a file: the same
    verdict, totals, names of a state dict, JSON. `print` it, or let a notebook show it. Nothing is
    copied, no value is read, and the report keeps no tensor alive.

    Args:
        model: the model.
        optimizer: of its parameters; or several.
        scheduler: of the learning rate.
        batch: what the model is called with: tensors in whatever containers.
        **others: whatever else belongs to it, by name: `ema=averages`, `scaler=scaler`;
            optimizers too.

    Returns:
        Its manifest. Sizes are bytes; each storage counts once.

    Raises:
        UsageError: the model is no module, the optimizer none, or one of the others holds nothing
            that could be on a device.
    """
    from ..live.inventory.holdings import holdings
    from ..live.inventory.manifest import report_of

    names = "optimizer", "scheduler", "batch"
    return report_of(holdings(model, optimizer, scheduler, batch, others, parameters=names), model)
