"""How the run of a script ends under `ckptmove doctor`, and what is told of it then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove import Diagnosis, UsageError
from ckptmove.trial.examine import examine_model
from ckptmove.trial.subprocess_call import SubprocessLost, call_in_subprocess
from tests.conftest import ROOT, RunCli
from tests.making.trees import until
from tests.servers.fronts import HANG

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
pytestmark = pytest.mark.usefixtures("warm")
posix = pytest.mark.skipif(os.name != "posix", reason="needs forks and process groups")

TRAINS = """
    import os, sys, time, torch
    from torch import nn

    device = sys.argv[1]
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x=None):
        x = torch.ones(3, 4, device=device) if x is None else x
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(map(textwrap.dedent, texts)))
    return path


def run(tmp_path: Path, text: str, device: str = "cpu", **options: Any) -> Diagnosis:
    """What doctor says of a script that can train."""
    path = write(tmp_path / "script.py", TRAINS, text)
    simulate = device != "cpu"
    return ckptmove.doctor(
        script=path, args=[device], device=device, simulate=simulate, **{"timeout": 60, **options}
    )


def headline(found: Diagnosis) -> str:
    return str(found).splitlines()[0].partition(": ")[2]


def causes(found: Diagnosis) -> list[str]:
    return [each.cause for each in found.verdicts]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# -- whether everything was watched ----------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_took_its_steps_is_complete(tmp_path: Path) -> None:
    found = run(tmp_path, "for _ in range(9):\n    step()\n")
    assert (found.complete, found.notes) == (True, ())
    said = "no device fault in the first 2 training steps; of a GPU this says nothing"
    assert headline(found) == said
    assert Diagnosis.from_json(found.to_json()).complete


LATER = "steps after the first 2"


@pytest.mark.slow
def test_a_script_runs_on_after_its_steps_and_not_for_ever(tmp_path: Path) -> None:
    """What it does without calling a model is stopped too; what was not run is named."""
    rest = "step(); step(); time.sleep(100); model.eval(); torch.save(model, 'never.pt')"
    found = run(tmp_path, rest, timeout=8)
    assert (found.complete, found.not_run) == (True, (LATER, "evaluation", "saving"))
    assert f"; {LATER}, evaluation and saving were not run" in headline(found)
    rest = "step(); step(); step(); model.eval(); torch.save(model, sys.argv[0] + '.pt')"
    found = run(tmp_path, rest)
    assert (found.complete, found.not_run) == (True, ())
    assert (tmp_path / "script.py.pt").exists()
    assert found.trace is not None
    assert found.trace.steps == 2  # what comes later is run for what it raises
    found = run(tmp_path, rest + "; raise SystemExit('no')", steps=2)
    assert (causes(found), found.not_run) == ([], (LATER, "evaluation", "saving"))


@pytest.mark.slow
def test_a_loop_without_an_optimizer_ends(tmp_path: Path) -> None:
    loop = """
        while True:
            model(torch.ones(3, 4)).sum().backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
                    each.grad = None
    """
    found = run(tmp_path, loop, timeout=8)
    assert not found.complete
    assert "no optimizer took a step in 2 s" in found.notes[0]
    assert "backward passes" in found.notes[0]


