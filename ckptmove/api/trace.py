"""Implements `ckptmove.trace`: watch a model for a step and find what runs on the wrong device."""

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
    """Watch a model inside a `with` block, best for one step of training.

        with ckptmove.trace(model) as t:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        print(t)

    Every operation is recorded by device, module and line of code. So are copies between devices,
    values that the host waits for, and tensors that are made on another device. No tensor is kept
    alive or changed. A step takes a few times as long as usual. If the block raises, the exception
    passes through, and the findings are still there.

    Args:
        model: the model.
        optimizer: its optimizer, or several. Other optimizers that take a step in the block are
            found too.
        device: where everything should be. Default: the best device of this machine.

    Returns:
        The watch, a context manager. After the block it has `verdicts` (what is wrong, each with
        its fix), `transfers`, `syncs`, `created`, and `diagnosis`, which holds all of these.

    Raises:
        UsageError: `model` is not a module, `optimizer` is not an optimizer, or torch is not
            installed.
        DeviceError: the name of the device is not valid.
    """
    try:
        from ..live.tracing.trace import Watch
    except ImportError as error:
        raise UsageError("to watch a model takes torch", hint="pip install torch") from error
    return Watch(model, optimizer, device=device)
