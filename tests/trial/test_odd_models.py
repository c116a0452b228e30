"""Odd models get a verdict, never an internal error; one that ends its process fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove.trial.run import Request
from ckptmove.trial.stage_fake import simulate
from ckptmove.trial.trial import run_trial
from tests.making import trial_models
from tests.making.odd_models import DYING, INPUT, ODD, named, saved
from tests.servers.fronts import HANG

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("odd")
    return {name: str(saved(name, folder / f"{name}.pt")) for name in ODD}


@pytest.fixture(scope="module")
def simulated(files: dict[str, str]) -> dict[str, dict[str, dict[str, Any]]]:
    return trial_models.simulated(
        {
            name: {"path": path, "model": named(name), "inputs": [INPUT]}
            for name, path in files.items()
        }
    )


def _letters(*outcomes: str) -> str:
    return "".join({"passed": "P", "failed": "F", "skipped": "s"}[each] for each in outcomes)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_gets_a_verdict(
    name: str, files: dict[str, str], simulated: dict[str, dict[str, dict[str, Any]]]
) -> None:
    here = run_trial(files[name], model=named(name), inputs=[INPUT], step="train", device="cpu")
    there = simulated[name]
    got = _letters(here.of("model").outcome, here.of("step").outcome)
    played = _letters(there["model"]["outcome"], there["step"]["outcome"])
    assert f"{got} {played}" == ODD[name][1], (here, there)


@pytest.mark.parametrize("name", DYING)
def test_a_model_that_ends_its_process_fails(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path / "state.pt")
    _, check, how = DYING[name]
    found = _simulated(path, name)
    assert found[check].outcome == "failed"
    assert found[check].title == f"the program ended early: its process ended {how}"
    assert [each for each in found if found[each].outcome == "failed"] == [check]


def test_a_crash_of_the_simulation_is_not_the_model_s(tmp_path: Path) -> None:
    path = saved("exits_later", tmp_path / "state.pt")
    found = _simulated(path, "CRASHING")
    assert found["model"].outcome == "passed"
    assert found["step"].outcome == "skipped"
    told = "can't be simulated: its process ended (signal 11); on the CPU, it does not end"
    assert found["step"].title == told


def _simulated(path: Path, name: str) -> dict[str, Any]:
    request = Request(str(path), named(name), "cuda:0", (INPUT,), "forward")
    return {each.check: each for each in simulate(request, patience=60)}


class Silent(torch.nn.Linear):
    """Its output holds nothing to look at."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, *args: object) -> Any:
        return None


def test_a_forward_pass_without_tensors_fails(tmp_path: Path) -> None:
    torch.save(Silent().state_dict(), tmp_path / "state.pt")
    found = run_trial(
        str(tmp_path / "state.pt"),
        model=f"{__name__}:Silent",
        inputs=[INPUT],
        step="forward",
        device="cpu",
    ).of("step")
    assert found.outcome == "failed"
    assert found.title == "the output holds no tensor to look at: a NoneType"


WAITS = """
import sys, time, torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, batch):
        print("waits", file=sys.stderr, flush=True)
        time.sleep(100)
"""


def test_a_signal_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(WAITS)
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "state.pt")
    words = ["state.pt", "--model", "net.py:Net", "--input", "float32[4,3]", "--step", "forward"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptmove", "validate", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("waits" in line for line in process.stderr)
    process.terminate()
    shown, _ = process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGTERM
    assert "FAILED" not in shown
