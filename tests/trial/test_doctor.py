"""`ckptmove doctor`: a model or a script looked at, on a device that is there or played."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove import CheckFailed, DeviceError, Diagnosis, UsageError
from tests.conftest import ROOT, RunCli, RunHere

pytestmark = pytest.mark.usefixtures("warm")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")

NET = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.shift = torch.ones(4)

        def forward(self, x):
            return self.inner(x) + self.shift

    class Right(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x):
            return self.inner(x) + self.shift

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x) @ self.inner(x)
"""
TRAINING = """
    import sys
    import torch
    from torch import nn

    device = torch.device(sys.argv[1])
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        loss = model(torch.ones(3, 4, device=device)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("all steps were taken")
"""


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def net(tmp_path: Path) -> str:
    return os.fspath(write(tmp_path / "net.py", NET))


@pytest.fixture
def training(tmp_path: Path) -> Path:
    return write(tmp_path / "train.py", TRAINING)


def causes(found: Diagnosis) -> list[str]:
    return [each.cause for each in found.verdicts]


def script(tmp_path: Path, text: str, *args: str, **options: Any) -> Diagnosis:
    path = write(tmp_path / "script.py", text)
    return ckptmove.doctor(script=path, args=args, **{"device": "cpu", **options})


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.slow
@without_gpu
def test_a_model_is_moved_and_stepped_on_a_played_device(net: str, run_here: RunHere) -> None:
    options = ("--input", "float32[2,4]", "--device", "cuda:0", "--simulate")
    done = run_here("doctor", "--model", f"{net}:Net", *options, exit=1)
    assert done.stdout.splitlines()[0] == "Net on simulated cuda:0: 1 wrong"
    assert "wrong  shift is not registered, so model.to leaves it" in done.stdout
    assert 'fix    at net.py:9: self.register_buffer("shift", …, persistent=False)' in done.stdout
    assert "net.py:12" in done.stdout
    assert "something is wrong" in done.stderr
    done = run_here("doctor", "--model", f"{net}:Right", *options, exit=0)
    assert "on simulated cuda:0: no device fault in the first training step" in done.stdout
    assert "ran: 1 call, 1 step; operations: " in done.stdout
    assert done.stderr == ""


def test_a_model_is_stepped_where_it_is(net: str) -> None:
    found = ckptmove.doctor(model=f"{net}:Net", input="float32[2,4]", device="cpu")
    assert (found.verdicts, found.simulated) == ((), False)
    assert found.trace is not None
    assert (found.trace.calls, found.trace.steps) == (1, 1)
    assert found.report is not None


def test_a_model_without_an_input_is_looked_at_and_not_stepped(net: str) -> None:
    found = ckptmove.doctor(model=f"{net}:Right", device="cpu")
    assert found.trace is None
    assert found.verdicts == ()
    assert "describe the input" in found.notes[0]


def test_a_model_that_fails_by_itself_is_told(net: str) -> None:
    found = ckptmove.doctor(model=f"{net}:Broken", input="float32[2,4]", device="cpu")
    assert causes(found) == ["step-failed"]
    assert "net.py:29" in found.verdicts[0].evidence[0]
    with pytest.raises(CheckFailed, match="nothing to do with devices"):
        found.raise_if_wrong()


def test_an_optimizer_is_taken_by_name(net: str) -> None:
    found = ckptmove.doctor(
        model=f"{net}:Right", input="float32[2,4]", optimizer="torch.optim:SGD", device="cpu"
    )
    assert found.trace is not None
    assert found.trace.steps == 1


# -- scripts ---------------------------------------------------------------------------------------


@without_gpu
def test_a_script_is_run_for_some_steps_on_a_played_device(training: Path) -> None:
    found = ckptmove.doctor(
        script=training, args=["cuda:0"], steps=3, device="cuda:0", simulate=True
    )
    assert found.verdicts == ()
    assert found.notes == ()
    assert found.simulated
    assert found.trace is not None
    assert found.trace.steps == 3
    assert set(found.trace.operations) == {"cuda:0"}


@pytest.mark.slow
def test_json_is_the_diagnosis_and_what_a_script_says_goes_to_stderr(
    training: Path, run_here: RunHere
) -> None:
    write(training, "print('hello')\nimport os\nos.system('echo aloud')\n" + training.read_text())
    arguments = ("doctor", "--script", training, "--device", "cpu")
    done = run_here(*arguments, "-q", "--", "cpu", exit=0)
    assert (done.stdout, done.stderr) == ("", "")
    done = run_here(*arguments, "--json", "--", "cpu", exit=0)
    assert "hello" in done.stderr
    assert "aloud" in done.stderr
    told = json.loads(done.stdout)
    assert told["trace"]["steps"] == 2
    keys = "schema subject device simulated ok complete not_simulated unplayed verdicts facts "
    keys += "report placed trace not_run"
    assert list(told) == [*keys.split(), "notes"]
    assert told["schema"] == 1
    assert told["subject"] == os.fspath(training)
    assert told["ok"] is True
    assert told["facts"]["torch"] == torch.__version__
    assert Diagnosis.from_json(told).to_json() == told


