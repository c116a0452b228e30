"""What people ask of devices, each answered by one command on their own short program."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch

import ckptmove
from tests.conftest import RunHere

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
pytestmark = [pytest.mark.usefixtures("warm"), without_gpu]

WHICH_DEVICE = """
    import torch
    from torch import nn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).to(device)
    decoder = nn.Linear(8, 2)

    class Lazy:
        __class__ = property(lambda self: 1 / 0)  # isinstance() asks for it

    settings = Lazy()
    print(next(encoder.parameters()).device)
"""
MOVING = """
    import torch
    from torch import nn

    device = torch.device("cuda")
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        inputs, labels = torch.randn(8, 4), torch.randint(0, 2, (8,))
        inputs.to(device)
        loss = nn.functional.cross_entropy(model(inputs), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
STATE = """
    import torch
    from torch import nn

    model = nn.Linear(4, 2).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        state["exp_avg"] = state["exp_avg"].to("cuda")
"""
CUSTOM = """
    import torch
    from torch import nn

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.scale = torch.ones(2)

        def forward(self, x):
            return self.linear(x) * self.scale

    model = torch.compile(Scaled()).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(8, 4, device="cuda")).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
ON_THE_CPU = """
    import torch
    from torch import nn

    device = torch.device("cpu" if torch.cuda.is_available() else "cuda")
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(8, 4, device=device)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
#: By question: the program, the exit code, and what the answer says.
QUESTIONS: dict[str, tuple[str, int, list[str]]] = {
    "which device is a model on": (
        WHICH_DEVICE,
        1,
        [
            "the script ended before it called a model",
            "encoder (Sequential) is on cuda:0; it was never called",
            "decoder (Linear) is on cpu; it was never called",
        ],
    ),
    "how are models and batches moved": (MOVING, 1, ["asked.py:10", "inputs = inputs.to("]),
    "why has the optimizer no state to move": (
        STATE,
        1,
        [
            "KeyError: 'exp_avg' (at asked.py:9)",
            "optimizer (Adam) has no state: torch makes it at the first step",
        ],
    ),
    "why does a module leave a tensor behind": (
        CUSTOM,
        1,
        [
            "scale is not registered, so model.to leaves it",
            'self.register_buffer("scale", …, persistent=False)',
        ],
    ),
    "why does it train on the CPU": (ON_THE_CPU, 1, ["asked.py:5", "is on cpu"]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_by_one_command(
    question: str, tmp_path: Path, run_here: RunHere
) -> None:
    text, code, lines = QUESTIONS[question]
    path = tmp_path / "asked.py"
    path.write_text(textwrap.dedent(text))
    done = run_here("doctor", "--script", path, "--device", "cuda:0", "--simulate", exit=code)
    for line in lines:
        assert line in done.stdout
    assert "_orig_mod" not in done.stdout
    assert "privateuseone" not in done.stdout


NAMES_ITS_DEVICE = """
    import torch
    from torch import nn

    class Placed(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.device = device
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x.to(self.device))

    model = Placed(torch.device(0)).to(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.randn(8, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_the_report_names_the_device_that_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "asked.py"
    path.write_text(textwrap.dedent(NAMES_ITS_DEVICE))
    found = ckptmove.doctor(script=path, device="cuda:0", simulate=True)
    assert found.verdicts == ()
    told = json.dumps(found.to_json())
    assert '"value": "cuda:0"' in told
    assert "privateuseone" not in told
