"""What a hostile file can't have `validate` run, and faults that it must not let pass."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.errors import UnsupportedError
from ckptmove.trial.step import Step, compare_steps
from ckptmove.trial.trial import run_trial
from tests.conftest import ROOT
from tests.making import trial_models as rehearsing
from tests.making.trial_models import IMAGES, Convolutions
from tests.trial.test_trial import SAVED, spoilt, train

pytestmark = pytest.mark.usefixtures("warm")


class Maker(torch.nn.Module):
    """Writes a file when it is made anew."""

    path: str
    weight: torch.Tensor

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.weight = torch.ones(3)
        self.training = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def __getstate__(self) -> tuple[str, torch.Tensor]:
        return (self.path, self.weight)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, torch.Tensor]) -> None:
        self.path = state[0]
        self.training = False
        self.weight = torch.from_file(self.path, True, 3).fill_(7.0)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_that_makes_itself_is_not_loaded(tmp_path: Path) -> None:
    written, path = tmp_path / "written", tmp_path / "script.pt"
    torch.jit.script(Maker(str(written))).save(str(path))
    loaded = ckptmove.validate(path).of("reload")
    assert (loaded.outcome, "__setstate__" in loaded.title) == ("skipped", True)
    assert not written.exists()


class Sized(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * 2, -1) * 2


def exported(path: Path) -> Path:
    sizes = {"x": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(Sized(), (torch.ones(3, 4),), dynamic_shapes=sizes)
    torch.export.save(program, path)
    return path


def respelled(path: Path, said: str) -> None:
    with zipfile.ZipFile(path) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in records.items():
            if name.endswith("models/model.json"):
                graph = json.loads(content, object_hook=lambda each: spelling(each, said))
                content = json.dumps(graph).encode()
            file.writestr(name, content)


def spelling(each: dict[str, Any], said: str) -> dict[str, Any]:
    return {**each, "expr_str": said} if "expr_str" in each else each


@pytest.mark.slow
def test_a_program_of_any_size_is_its_own_model(tmp_path: Path) -> None:
    path = exported(tmp_path / "sized.pt2")
    assert run_trial(path, step="forward").ok


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "said",
    [
        "exec(\"open('{}', 'w')\") or 2",
        "Symbol('s77', positive=open('{}', 'w'))",
        "().__class__ or open('{}', 'w')",
        "[open('{}', 'w') for x in Tuple(1)]",
    ],
)
def test_a_program_whose_sizes_are_code_is_refused(tmp_path: Path, said: str) -> None:
    written, path = tmp_path / "written", exported(tmp_path / "sized.pt2")
    respelled(path, said.format(written))
    with pytest.raises(UnsupportedError, match="has a size that is code"):
        run_trial(path, step="forward")
    assert not written.exists()


@pytest.mark.slow
def test_a_program_with_compiled_code_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path / "sized.pt2")
    with zipfile.ZipFile(path, "a") as file:
        root = file.namelist()[0].partition("/")[0]
        file.writestr(f"{root}/data/aotinductor/model/it.so", b"\x7fELF")
    with pytest.raises(UnsupportedError, match="compiled code"):
        run_trial(path, step="forward")


# -- what a step must not let pass -----------------------------------------------------------------


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / SAVED
    torch.save(rehearsing.of_convolutions(), path)
    return path


def slots(saved: dict[str, Any]) -> dict[str, Any]:
    """The state of the first parameter."""
    found: dict[str, Any] = saved["optimizer"]["state"][0]
    return found


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a moment that is no number": (
        lambda saved: slots(saved)["exp_avg"].fill_(float("nan")),
        "not finite",
    ),
    "a negative second moment": (lambda saved: slots(saved)["exp_avg_sq"].fill_(-1), "not finite"),
    "a moment of whole numbers": (
        lambda saved: slots(saved).update(exp_avg=slots(saved)["exp_avg"].long()),
        "int64",
    ),
    "no step": (lambda saved: slots(saved).pop("step"), "lacks step"),
    "no groups": (lambda saved: saved["optimizer"]["param_groups"].clear(), "no parameter group"),
    "no betas": (
        lambda saved: saved["optimizer"]["param_groups"][0].pop("betas"),
        "group 0 lacks betas",
    ),
    "a buffer that is no number": (
        lambda saved: next(
            value for key, value in saved["model"].items() if key.endswith("running_mean")
        ).fill_(float("nan")),
        "running_mean is NaN",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_state_fails_the_step(sound: Path, name: str) -> None:
    spoil, said = FAULTS[name]
    found = train(spoilt(sound, spoil)).of("step")
    assert found.outcome == "failed", found
    assert said in str((found.title, found.details))


# -- what the model's code may do ------------------------------------------------------------------

UNRULY = """
import os, sys
from tests.making.trial_models import Convolutions, images