@pytest.mark.slow
def test_arguments_after_dashes_are_the_scripts(tmp_path: Path, run_cli: RunCli) -> None:
    path = write(tmp_path / "argued.py", "import sys\nraise SystemExit(repr(sys.argv[1:]))\n")
    done = run_cli(
        *("doctor", "--script", path, "--device", "cpu", "--", "--epochs", "3", "-q"), exit=1
    )
    assert "the script exited before it took a step: ['--epochs', '3', '-q']" in done.stdout


ENDS = {
    "a = (": ("script-failed", "SyntaxError"),
    "import nowhere_to_be_found": ("script-failed", "ModuleNotFoundError"),
    "raise SystemExit(3)": ("script-failed", "before it took a step: 3"),
    "import os; os._exit(7)": ("run-ended", "exit 7"),
    "import os; os._exit(0)": ("run-ended", "before anything was watched"),
    "import os; os.kill(os.getpid(), 9)": ("run-ended", "signal 9"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ENDS)
def test_a_script_that_ends_early_is_told(text: str, tmp_path: Path) -> None:
    found = script(tmp_path, text)
    cause, said = ENDS[text]
    assert causes(found) == [cause]
    assert said in found.verdicts[0].title


NOTED = {
    "": "the script ended before it called a model",
    "raise SystemExit(0)": "the script ended before it called a model",
    "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))": (
        "the script called its model once, and no optimizer took a step"
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", NOTED)
def test_a_script_that_does_little_is_noted(text: str, tmp_path: Path) -> None:
    found = script(tmp_path, text)
    assert (found.verdicts, found.notes) == ((), (NOTED[text],))


@pytest.mark.slow
def test_a_script_finds_its_neighbours_its_stdin_and_its_name(tmp_path: Path) -> None:
    write(tmp_path / "beside_it.py", "VALUE = 1\n")
    found = script(
        tmp_path,
        """
        import sys
        from beside_it import VALUE
        assert __name__ == "__main__" and __file__.endswith("script.py")
        assert sys.stdin.read() == ""
        """,
    )
    assert found.verdicts == ()


VALUES = """
    import sys, torch
    model = torch.nn.Linear(4, 2).to(sys.argv[1])
    here = torch.nn.Linear(4, 2)
    here.load_state_dict(model.state_dict())
    x = torch.ones(1, 4)
    assert torch.equal(here(x), model(x.to(sys.argv[1])).cpu())
    print({0: "cat", 1: "dog"}[int(model(x.to(sys.argv[1])).argmax())])
    raise KeyError("made for this")
"""


@without_gpu
def test_values_on_a_simulated_device_are_real(tmp_path: Path) -> None:
    found = script(tmp_path, VALUES, "cuda:0", device="cuda:0", simulate=True)
    (verdict,) = found.verdicts
    assert "KeyError: 'made for this'" in verdict.evidence[0]


@pytest.mark.slow
@without_gpu
def test_what_fails_for_another_reason_is_told(tmp_path: Path) -> None:
    text = """
        import sys, torch
        model = torch.nn.Linear(4, 2).to(sys.argv[1])
        model(torch.ones(1, 5).to(sys.argv[1]))
    """
    found = script(tmp_path, text, "cuda:0", device="cuda:0", simulate=True)
    assert causes(found) == ["step-failed"]
    assert found.notes == ()


CAUGHT = """
    import sys, torch
    model = torch.nn.Linear(4, 2).to(sys.argv[1])
    for _ in range(3):
        batch = torch.ones(3, 4)
        try:
            model(batch)
        except Exception as error:
            print("skipped:", error)
"""


@pytest.mark.slow
@without_gpu
def test_an_exception_that_the_script_catches_is_found(tmp_path: Path) -> None:
    found = script(tmp_path, CAUGHT, "cuda:0", device="cuda:0", simulate=True)
    assert causes(found) == ["batch-never-moved"]
    assert "the script caught the exception: RuntimeError" in found.notes[0]


KEEPS_ON = """
    import sys, torch
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        try:
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        except:
            pass
"""


@pytest.mark.slow
def test_a_script_that_nothing_stops_is_stopped(tmp_path: Path) -> None:
    found = script(tmp_path, KEEPS_ON)
    assert found.trace is not None
    assert found.trace.steps == 2


SAVES = """
    import sys, torch
    model = torch.nn.Linear(4, 2).to(sys.argv[1])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.ones(3, 4).to(sys.argv[1])).sum().backward()
        optimizer.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, sys.argv[2])
        saved = torch.load(sys.argv[2], map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
"""


@pytest.mark.slow
@without_gpu
def test_what_a_script_saves_is_as_saved_on_the_device(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    found = script(tmp_path, SAVES, "cuda:0", os.fspath(path), device="cuda:0", simulate=True)
    assert (found.verdicts, found.notes) == ((), ())
    assert ckptmove.inspect(path).devices.keys() == {"cuda:0", "cpu"}  # of Adam's steps
    assert torch.load(path, map_location="cpu")["model"]["weight"].isfinite().all()


@pytest.mark.slow
@without_gpu
def test_what_cant_be_played_is_a_note(tmp_path: Path) -> None:
    found = script(
        tmp_path,
        """
        import torch
        torch.cuda.CUDAGraph()
        """,
        device="cuda:0",
        simulate=True,
    )
    assert found.verdicts == ()
    assert found.notes[0].startswith("the simulation can't continue: ")


WORKERS = """
    import sys, torch
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, n):
            return torch.full((4,), float(n))

    if __name__ == "__main__":
        device = sys.argv[1]
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(Data(), batch_size=4, num_workers=2, pin_memory=True):
            model(x.to(device, non_blocking=True)).sum().backward()
            optimizer.step()
"""


@pytest.mark.slow
@without_gpu
@pytest.mark.skipif(sys.platform != "linux", reason="needs workers that fork")
def test_a_data_loader_may_have_workers(tmp_path: Path) -> None:
    found = script(tmp_path, WORKERS, "cuda:0", device="cuda:0", simulate=True)
    assert (found.verdicts, found.notes) == ((), ())
    assert found.trace is not None
    assert found.trace.steps == 2


# -- the machine, and misuse -----------------------------------------------------------------------


@without_gpu
def test_a_machine_without_the_device_is_told_and_nothing_runs(tmp_path: Path) -> None:
    found = script(tmp_path, "raise SystemExit('it ran')", device="cuda:0")
    assert not found.ok
    assert found.trace is None
    assert "it was not run; --simulate simulates the device" in found.notes


def test_the_machine_alone_is_looked_at(run_cli: RunCli) -> None:
    done = run_cli("doctor", "--device", "cpu", exit=0)
    assert done.stdout.startswith("cpu: torch can use the CPU; of a GPU this says nothing\n")
    assert f"torch {torch.__version__}" in done.stdout


@without_gpu
def test_a_machine_without_a_gpu_is_told_and_what_shows_more(tmp_path: Path) -> None:
    alone = ckptmove.doctor()
    asked = script(tmp_path, "import torch; torch.nn.Linear(2, 2).to('cuda')", device="auto")
    assert "no GPU was found on this machine" in alone.notes[0]
    assert alone.notes == asked.notes
    assert [each.cause for each in asked.verdicts] == ["device-not-usable"]
    assert "asks for a GPU at" in asked.verdicts[0].title


@pytest.mark.slow
def test_a_simulation_of_the_cpu_is_none(training: Path) -> None:
    found = ckptmove.doctor(script=training, args=["cpu"], device="cpu", simulate=True)
    assert not found.simulated
    assert found.notes[0].startswith("nothing was simulated")


def test_without_torch_that_is_what_is_wrong() -> None:
    text = "import sys; sys.modules['torch'] = None; from ckptmove.cli import main; exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", text, "doctor"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "wrong  torch is not installed in this Python" in done.stdout
    assert "fix    pip install torch" in done.stdout


MISUSE: dict[str, tuple[str, ...]] = {
    "a model or a script is looked at, not both": ("--model", "a:b", "--script", "train.py"),
    "there is no such script": ("--script", "nowhere.py"),
    "at least one step": ("--script", "train.py", "--steps", "0"),
    "arguments are for a script": ("--", "--epochs", "1"),
    "an input and an optimizer are for a model": ("--input", "float32[2]"),
    "'gpu' is not a device": ("--device", "gpu"),
    "the device meta cannot compute anything": ("--device", "meta"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("message", MISUSE)
def test_misuse_is_said_in_a_line(message: str, training: Path, run_cli: RunCli) -> None:
    done = run_cli("doctor", *MISUSE[message], exit=2, cwd=training.parent)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_misuse_raises() -> None:
    with pytest.raises(DeviceError):
        ckptmove.doctor(device="gpu")
    with pytest.raises(UsageError):
        ckptmove.doctor(model="no_such_module:Net", device="cpu")
