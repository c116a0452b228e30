"""What is on the CPU beside a model is named as what it is: averages are no batch."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import indent

import pytest

import ckptmove

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

HEAD = """
import copy, sys, torch
from torch import nn
device = torch.device("cuda:0" if sys.argv[1:] else "cpu")
model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
"""
#: What is made before the model is moved, what runs after each step, and what is said of it.
ASIDE: dict[str, tuple[str, str, str, str]] = {
    "a copy": (
        "ema = copy.deepcopy(model)",
        "for a, b in zip(ema.parameters(), model.parameters()):\n    a.mul_(0.9).add_(b)",
        "ema was never moved: its 0.weight is on cpu",
        'ema.to("cuda:0"), as the model',
    ),
    "an object's copy": (
        "class EMA:\n"
        "    def __init__(self):\n"
        "        self.shadow = copy.deepcopy(model)\n"
        "    def update(self):\n"
        "        states = self.shadow.state_dict(), model.state_dict()\n"
        "        for s, p in zip(*(each.values() for each in states)):\n"
        "            s.copy_(0.9 * s + 0.1 * p)\n"
        "ema = EMA()",
        "ema.update()",
        "self.shadow was never moved: its 0.weight is on cpu",
        'self.shadow.to("cuda:0"), as the model',
    ),
    "tensors": (
        "shadow = {name: each.detach().clone() for name, each in model.named_parameters()}",
        "for name, each in model.named_parameters():\n    shadow[name].mul_(0.9).add_(each)",
        "makes shadow['0.weight'] on cpu",
        "make that copy after the model is moved to cuda:0, or bring it there once",
    ),
    "a tuple": (
        "batch = torch.ones(8, 4), torch.ones(8, 2)",
        "batch[1].sub_(model(batch[0]))",
        "the batch is on cpu: batch[0]",
        'batch = ckptmove.to_device(batch, "cuda:0") after',
    ),
}
LOOP = """
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(8, 4, device=device)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ASIDE)
def test_what_is_beside_a_model_is_named_as_what_it_is(what: str, tmp_path: Path) -> None:
    before, after, title, fix = ASIDE[what]
    script = tmp_path / "train.py"
    script.write_text(f"{HEAD}{before}{LOOP}{indent(after, ' ' * 8)}\n")
    found = ckptmove.doctor(script=script, args=["gpu"], device="cuda:0", simulate=True)
    (verdict,) = found.verdicts
    assert title in verdict.title
    assert verdict.fix.startswith(fix)


@pytest.mark.slow
def test_averages_that_are_with_the_model_are_right(tmp_path: Path) -> None:
    before, after, *_ = ASIDE["a copy"]
    script = tmp_path / "train.py"
    script.write_text(f"{HEAD}model.to(device)\n{before}{LOOP}{indent(after, ' ' * 8)}\n")
    found = ckptmove.doctor(script=script, args=["gpu"], device="cuda:0", simulate=True)
    assert found.verdicts == ()


#: Right programs that keep a part on the CPU on purpose: the part, and what is said of it.
INTENDED = {
    "a table": (
        "class Hybrid(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table, self.tower = nn.Embedding(9, 4), nn.Linear(4, 1).to(device)\n"
        "    def forward(self, x):\n"
        "        return self.tower(self.table(x.cpu().long()).to(device))\n"
        "model = Hybrid()\n"
        "model.to = lambda device: model",
        "pass",
        ["or leave it, if what it gives is moved at"],
    ),
    "a model that acts": (
        "actor = copy.deepcopy(model).cpu()",
        "actor(torch.ones(8, 4))",
        ["or leave it there, if actor = copy.deepcopy(model).cpu() at"],
    ),
    "losses": (
        "class Terms(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        terms = torch.zeros(2)\n"
        "        terms[0] = super().forward(x).mean()\n"
        "        return terms\n"
        "model = Terms(*model)",
        "pass",
        [],
    ),
    "a model that is taken back": ("pass", "if _: model.cpu(), nn.Flatten()(torch.ones(2, 2))", []),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", INTENDED)
def test_what_is_there_on_purpose_is_said_to_be_so_perhaps(what: str, tmp_path: Path) -> None:
    before, after, said = INTENDED[what]
    script = tmp_path / "train.py"
    script.write_text(f"{HEAD}{before}{LOOP}{indent(after, ' ' * 8)}\n")
    found = ckptmove.doctor(script=script, args=["gpu"], device="cuda:0", simulate=True)
    assert found.ok
    fixes = [each.fix for each in found.verdicts if each.cause != "host-waits"]
    assert len(fixes) == len(said)
    for fix, text in zip(fixes, said, strict=True):
        assert text in fix
