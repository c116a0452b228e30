"""Measure what `ckptmove.trace` costs: CPU seconds of traced training steps, and of plain ones.

The empty mode shows what torch takes to call Python for each operation, before it records anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckptmove

_STEPS = 100
_WARM = 5


class _Empty(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return func(*args, **(kwargs or {}))


def _models() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    yield "3 linear layers", nn.Sequential(*layers), torch.randn(32, 32)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    yield "2 transformer layers", encoder, torch.randn(8, 16, 64)
    convolutions = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3))
    yield "2 convolutions", nn.Sequential(*convolutions), torch.randn(16, 3, 16, 16)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, n: int) -> None:
    for _ in range(n):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def traces(rounds: int) -> None:
    """Train small models for 100 steps, plain and traced in turn, and print the ratios."""
    torch.set_num_threads(1)
    print("\nTrace 100 steps: CPU seconds, as ratios to those of plain steps\n")
    print("| | plain step | empty mode | every=1 | as it is |\n|---|---|---|---|---|")
    for name, model, x in _models():
        optimizer = torch.optim.AdamW(model.parameters())
        _steps(model, optimizer, x, _WARM)

        def seconds(around: Callable[[], AbstractContextManager[Any]]) -> float:
            started = time.process_time()
            with around():
                _steps(model, optimizer, x, _STEPS)  # noqa: B023 - called at once
            return time.process_time() - started

        ways: list[Callable[[], AbstractContextManager[Any]]] = [
            _Empty,
            lambda: ckptmove.trace(model, optimizer, device="cpu", every=1),  # noqa: B023
            lambda: ckptmove.trace(model, optimizer, device="cpu"),  # noqa: B023
        ]
        plain: list[float] = []
        ratios: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            for way, found in zip(ways, ratios, strict=True):
                plain.append(seconds(nullcontext))
                found.append(seconds(way) / plain[-1])
        shown = [f"{statistics.median(e):.2f} ({min(e):.2f}-{max(e):.2f})" for e in ratios]
        print(
            f"| {name} | {statistics.median(plain) / _STEPS * 1e3:.2f} ms | {' | '.join(shown)} |"
        )
