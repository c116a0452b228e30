"""Whatever a program's file holds besides a graph over tensors is refused, and not run."""

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.errors import InputError, UnsupportedError
from ckptmove.trial.sandbox import configurations, torchscript
from ckptmove.trial.sandbox.exported_programs import danger
from ckptmove.trial.trial import run_trial
from tests.conftest import RunCli, RunHere
from tests.making.hostile_programs import REFUSED, RUNNING, edited, exported
from tests.making.relaying import rezipped

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch logs what it can't read."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("program") / "program.pt2")


def hostile(name: str, program: Path, folder: Path) -> tuple[Path, Path]:
    canary = folder / "canary"
    return edited(program, folder / "hostile.pt2", REFUSED[name], canary), canary


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_graph_over_tensors_is_refused(name: str, program: Path, tmp_path: Path) -> None:
    assert danger(program) is None
    path, canary = hostile(name, program, tmp_path)
    try:
        found = danger(path)
    except InputError:
        assert name == "says it twice"
    else:
        assert found is not None
        assert len(found) < 250
    assert not canary.exists()


@pytest.mark.parametrize("name", RUNNING)
def test_torch_would_run_it(
    name: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, canary = hostile(name, program, tmp_path)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with contextlib.suppress(Exception):
        module = torch.export.load(path).module()
        module(torch.ones(3, 4), scale=torch.ones(()))
    assert canary.exists()


@pytest.mark.slow
def test_a_refused_program_ends_the_command_in_one_line(
    program: Path, tmp_path: Path, run_here: RunHere
) -> None:
    path, canary = hostile("opaque object", program, tmp_path)
    for options in (["--step", "forward"], ["--step", "forward", "--simulate"]):
        done = run_here("validate", path, *options, exit=3)
        assert done.stderr.count("\n") <= 2
        assert "opaque_obj_0" in done.stderr
        assert "--trust-pickle" in done.stderr
    assert not canary.exists()


@pytest.mark.slow
def test_doctor_refuses_it_too(program: Path, tmp_path: Path) -> None:
    path, canary = hostile("guard", program, tmp_path)
    with pytest.raises(UnsupportedError, match="a guard that is code"):
        ckptmove.doctor(model=path, device="cpu")
    assert not canary.exists()
    assert ckptmove.doctor(model=program, device="cpu").complete


def test_a_trusted_program_is_guarded(program: Path, tmp_path: Path) -> None:
    path, canary = hostile("opaque object", program, tmp_path)
    found = ckptmove.validate(path, step="forward", trust_pickle=True).of("model")
    assert found.outcome == "failed"
    assert "the program tried to change a file" in found.title
    assert not canary.exists()


def test_a_program_runs_as_before(program: Path) -> None:
    found = run_trial(program, step="forward")
    assert [each.outcome for each in found.findings] == ["passed"] * 3, found


class Recurrent(torch.nn.Module):
    """Inputs and outputs in trees, and a size that is a value."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = torch.nn.LSTM(4, 4, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: dict[str, Any], y: torch.Tensor) -> dict[str, Any]:
        out, _ = self.cells(x["a"]["b c"])
        n = x["n"].item()
        torch._check(n >= 2)
        torch._check(n < 10)
        return {"out": self.norm(out.transpose(1, 2)), "more": [y * 2, (torch.ones(n).sum(),)]}


class Resized(torch.nn.Module):
    """Its guards compare sizes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if x.shape[0] * 2 > y.shape[1] + 1:
            x = x + 1
        size = (x.shape[2] // 2 + 1, x.shape[3] * 3 // 2)
        return torch.nn.functional.interpolate(x, size=size), y[:, : x.shape[0] // 2]


class Looped(torch.nn.Module):
    """A loop, a branch, a mapped function, attention and autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x * 2

        def few(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return n < 3

        def more(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return n + 1, x + 1

        _, x = torch._higher_order_ops.while_loop(few, more, (torch.tensor(0), x))
        x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x @ x.T
        x = x.float()[None]
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        mapped: torch.Tensor = torch.vmap(torch.exp)(x)
        return mapped


AUTO = torch.export.Dim.AUTO
RIGHT: dict[str, tuple[torch.nn.Module, tuple[Any, ...], Any]] = {
    "recurrent": (
        Recurrent(),
        ({"a": {"b c": torch.ones(2, 5, 4)}, "n": torch.tensor(3)}, torch.ones(2)),
        None,
    ),
    "resized": (
        Resized(),
        (torch.ones(4, 3, 8, 8), torch.ones(2, 6)),
        ({0: AUTO, 2: AUTO, 3: AUTO}, {1: AUTO}),
    ),
    "looped": (Looped(), (torch.ones(2, 3),), None),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RIGHT)
def test_a_program_that_computes_is_let_pass(name: str, tmp_path: Path) -> None:
    module, inputs, shapes = RIGHT[name]
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(module.eval(), inputs, dynamic_shapes=shapes), path)
    assert danger(path) is None
    torch.export.load(path).module()(*inputs)


@pytest.mark.slow
def test_classes_of_known_libraries_are_imported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, intermediate_size=16, vocab_size=50)
    given = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    path = tmp_path / "program.pt2"
    model = transformers.BertModel(config).eval()
    torch.export.save(torch.export.export(model, (), given), path)
    found = run_trial(path, step="forward")
    assert [each.outcome for each in found.findings] == ["passed"] * 3, found


# -- TorchScript -----------------------------------------------------------------------------------


class Saves(torch.nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.path)
        return x


class Maps(Saves):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_file(self.path, True, 3).fill_(7.0)


class Prints(Saves):
    """Has attributes that are named as operators and modules are."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.classes = ["save", "from_file"]
        self.ops = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.classes) > self.ops:
            return x + 1
        return x


class Maker(torch.nn.Module):
    """Writes a file while it is loaded."""

    path: str

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.ones(3), self.path)


class Restored(Maker):
    """Only makes what it holds while it is loaded."""

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]


