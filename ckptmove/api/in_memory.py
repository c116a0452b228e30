"""The verbs for models and batches in memory: `report`, `move`, `to_device`, `prefetch`, `trace`.

torch is imported when one of them is called, so that their names are there without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import StrPath, UsageError
from ..manifest.device import Device
from ..reports.live import LiveManifest
from ..reports.move import MoveReport

if TYPE_CHECKING:
    import torch

    from ..live.tracing.trace import Watch
    from ..live.transfer.prefetch import PrefetchingLoader

Batch = TypeVar("Batch")


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


def move(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer
    | Iterable[torch.optim.Optimizer]
    | str
    | int
    | torch.device
    | None = None,
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
        optimizer: its optimizer, or several; or the device, as in `model.to("cuda:0")`.
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
    import torch

    from ..live.transfer.move import move as moved

    trained: Any = optimizer
    if to is None and isinstance(optimizer, (str, int, torch.device)):  # as of `model.to`
        to, trained = optimizer, None
    return moved(
        model,
        trained,
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


def to_device(
    obj: Batch,
    device: str | int | torch.device,
    *,
    non_blocking: bool = False,
    keep: str | Iterable[str] = (),
) -> Batch:
    """Return the same batch with its tensors on a device, however they are nested.

    These come back with the same type: dicts, lists, tuples, named tuples, sets and deques of any
    class, dataclasses, `UserDict`s such as `BatchEncoding`, `ModelOutput`s with their caches,
    packed sequences, and objects of classes written in Python. An object with its own `to(device)`
    method moves itself. Everything else stays the same object: keys of dicts, and objects that are
    not mere containers (iterators, data sets, open files, locks, objects that hold a model). The
    batch itself is never changed, and none of the code of its classes runs, except a `to` method.
    If nothing moves, the same object comes back.

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
    moved = _to_device()
    return moved(obj, device, non_blocking=non_blocking, keep=keep)  # type: ignore[no-any-return]


@functools.cache  # an import costs as much as a small batch
def _to_device() -> Callable[..., Any]:
    from ..live.transfer.to_device import to_device as moved

    return moved


def prefetch(
    loader: Iterable[Batch], device: str | int | torch.device, *, keep: str | Iterable[str] = ()
) -> PrefetchingLoader[Batch]:
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
    from ..live.transfer.prefetch import PrefetchingLoader

    return PrefetchingLoader(loader, device, keep)


def trace(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: object = None,
    every: int = 7,
) -> Watch:
    """Watch a model inside a `with` block: a step of training, or a whole loop.

        with ckptmove.trace(model) as t:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        print(t)

    Every operation is recorded by device, module and line of code. So are copies between devices,
    values that the host waits for, and tensors that are made on another device. No tensor is kept
    alive or changed. If the block raises, the exception passes through, and the findings are still
    there.

    A step that is watched takes a few times as long as usual. In a long loop, the first four steps
    are watched, then every seventh; the result says how many. In the other steps, only exceptions
    are recorded. A block without optimizer steps is watched as a whole.

    Args:
        model: the model.
        optimizer: its optimizer, or several. Other optimizers that take a step in the block are
            found too.
        device: where everything should be. Default: the best device of this machine.
        every: after the fourth step, watch the steps whose number is a multiple of this; 1 watches
            all.

    Returns:
        The watch, a context manager. After the block it has `verdicts` (what is wrong, each with
        its fix), `transfers`, `syncs`, `created`, and `diagnosis`, which holds all of these.

    Raises:
        UsageError: `model` is not a module, `optimizer` is not an optimizer, `every` is not a
            number of steps, or torch is not installed.
        DeviceError: the name of the device is not valid.
    """
    try:
        from ..live.tracing.trace import Watch
    except ImportError as error:
        raise UsageError("to watch a model takes torch", hint="pip install torch") from error
    return Watch(model, optimizer, device=device, every=every)
