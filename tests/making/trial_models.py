"""Models to rehearse with, sound ones and ones with a fault in their code; saved mid-training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

PROJECT = Path(__file__).parents[2]
IMAGES = "float32[4,3,8,8]"
SEQUENCES = "float32[5,2,6]"


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.relu(self.bn(self.conv(images))).mean((2, 3))
        return self.finish(hidden)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """The step that subclasses break."""
        out: torch.Tensor = self.head(hidden)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(sequences)[0])
        return out


class Tied(nn.Module):
    """A language model whose input and output embeddings are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(words))
        return out


class Unregistered(Convolutions):
    """Keeps a tensor in an attribute that `Module.to` does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(5)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().finish(hidden) * self.scale  # unregistered


class OnTheHost(Convolutions):
    """Computes on the CPU, and copies the result back."""

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        there = hidden.cpu()
        there = torch.tanh(there)  # on the host
        return super().finish(there.to(hidden.device))


class MadeOnTheHost(Convolutions):
    """Makes a tensor on the CPU."""

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().finish(hidden) + torch.ones(5)  # made here


class AsksForValues(Convolutions):
    """Its control flow depends on values."""

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.sum() > 0:  # asked
            hidden = hidden * 2
        return super().finish(hidden)


class Knowing(Convolutions):
    """Chooses a device itself."""

    def __init__(self) -> None:
        super().__init__()
        self.where = "cuda" if torch.cuda.is_available() else "cpu"
        self.to(self.where)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        offset = torch.zeros(1, device=self.where) + torch.tensor([1.0]).to(self.where)
        return super().forward(images.to(self.where)) + offset


class Speaking(Convolutions):
    """Names its device in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [self.head.weight]  # moves with it

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.is_cuda
        assert hidden.device == torch.device("cuda:0")
        assert torch.cuda.device_count() == 1
        torch.cuda.synchronize()
        more = torch.zeros(8).pin_memory().cuda(non_blocking=True)
        more = more + torch.arange(8, device="cuda") + torch.tensor([1.0], device=hidden.device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out: torch.Tensor = checkpoint(super().finish, hidden + more, use_reentrant=False)
        return out.float() + self.parts[0].sum()


class OnAnother(Convolutions):
    """Uses a device other than its own."""

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().finish(hidden.to("cuda:1"))  # gone


class Failing(Convolutions):
    """Fails on any device."""

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().finish(hidden.T)  # wrong shape


class Infinite(Convolutions):
    """Divides by zero."""

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().finish(hidden) / 0


def inputs() -> dict[str, torch.Tensor]:
    return {"images": torch.randn(2, 3, 8, 8)}


def unbuildable() -> nn.Module:
    """A factory that fails."""
    raise ValueError("no such luck")


def no_model() -> str:
    """A factory of something that is no model."""
    return "a model"


HERE = f"{Path(__file__)}"


def named(model: Any) -> str:
    """The import path of something in this file."""
    return f"{HERE}:{model.__name__}"


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], torch.Tensor],
    steps: int = 2,
) -> dict[str, Any]:
    """A checkpoint from the middle of training."""
    for _ in range(steps):
        inputs = batch()

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            missed: torch.Tensor = model(inputs).square().mean()
            missed.backward()
            return missed

        optimizer.step(loss)  # type: ignore[arg-type] # what gives a float gives a tensor too
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": steps}


def images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8)


def sequences() -> torch.Tensor:
    return torch.randn(5, 2, 6)


def of_convolutions(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Convolutions()
    return trained(model, torch.optim.AdamW(model.parameters(), **options), images)


_MANY = """
import json, os, sys
from ckptmove.errors import CkptmoveError
from ckptmove.trial.run import Request, perform
from ckptmove.trial.stage_fake import SimulatedStage
telling = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for asked in json.load(sys.stdin):
    request = Request(**{**asked, "inputs": tuple(asked["inputs"])})
    found = perform(request, SimulatedStage(request.device))
    telling.write(json.dumps([each.to_json() for each in found.all_findings()]) + "\\n")
    telling.flush()
os._exit(0)
"""


def simulated(requests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The findings of many simulated trials, by name and check, from one process."""
    asked: Sequence[Mapping[str, Any]] = [
        {"device": "cuda:0", "inputs": [IMAGES], "step": "train", **each}
        for each in requests.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", _MANY],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return {
        name: {finding["check"]: finding for finding in json.loads(line)}
        for name, line in zip(requests, lines, strict=True)
    }