class Exits(Convolutions):
    def forward(self, x):
        sys.exit(0)

class Speaks(Convolutions):
    def forward(self, x):
        print("said")
        os.write(1, b"written")
        return super().forward(x)

class Silent(Exception):
    def __str__(self):
        raise ValueError

class Fails(Convolutions):
    def forward(self, x):
        raise Silent

def exits():
    sys.exit(0)

def leaves():
    os._exit(0)
"""


@pytest.fixture
def unruly(tmp_path: Path) -> Path:
    path = tmp_path / "unruly.py"
    path.write_text(UNRULY)
    return path


def test_a_model_that_exits_fails(sound: Path, unruly: Path) -> None:
    assert train(sound, f"{unruly}:Exits").of("step").outcome == "failed"
    found = run_trial(sound, model=Convolutions, inputs=[f"{unruly}:exits"], step="forward")
    assert found.of("step").outcome == "failed"


def test_a_model_that_ends_the_process_fails(sound: Path, unruly: Path) -> None:
    found = ckptmove.validate(sound, model=f"{unruly}:leaves").of("model")
    assert (found.outcome, found.details[0]) == ("failed", "SystemExit: 0")


def test_an_error_that_cannot_be_told_fails(sound: Path, unruly: Path) -> None:
    assert "Silent" in str(train(sound, f"{unruly}:Fails").of("step").details)


@pytest.mark.slow
def test_what_a_model_prints_is_no_result(sound: Path, unruly: Path) -> None:
    options = ["--input", IMAGES, "--step", "train", "--json"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ckptmove",
            "validate",
            sound,
            "--model",
            f"{unruly}:Speaks",
            *options,
        ],
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["ok"]
    assert b"said" in done.stderr
    assert b"written" in done.stderr


@pytest.mark.slow
def test_a_simulation_imports_nothing_from_the_folder(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "torch", "ckptmove"):
        Path(f"{name}.py").write_text("open('written', 'w').close(); raise ImportError")
    found = train(sound, device="cuda:7", simulate=True)
    assert not Path("written").exists()
    assert found.of("step").outcome == "passed"


UNSEEN = """
import torch
from safetensors.torch import save_file
from tests.making.trial_models import Convolutions

class Kernel(Convolutions):
    def forward(self, x):
        return super().forward(torch.nn.functional.conv2d(x, torch.ones(3, 3, 1, 1)))

class Halved(Convolutions):
    def forward(self, x):
        y = super().forward(x).flatten(1)
        return y.half() @ torch.ones(y.shape[1], 2, device=y.device)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "said"), [("Kernel", "wrong device: aten.convolution"), ("Halved", "the step failed")]
)
def test_operands_that_no_kernel_takes_fail_a_simulation(
    sound: Path, tmp_path: Path, kind: str, said: str
) -> None:
    path = tmp_path / "unseen.py"
    path.write_text(UNSEEN)
    found = train(sound, f"{path}:{kind}", device="cuda:7", simulate=True).of("step")
    assert found.outcome == "failed", found
    assert said in found.title


def test_imaginary_parts_count_between_two_steps() -> None:
    one, other = (Step(outputs={"output": torch.tensor([1 + part * 1j])}) for part in (1, 9))
    assert not compare_steps(one, other).close


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_a_library_that_would_end_the_process_is_not_asked(tmp_path: Path) -> None:
    """That of safetensors does so where it can't get the memory for a header."""
    path = tmp_path / "many.safetensors"
    save_file({f"layers.{n}.weight": torch.zeros(1) for n in range(40_000)}, path)
    code = (
        "import resource, sys, torch, safetensors.torch\n"
        "from ckptmove.trial.state.reload import check_reload\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "room = pages * resource.getpagesize() + (20 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "print(check_reload([sys.argv[1]], 'safetensors', 'cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "needs more memory than this process can get" in done.stdout