def scripted_by(kind: type, folder: Path) -> tuple[Path, Path]:
    path, written = folder / "script.pt", folder / "written"
    torch.jit.script(kind(str(written)).eval()).save(str(path))
    return path, written


class Loops(torch.nn.Module):
    """Never ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool((x == x).all()):
            x = x * 1
        return x


@pytest.mark.slow
def test_a_script_that_never_ends_is_ended(tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "loops.pt"
    torch.jit.script(Loops()).save(str(path))
    options = ("--step", "forward", "--input", "float32[2]", "--timeout", "6")
    done = run_cli("validate", path, *options, exit=1)
    told = "the program was ended: it did not finish within 6 s; see --timeout"
    assert done.stdout.count(told) == 1
    assert run_cli("validate", path, *options[:-1], "0", exit=2).stderr.count("\n") <= 2


@pytest.mark.parametrize("kind", [Saves, Maps, Maker])
def test_a_script_that_writes_files_is_refused(kind: type, tmp_path: Path) -> None:
    path, written = scripted_by(kind, tmp_path)
    with pytest.raises(UnsupportedError, match=r"save|from_file"):
        torchscript.load_module(path, trust=False)
    assert not written.exists()
    torch.jit.load(str(path))(torch.ones(3))
    assert written.exists()  # it would have


def test_a_script_may_not_hide_what_it_calls(tmp_path: Path) -> None:
    path, written = scripted_by(Maker, tmp_path)

    def hide(name: str, content: bytes) -> bytes:
        said = b'getattr(torch, "\\163ave")('
        return content.replace(b"torch.save(", said) if name.endswith(".py") else content

    hidden = rezipped(path, tmp_path / "hidden.pt", hide)
    with pytest.raises(UnsupportedError, match="save"):
        torchscript.load_module(hidden, trust=False)
    assert not written.exists()


def test_a_script_with_objects_of_others_is_refused(tmp_path: Path) -> None:
    path, _ = scripted_by(Prints, tmp_path)

    def add(name: str, content: bytes) -> bytes:
        new = b"c__torch__.torch.classes.dist_c10d\nTCPStore\n0"
        return content[:2] + new + content[2:] if name.endswith("data.pkl") else content

    other = rezipped(path, tmp_path / "other.pt", add)
    assert "dist_c10d" in str(torchscript.danger(other))
    assert ckptmove.validate(other).of("reload").outcome == "skipped"


@pytest.mark.parametrize("kind", [Prints, Restored])
def test_a_script_that_computes_runs(kind: type, tmp_path: Path) -> None:
    path, written = scripted_by(kind, tmp_path)
    assert torchscript.load_module(path, trust=False)(torch.ones(3)).shape == (3,)
    assert not written.exists()


# -- Hugging Face ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}},
        {"text_config": {"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}},
        {"attn_implementation": "somebody/kernels"},
        {"_attn_implementation_internal": "somebody/kernels:function"},
        {"vision_config": {"experts_implementation": "somebody/kernels"}},
        {"configuration_files": ["config.4.0.0.json"]},
        {"backbone": "local-dir:/somewhere"},
        {"backbone": " local\t-dir:/somewhere"},  # what reads it as a URL ignores white space
        {"backbone_config": {"architecture": "hf-hub:somebody/model"}},
        {"architecture": "resnet18", "model_args": {"checkpoint_path": "model/weights.pth"}},
        {"backbone_kwargs": {"pretrained_cfg_overlay": {"file": "weights.pth"}}},
    ],
)
def test_a_configuration_brings_no_code(said: dict[str, object]) -> None:
    assert configurations.danger({"model_type": "bert", "dtype": "float32"}, {"bert"}) is None
    assert (
        configurations.danger({"model_type": "bert", "attn_implementation": "sdpa"}, {"bert"})
        is None
    )
    timm = {"architecture": "resnet18", "model_args": {"depth": 3}, "pretrained_cfg": {"tag": "a"}}
    assert configurations.danger(timm, {"bert"}) is None
    assert configurations.danger({"model_type": "bert", **said}, {"bert"}) is not None


# -- a pickled module ------------------------------------------------------------------------------

SCRIPT = """
import os, socket, subprocess
from pathlib import Path
import torch

class Model(torch.nn.Module):
    def __init__(self, act, path):
        super().__init__()
        self.act, self.path, self.layer = act, path, torch.nn.Linear(3, 3)

    def forward(self, x):
        path = Path(self.path)
        if self.act == "write":
            path.write_text("x")
        elif self.act == "process":
            subprocess.run(["touch", self.path])
        elif self.act == "socket":
            socket.socket()
        elif self.act == "exit":
            os._exit(77)
        return self.layer(x)

if __name__ != "__main__":
    Path(__file__).with_name("imported").write_text("x")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("none", None),
        ("write", "tried to write a file"),
        ("process", "tried to start a process"),
        ("socket", "tried to open a socket"),
        ("exit", "exit 77"),
    ],
)
def test_a_trusted_module_is_guarded(
    act: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its_code.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    canary, path = tmp_path / "canary", tmp_path / "model.pt"
    module = importlib.import_module("its_code")
    try:
        torch.save(module.Model(act, str(canary)), path)
    finally:
        del sys.modules["its_code"]
    found = run_trial(path, inputs=["float32[2,3]"], step="forward", trust_pickle=True)
    assert found.of("model").outcome == "passed"
    assert found.of("step").outcome == ("passed" if said is None else "failed")
    assert said is None or said in found.of("step").title
    assert not canary.exists()