BY_HAND = {
    "in place": "with torch.no_grad(): each -= 0.1 * each.grad",
    "of its data": "each.data.sub_(0.1 * each.grad)",
    "by new data": "each.data = each.data - 0.1 * each.grad",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("update", BY_HAND.values(), ids=BY_HAND)
def test_a_script_without_an_optimizer_is_watched_to_its_end(tmp_path: Path, update: str) -> None:
    loop = f"""
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            for each in model.parameters():
                {update}
    """
    found = run(tmp_path, loop)
    assert found.complete
    assert headline(found).startswith("no device fault in 3 calls of a model")
    assert found.notes[0].endswith("no optimizer took a step")


IDLE = {
    "nothing": "pass",
    "only read": "print(model.weight.grad.norm(), model.weight.norm())",
    "gradients": "model.weight.grad.zero_()",
    "moved": "model.to(torch.float64).to(torch.float32)",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("rest", IDLE.values(), ids=IDLE)
def test_gradients_that_change_nothing_are_not_a_clean_run(tmp_path: Path, rest: str) -> None:
    loop = f"""
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            {rest}
    """
    found = run(tmp_path, loop)
    assert (found.complete, causes(found)) == (False, [])
    assert headline(found).startswith("nothing wrong was found in the part that was watched")
    assert "gradients were computed, and nothing that was watched was changed" in found.notes[0]


@without_gpu
def test_a_script_that_wants_another_gpu_is_said_not_to_be_checked(tmp_path: Path) -> None:
    rest = "os.environ['CUDA_VISIBLE_DEVICES'] = '1'; step(); step()"
    assert "where there is no GPU 1" in run(tmp_path, rest, "cuda:0").notes[0]
    assert run(tmp_path, rest.replace("'1'", "'0,1'"), "cuda:0").notes == ()


SHORT = {
    "": ("no model was called", "before it called a model"),
    "step()": (
        "nothing wrong was found in the part that was watched; 1 step was watched",
        "ended after 1 step; it should run at least 2",
    ),
    "step(); os._exit(0)": (
        "nothing wrong was found in the part that was watched; 1 step was watched",
        "the run ended early: its process ended (exit 0)",
    ),
    "with torch.no_grad(): model(torch.ones(3, 4))": (
        "nothing wrong was found in the part that was watched; no step was watched",
        "called its model once, and no optimizer took a step",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", SHORT)
def test_a_run_that_ends_early_is_not_complete(text: str, tmp_path: Path) -> None:
    found = run(tmp_path, text)
    said, note = SHORT[text]
    assert (found.ok, found.complete, found.to_json()["complete"]) == (text != "", False, False)
    assert headline(found) == said
    assert note in found.notes[0]


@pytest.mark.slow
@without_gpu
def test_what_cant_be_simulated_is_not_told_to_be_right(tmp_path: Path) -> None:
    found = run(tmp_path, "torch.cuda.CUDAGraph()", "cuda:0")
    assert (found.complete, found.not_simulated, headline(found)) == (
        False,
        True,
        "could not be simulated",
    )
    rows = "step(); torch.eye(3, device='cuda').to_sparse_csr()"  # no kernel of torch's C++
    assert run(tmp_path, rows, "cuda:0").not_simulated
    found = run(tmp_path, "step(); torch.cuda.CUDAGraph()", "cuda:0")
    assert "in the part that was simulated; 1 step was watched" in headline(found)


WRONG = {
    "import nowhere_to_be_found": "failed before it called a model: ModuleNotFoundError",
    "open('fake_lazy.csv')": "failed before it called a model: FileNotFoundError",
    "assert len(sys.argv) > 5": "failed before it called a model: AssertionError",
    "input()": "failed before it called a model: EOFError",
    "raise KeyboardInterrupt": "failed before it called a model: KeyboardInterrupt",
    "sys.exit(3)": "exited before it took a step: 3",
    "step(); sys.exit('no data')": "exited after 1 step: no data",
}


@pytest.mark.sample(1)
@without_gpu
@pytest.mark.parametrize("text", WRONG)
def test_what_ends_a_script_is_wrong(text: str, tmp_path: Path) -> None:
    found = run(tmp_path, text, "cuda:0")
    assert causes(found) == ["script-failed"]
    assert WRONG[text] in found.verdicts[0].title
    if "Error" in WRONG[text]:
        assert "script.py:15" in found.verdicts[0].title
    assert not found.complete


CAUGHT = """
    try:
        step(torch.ones(3, {width}))
    except RuntimeError as error:
        print(error)
        sys.exit(1)
"""


@pytest.mark.slow
@without_gpu
def test_an_exit_after_an_exception_that_was_caught_is_explained_by_it(tmp_path: Path) -> None:
    found = run(tmp_path, CAUGHT.format(width=4), "cuda:0")
    assert causes(found) == ["batch-never-moved"]
    assert "it exited with 1" in found.notes
    found = run(tmp_path, CAUGHT.format(width=5))
    assert causes(found) == ["step-failed"]
    assert "the script caught the exception: RuntimeError: mat1" in found.notes[0]


# -- what ends the process -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_ends_itself_after_its_steps_is_complete(tmp_path: Path) -> None:
    found = run(tmp_path, "step(); step(); os._exit(0)")
    assert (found.ok, found.complete, found.notes) == (True, True, ())
    assert found.trace is not None
    assert found.trace.steps == 2


@pytest.mark.slow
@posix
def test_a_killed_process_loses_nothing_that_was_found(tmp_path: Path) -> None:
    found = run(tmp_path, "step(); os.kill(os.getpid(), 9)")
    assert causes(found) == ["run-ended"]
    assert "signal 9" in found.verdicts[0].title
    assert not found.complete
    assert found.trace is not None
    assert found.trace.steps == 1


@pytest.mark.slow
def test_a_run_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    found = run(tmp_path, "step(); time.sleep(100)", timeout=15)
    assert (found.ok, found.complete) == (True, False)
    assert "the run was ended: it did not finish within 15 s" in found.notes[0]
    assert found.trace is not None
    assert found.trace.steps == 1


@pytest.mark.slow
def test_a_run_without_a_step_is_ended_and_says_so(tmp_path: Path) -> None:
    text = "with torch.no_grad():\n    while True: model(torch.ones(3, 4)); time.sleep(0.02)\n"
    found = run(tmp_path, text, timeout=30)
    assert not found.complete
    assert "no optimizer took a step in 15 s" in found.notes[0]
    assert found.trace is not None
    assert found.trace.calls > 100


VALIDATES = """
    class Shift(nn.Module):
        def forward(self, x):
            return x + 1
    shift = Shift()
    for _ in range(150):
        shift(torch.ones(3, 4))
    with torch.no_grad():
        for _ in range(150):
            model(torch.ones(3, 4, device=device))
    for _ in range(3):
        step(shift(torch.ones(3, 4)))
"""


@pytest.mark.slow
@without_gpu
def test_many_calls_before_the_first_step_hide_nothing(tmp_path: Path) -> None:
    assert causes(run(tmp_path, VALIDATES, "cuda:0")) == ["batch-never-moved"]


# -- other processes -------------------------------------------------------------------------------

FORKS = """
    other = os.fork()
    if not other:
        for _ in range(3):
            step()
        sys.exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 4
    step(); step(); step()
"""


@pytest.mark.slow
@posix
def test_a_fork_tells_nothing_and_runs_as_ever(tmp_path: Path) -> None:
    found = run(tmp_path, FORKS)
    assert (found.verdicts, found.complete) == ((), True)


LEAVES = """
    import pathlib, signal
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
        while True: time.sleep(1)
    while not os.path.exists(sys.argv[2]): time.sleep(0.05)
"""


@pytest.mark.slow
@posix
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("quiet", [True, False])
def test_what_a_script_leaves_behind_is_ended(quiet: bool, tmp_path: Path) -> None:
    path, left = write(tmp_path / "s.py", TRAINS, LEAVES, "step(); step(); step()"), tmp_path / "id"
    found = ckptmove.doctor(script=path, args=["cpu", os.fspath(left)], device="cpu", quiet=quiet)
    assert found.complete
    assert not is_running(int(left.read_text()))


@pytest.mark.slow
@posix
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("way", ["command", "library"])
def test_a_signal_ends_all_of_it(number: signal.Signals, way: str, tmp_path: Path) -> None:
    path, left = write(tmp_path / "s.py", TRAINS, LEAVES, "time.sleep(1000)"), tmp_path / "id"
    arguments = ["--script", os.fspath(path), "--device", "cpu", "--", "cpu", os.fspath(left)]
    command: list[str] = ["-m", "ckptmove", "doctor", *arguments]
    if way == "library":
        text = f"import ckptmove; ckptmove.doctor(script={str(path)!r}, args=['cpu', "
        command = ["-c", f"{text}{str(left)!r}], device='cpu')"]
    doctor = subprocess.Popen(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: left.exists() and left.read_text())
        doctor.send_signal(number)
        assert doctor.wait(HANG) == -number
        assert not is_running(int(left.read_text()))
    finally:
        doctor.kill()
        doctor.wait()


# -- what a script finds ---------------------------------------------------------------------------

LOOKS = """
    import json, os, subprocess, sys
    from pathlib import Path
    show = "import json, os, sys; print(json.dumps([sys.path, os.environ.get('PYTHONPATH')]))"
    told = subprocess.run([sys.executable, "-c", show], capture_output=True, check=True).stdout
    told = [sys.path, os.environ.get("PYTHONPATH"), sys.argv, sys.stdin.read(), json.loads(told)]
    Path(sys.argv[1]).write_text(json.dumps(told))
"""


@pytest.mark.cold
@pytest.mark.slow
def test_a_script_finds_what_it_finds_without_doctor(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "sub").mkdir()
    path, out = write(tmp_path / "sub" / "look.py", LOOKS), tmp_path / "told.json"
    env = {"PYTHONPATH": os.fspath(ROOT)}
    subprocess.run(
        [sys.executable, path, out], cwd=tmp_path, env={**os.environ, **env}, input=b"typed"
    ).check_returncode()
    plain = json.loads(out.read_text())
    out.unlink()
    run_cli("doctor", "--script", path, "--device", "cpu", "--", out, exit=1, input="typed")
    assert json.loads(out.read_text()) == plain
    assert plain[0][0] == os.fspath(tmp_path / "sub")


@pytest.mark.slow
def test_a_script_does_not_find_what_lies_where_it_is_run(tmp_path: Path, run_cli: RunCli) -> None:
    write(tmp_path / "helper.py", "VALUE = 1\n")
    (tmp_path / "sub").mkdir()
    path = write(tmp_path / "sub" / "train.py", "import helper\n")
    done = run_cli("doctor", "--script", path, "--device", "cpu", exit=1)
    assert "ModuleNotFoundError: No module named 'helper'" in done.stdout


# -- misuse, and what makes no sense ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("simulate", [(), ("--simulate",)])
def test_a_file_of_a_model_that_exits_is_misuse(
    simulate: tuple[str, ...], tmp_path: Path, run_cli: RunCli
) -> None:
    path = write(tmp_path / "net.py", "import sys\ndef net(): ...\nsys.exit(0)\n")
    device = "cuda:0" if simulate and not torch.cuda.is_available() else "cpu"
    done = run_cli("doctor", "--model", f"{path}:net", "--device", device, *simulate, exit=2)
    assert f"--model {path}:net ends the process on import: 0" in done.stderr
    assert done.stdout == ""


def test_a_model_that_cant_be_built_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "net.py", "def net():\n    raise KeyError('width')\n")
    found = ckptmove.doctor(model=f"{path}:net", device="cpu")
    assert (causes(found), found.complete) == (["model-failed"], False)
    assert "KeyError: 'width' (at" in found.verdicts[0].title


@pytest.mark.parametrize("options", [("--steps", "2"), ("--timeout", "0")])
def test_options_that_make_no_sense_are_misuse(options: tuple[str, ...], run_cli: RunCli) -> None:
    assert run_cli("doctor", "--device", "cpu", *options, exit=2).stdout == ""


def test_steps_are_of_a_script() -> None:
    with pytest.raises(UsageError, match="steps are of a script"):
        ckptmove.doctor(model="a:b", steps=2, device="cpu")


@pytest.mark.parametrize(
    "key", ["subject", "complete", "facts", "placed", "verdicts", "trace", "notes"]
)
def test_what_is_no_diagnosis_is_refused(key: str) -> None:
    told = Diagnosis("a", "cpu").to_json()
    for wrong in (3, [3]):
        with pytest.raises(ValueError, match="no diagnosis"):
            Diagnosis.from_json({**told, key: wrong})
    del told[key]
    with pytest.raises(ValueError, match="no diagnosis"):
        Diagnosis.from_json(told)


def test_what_says_nothing_is_lost() -> None:
    with pytest.raises(SubprocessLost, match="exit 1") as caught:
        call_in_subprocess(examine_model, {}, patience=60)
    assert (caught.value.code, caught.value.lines) == (1, ("KeyError: 'model'",))
