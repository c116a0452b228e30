"""move: change the device of a living model, with everything that belongs to it."""

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
    """Change the device of a living model with everything that belongs to it, or of nothing.

    Parameters, buffers, gradients, the optimizer's state, and tensors that are mere attributes, in
    containers or in closures of hooks. Every tensor stays the object it is, so an optimizer stays
    attached and hooks stay; what shares bytes still does. What torch itself keeps on the CPU stays
    there and is reported. For as long as it takes, everything is on both devices.

    Results that are yet to be differentiated don't move: call `backward` before.

    Args:
        model: the model.
        optimizer: of its parameters; or several.
        scheduler: of the learning rate.
        batch: what the model is called with: tensors in whatever containers.
        to: the device for everything, as torch takes it: `"cuda:0"`, 0, a `torch.device`.
        place: glob on tensor names → device; of several that match, the last decides, before the
            device map. What belongs to a parameter goes with it in any case.
        device_map: module name → device, or a JSON file of it, in accelerate's form: the longest
            prefix wins, a number n means `cuda:n`. What it doesn't speak of goes to `to`.
        non_blocking: copy from pinned memory to an accelerator while the host goes on; the copies
            are waited for before anything changes.
        values: rewrite attributes of modules that name a device which all of the module left for
            one other: those that are a `torch.device`, and strings if they are called `device` or
            `_device`. Other strings may mean something else; they are reported.
        dry_run: decide everything, refuse what couldn't be moved, move nothing.
        others: whatever else: a model of averages, a gradient scaler. Their names in reports are
            their keywords.

    Raises:
        UsageError: the request makes no sense (`DeviceError`: a device is not there).
        RefusedError: it can't be moved (it has no values, is dispatched or distributed), there is
            no room, or the rules contradict each other. Then everything is as it was.
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
