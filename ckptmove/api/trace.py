"""trace: watch a model while it takes a step, and say why it isn't where it should be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

    from ..live.tracing.trace import Watch


def trace(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: object = None,
) -> Watch:
    """Watch a model as long as the block lasts, best one step of training.

    with ckptmove.trace(model) as t:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    print(t)

    Every operation is recorded by device, module and line of code, and so are copies between
    devices, values that the host waits for, and tensors that are made elsewhere. No tensor is kept
    alive, and none is changed. A step takes a few times as long. If the block raises, so does this,
    and the verdicts are there nevertheless.

    Args:
        model: the model.
        optimizer: what trains it, or several; those that step meanwhile are found anyway.
        device: where everything should be; by default the best device that the machine has.

    Returns:
        What is found once the block has ended: `verdicts`, each with its fix, `transfers`, `syncs`,
        `created`, and all of it as `diagnosis`.

    Raises:
        UsageError: the model or the optimizer is none, or torch is not installed.
        DeviceError: it is no device.
    """
    try:
        from ..live.tracing.trace import Watch
    except ImportError as error:
        raise UsageError("to watch a model takes torch", hint="pip install torch") from error
    return Watch(model, optimizer, device=device)
