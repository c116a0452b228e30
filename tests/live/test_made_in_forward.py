"""A layer that `forward` makes at each call is never trained: moving it would only hide that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckptmove

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

ANEW = "make the module once, in __init__: there model.to moves it, and it is trained"
MOVED = 'head.to("cuda:0"), as the model'
HEAD = "head = nn.Linear(8, 2)"
OWN = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)
    def forward(self, x):
        return self.linear(x)
"""
#: What a script has before its model, the lines of `forward`, the fix, and what made the layer.
LAYERS: dict[str, tuple[str, str, str, str]] = {
    "a variable": ("", f"{HEAD}; return head(h)", ANEW, HEAD),
    "no variable": ("", "return nn.Linear(8, 2)(h)", ANEW, "return nn.Linear"),
    "a function": (
        f"def make():\n    {HEAD}\n    return head",
        "head = make(); return head(h)",
        ANEW,
        HEAD,
    ),
    "a class": (OWN, "head = Head(); return head(h)", ANEW, "head = Head()"),
    "buffers": ("", "head = nn.BatchNorm1d(8, affine=False); return head(h)", ANEW, "head = nn.Ba"),
    "the script's": (HEAD, "return head(h)", MOVED, ""),
    "the script's, lazy": ("head = nn.LazyLinear(2)", "return head(h)", MOVED, ""),
    "the script's, of a class": (
        f"{OWN}head = Head()",
        "return head(h)",
        'self.to("cuda:0"), as',
        "",
    ),
}
SCRIPT = """
import torch
from torch import nn
{before}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
    def forward(self, x):
        h = self.body(x)
        {forward}
model = Net().to("cuda:0")
model({batch}).sum().backward()
"""


def fix_of(script: Path, before: str, forward: str, batch: str) -> tuple[str, str]:
    script.write_text(SCRIPT.format(before=before, forward=forward, batch=batch))
    (verdict,) = ckptmove.doctor(script=script, device="cuda:0", simulate=True).verdicts
    return verdict.title, verdict.fix


@pytest.mark.slow
@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_made_in_forward_is_made_once_and_another_is_moved(
    what: str, tmp_path: Path
) -> None:
    before, forward, fix, maker = LAYERS[what]
    script = tmp_path / "train.py"
    title, told = fix_of(script, before, forward, 'torch.ones(4, 4, device="cuda:0")')
    assert told.startswith(fix)
    lines = script.read_text().splitlines()
    made = [n for n, line in enumerate(lines, 1) if maker and line.strip().startswith(maker)]
    assert all(f"train.py:{n} makes" in title for n in made)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("data['x']", '; or the whole batch: data = ckptmove.to_device(data, "cuda:0")'),
        ("x", ""),
    ],
)
def test_a_whole_batch_has_the_name_that_the_script_has_for_it(
    name: str, whole: str, tmp_path: Path
) -> None:
    before = "x = torch.ones(4, 4)\ndata = {'x': torch.ones(4, 4)}"
    script = tmp_path / "train.py"
    _, told = fix_of(script, before, "return h", name)
    made = script.read_text().splitlines().index("x = torch.ones(4, 4)") + 1
    bring = f'{name} = {name}.to("cuda:0")'
    if whole:
        assert told == f"{bring} before it is used{whole}"
    else:
        assert told.startswith(f"{bring} after ")
        assert told.endswith(f"train.py:{made}")
