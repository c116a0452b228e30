"""Implements `ckptmove.move`: move a model in memory to another device, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..errors import StrPath
from ..placement.rules import Device
from ..reports.move import MoveReport

if TYPE_CHECKING:
    import torch


def move(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scheduler: object = None,
    batch: object = None,
    *,
    to: Device | None = None,
    place: Mapping[str, Device] | None = None,
    device_map: Mapping[str, Device] | StrPath | None = None,
    non_blocking: bool = False,
    values: bool = True,
    dry_run: bool = False,
    **others: object,
) -> MoveReport:
    """Move a model in memory to another device, with everything that belongs to it, or nothing.

    This covers parameters, buffers, gradients, optimizer state, and tensors in plain attributes,
    containers and closures of hooks. Every tensor stays the same Python object, so optimizers and
    hooks stay attached; tensors that share bytes still do. What torch itself keeps on the CPU stays
    there and is reported. During the move, everything is on both devices.

    Tensors with a pending backward pass do not move: call `backward` first.

    Args:
        model: the model.
        optimizer: its optimizer, or several.
        scheduler: its learning-rate scheduler.
        batch: a batch to move with it: tensors in any containers.
        to: put every tensor on this device: `"cuda:0"`, 0 or a `torch.device`.
        place: from a glob on tensor names to a device; if several match, the last one wins. It has
            priority over `device_map`. Gradients and optimizer state follow their parameter in any
            case.
        device_map: from a module name to a device, or a JSON file of that, as accelerate writes it.
            The longest matching name wins; a number n means `cuda:n`. Other modules go to `to`.
        non_blocking: copy from pinned memory to an accelerator while the host continues; the copies
            are waited for before anything changes.
        values: also rewrite attributes of modules that name a device, if all of the module moved
            from it to one other device: those of type `torch.device`, and strings in attributes
            named `device` or `_device`. Other strings are reported, not rewritten.
        dry_run: decide everything and refuse what cannot be moved, but move nothing.
        others: anything else that belongs to the model, by keyword: averaged weights, a gradient
            scaler. The report uses the keywords as names.

    Returns:
        What moved, what stayed, and why.

    Raises:
        UsageError: the request makes no sense (`DeviceError`: this machine does not have the
            device).
        RefusedError: the model cannot be moved (it has no values, is dispatched or distributed),
            there is not enough memory, or the rules contradict each other. Then nothing has
            changed.
    """
    from ..live.transfer.move import move as moved

    return moved(
        model,
        optimizer,
        scheduler,
        batch,
        others,
        to=to,
        place=place,
        device_map=device_map,
        non_blocking=non_blocking,
        values=values,
        dry_run=dry_run,
    )
