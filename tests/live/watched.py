"""A small model that is watched, and what is asked of what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def line_of(text: str, file: str = __file__) -> str:
    """Where the one line of a file stands that ends so."""
    lines = Path(file).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(text)]
    return f"{Path(file).name}:{number}"


class Net(nn.Module):
    """Two layers, of which the second adds something that isn't registered."""

    def __init__(self, shift: torch.Tensor | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 2)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Their sum."""
        x = self.inner(x)  # inner
        if self.shift is not None:
            x = x + self.shift  # shifted
        out: torch.Tensor = self.outer(x)
        return out


def causes(found: Any) -> list[str]:
    """The causes of its verdicts."""
    return [each.cause for each in found.verdicts]
