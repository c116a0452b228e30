"""Stand-ins for libraries of public scripts: data sets of random numbers, and no drawings."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch


class _Images(torch.utils.data.Dataset[Any]):
    """As `torchvision.datasets.MNIST`, of few random images."""

    def __init__(self, *args: Any, transform: Any = None, **kwargs: Any) -> None:
        self.size = next((e.size for e in getattr(transform, "all", ()) if e.size), 28)
        self.data = torch.randint(0, 256, (192, 28, 28), dtype=torch.uint8)
        self.targets = torch.arange(192) % 10

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(1, self.size, self.size), int(self.targets[index])


class _Transform:
    """Any of `torchvision.transforms`."""

    def __init__(self, given: Any = None, *args: Any, **kwargs: Any) -> None:
        self.size = given if isinstance(given, int) else 0
        self.all = given if isinstance(given, list) else ()


class _Pole:
    """As gymnasium's cart with a pole, which falls soon."""

    spec = types.SimpleNamespace(reward_threshold=475)

    def reset(self, **kwargs: Any) -> Any:
        self._left = 5
        return np.random.rand(4), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        return np.random.rand(4), 1.0, not self._left, False, {}


def _resnet18(**kwargs: Any) -> torch.nn.Module:
    """A network that ends with 512 features and a classifier, as the real one."""
    net = torch.nn.Sequential()
    net.conv1 = torch.nn.Conv2d(3, 64, 7)
    net.rest = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Conv2d(64, 512, 1))
    net.fc = torch.nn.Linear(512, 1000)
    return net


def install() -> None:
    """Have them imported."""
    vision: Any = MagicMock()
    vision.datasets.MNIST = _Images
    for name in ("Compose", "ToTensor", "Resize", "Normalize"):
        setattr(vision.transforms, name, _Transform)
    vision.models.resnet18 = _resnet18
    for name in ("datasets", "transforms", "utils", "models"):
        sys.modules[f"torchvision.{name}"] = getattr(vision, name)
    gym: Any = types.ModuleType("gymnasium")
    gym.make = lambda *args, **kwargs: _Pole()
    drawn: Any = MagicMock()
    sys.modules |= {"torchvision": vision, "gymnasium": gym, "matplotlib": drawn}
    sys.modules["matplotlib.pyplot"] = drawn.pyplot
