"""A checkpoint that is sound passes every check; one with a fault fails the right one, by name."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove import CheckFailed, DeviceError, InputError, UnsupportedError, UsageError, validate
from ckptmove.cli import cli
from ckptmove.errors import CkptmoveError
from ckptmove.reports.validate import ALL_CHECKS, ValidationReport
from tests.conftest import ROOT, RunCli
from tests.making import trial_models as rehearsing
from tests.making.checkpoints import rezip
from tests.making.trial_models import IMAGES, Convolutions, Tied, named, trained

pytestmark = pytest.mark.usefixtures("warm")

Tree = dict[str, Any]

absent = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that no test changes."""
    folder = tmp_path_factory.mktemp("made")
    torch.save(rehearsing.of_convolutions(), folder / "run.pt")
    ckptmove.relocate(folder / "run.pt", folder / "run.cuda.pt", to="cuda:0")
    ckptmove.convert(folder / "run.pt", folder / "run.safetensors")
    torch.manual_seed(0)
    model = Tied()
    tied = trained(model, torch.optim.AdamW(model.parameters()), lambda: torch.randint(20, (2, 4)))
    tied["model"] |= {"table": torch.arange(20), "one": torch.ones(8), "other": torch.zeros(8)}
    torch.save(tied, folder / "tied.pt")
    torch.save({f"layer{n}": torch.randn(100) for n in range(6)}, folder / "weights.pt")
    return folder


@pytest.fixture
def run_pt(made: Path) -> Path:
    """A checkpoint of `Convolutions`, mid-training."""
    return made / "run.pt"


def outcomes(report: ValidationReport) -> dict[str, str]:
    return {each.check: each.outcome for each in report.checks}


def told(report: ValidationReport, check: str) -> str:
    found = report.of(check)
    return "\n".join([found.title, *found.details])


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def flipped(source: Path, target: Path, at: int) -> Path:
    """A copy with one bit that is not the same."""
    data = bytearray(source.read_bytes())
    data[at] ^= 1
    target.write_bytes(data)
    return target


def middle_of(path: Path, record: str) -> int:
    """Where a record of a zip has its middle byte."""
    with zipfile.ZipFile(path) as archive:
        (info,) = (each for each in archive.infolist() if each.filename.endswith(record))
    head = path.read_bytes()[info.header_offset :][:30]
    before = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return info.header_offset + before + info.compress_size // 2


# -- the report ------------------------------------------------------------------------------------


@pytest.mark.cold
def test_a_sound_checkpoint_passes_all_checks_in_order(made: Path) -> None:
    report = validate(
        made / "run.safetensors",
        against=made / "run.pt",
        model=Convolutions,
        input=IMAGES,
        step="train",
    )
    assert [each.check for each in report.checks] == list(ALL_CHECKS)
    assert set(outcomes(report).values()) == {"passed"}, report
    assert report.ok
    assert (report.device, report.simulated) == ("cpu", False)
    assert report.of("container").title == (
        "safetensors, 27 tensors: all in its place; it has no checksums"
    )
    assert report.of("against").title == (f"equal to {made / 'run.pt'}: 27 tensors, byte for byte")
    assert report.of("reload").title == "safetensors.torch.load_file put 27 tensors on cpu"
    assert report.of("model").title == "Convolutions accepts all 9 tensors of model"
    assert report.of("step").data["against"]["equal"]
    report.raise_if_failed()


def test_what_was_not_asked_for_is_skipped_with_a_reason(run_pt: Path) -> None:
    report = validate(run_pt)
    assert outcomes(report) == {
        **dict.fromkeys(ALL_CHECKS, "skipped"),
        "container": "passed",
        "reload": "passed",
    }
    assert report.of("container").title == "torch-zip, 27 tensors: every checksum is right"
    assert report.of("against").title == "nothing to compare it with was named"
    assert {report.of(check).title for check in ALL_CHECKS[3:]} == {"no model was named"}


def test_the_checklist(made: Path, run_cli: RunCli) -> None:
    tied = made / "tied.pt"
    done = run_cli("validate", "run.pt", "--against", tied, exit=1, cwd=made)
    lines = done.stdout.splitlines()
    marks = [(line[:8].strip(), line[8:18].strip()) for line in lines if line[:1].strip()]
    assert marks[:3] == [("ok", "container"), ("FAILED", "against"), ("ok", "reload")]
    assert [mark for mark, _ in marks[3:6]] == ["skipped"] * 3
    assert lines[-1] == "run.pt on cpu: failed: against"
    assert done.stderr == "ckptmove: run.pt: a check failed\n"
    done = run_cli("validate", "run.pt", "--against", tied, "-q", exit=1, cwd=made)
    assert (done.stdout, done.stderr) == (
        "",
        f"ckptmove: run.pt: against: differs from {tied}\n",
    )


@pytest.mark.slow
def test_json_is_the_report(run_pt: Path, run_cli: RunCli) -> None:
    def timeless(report: Tree) -> Tree:
        report["checks"][1]["data"]["seconds"] = 0
        return report

    asked: list[str | Path] = [
        "--against",
        run_pt,
        "--model",
        named(Convolutions),
        "--input",
        IMAGES,
    ]
    done = run_cli("validate", run_pt, *asked, "--step", "forward", "--json", exit=0)
    report = validate(
        run_pt, against=run_pt, model=named(Convolutions), input=[IMAGES], step="forward"
    )
    assert timeless(json.loads(done.stdout)) == timeless(json.loads(json.dumps(report.to_json())))
    assert report.to_json()["schema"] == 1


def test_failures_are_raised_by_name(made: Path, tmp_path: Path) -> None:
    run_pt = made / "run.pt"
    bad = flipped(run_pt, tmp_path / "bad.pt", middle_of(run_pt, "data/0"))
    with pytest.raises(CheckFailed) as error:
        validate(bad, against=run_pt).raise_if_failed()
    assert error.value.path == str(bad)
    assert str(error.value) == (
        f"container: torch-zip, 27 tensors: 1 fault; against: differs from {run_pt}"
    )


NONSENSE: dict[str, tuple[int, str]] = {
    "validate run.pt --device gpu": (2, "'gpu' is not a device"),
    "validate run.pt --device meta": (2, "the device meta cannot compute anything"),
    "validate run.pt --step fly": (2, "'fly' is not one of"),
    "validate run.pt --model nowhere:Net": (2, "there is no module 'nowhere'"),
    "validate missing.pt": (3, "missing.pt: can't be read: No such file"),
    "validate run.pt --against missing.pt": (3, "missing.pt: can't be read: No such file"),
    "validate run.pt --step forward": (3, "unpickling it runs its code"),
}


@pytest.mark.parametrize("command", NONSENSE)
def test_what_can_not_be_asked(
    command: str, made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    code, said = NONSENSE[command]
    try:
        cli.main(command.split(), prog_name="ckptmove", standalone_mode=False)
    except click.UsageError as error:
        found = error.exit_code, error.format_message()
    except CkptmoveError as error:
        found = error.exit_code, f"{error.path}: {error}"
    else:
        pytest.fail("nothing was raised")
    assert said in found[1]
    assert found[0] == code
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_exit_codes(made: Path, run_cli: RunCli) -> None:
    run_cli("validate", "run.pt", exit=0, cwd=made)
    run_cli("validate", exit=2, cwd=made)
    run_cli("validate", "run.pt", "--device", "gpu", exit=2, cwd=made)
    run_cli("validate", "missing.pt", exit=3, cwd=made)


# -- container -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
def test_a_flipped_bit_in_a_record(made: Path, tmp_path: Path, packed: bool) -> None:
    whole = rezip(made / "run.pt", tmp_path / "whole.pt", lambda _: packed)
    assert outcomes(validate(whole, against=made / "run.pt"))["container"] == "passed"
    bad = flipped(whole, tmp_path / "bad.pt", middle_of(whole, "data/0"))
    report = validate(bad, against=whole, model=Convolutions, input=IMAGES, step="train")
    assert report.of("container").title == "torch-zip, 27 tensors: 1 fault"
    said = told(report, "container")
    assert "data/0' " in said
    assert "its checksum is wrong" in said or (packed and "does not inflate" in said)
    assert report.of("against").outcome == "failed"
    with zipfile.ZipFile(bad) as archive:
        assert str(archive.testzip()).endswith("data/0")


def test_torch_is_not_made_to_map_what_is_compressed(made: Path, tmp_path: Path) -> None:
    whole = rezip(made / "run.pt", tmp_path / "whole.pt", lambda _: True)
    assert validate(made / "run.pt").of("reload").data["by"] == (
        "torch.load(weights_only=True, mmap=True)"
    )
    assert validate(whole).of("reload").data["by"] == "torch.load(weights_only=True)"


@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_file(made: Path, tmp_path: Path, name: str, kept: float) -> None:
    data = (made / name).read_bytes()
    cut = tmp_path / name
    cut.write_bytes(data[: int(len(data) * kept)])
    report = validate(cut, against=made / name, model=Convolutions, step="train")
    assert report.of("container").outcome == "failed"
    assert {report.of(check).title for check in ALL_CHECKS[1:]} == {"it can't be read"}
    assert not report.ok


def test_a_damaged_header(made: Path, tmp_path: Path) -> None:
    bad = flipped(made / "run.safetensors", tmp_path / "bad.safetensors", 9)
    assert "header" in validate(bad).of("container").title


HEADERS: dict[str, tuple[bytes, bytes]] = {
    "sound": (b"", b""),
    "an unknown dtype": (b'"F32"', b'"F3Z"'),
    "another size": (b"[2]", b"[3]"),
    "a gap": (b"[0,8]", b"[1,8]"),
    "beyond the end": (b"[0,8]", b"[0,9]"),
    "no JSON": (b'"a"', b'"a '),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_fails_when_its_own_library_refuses_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"a": torch.ones(2)}, path)
    data = path.read_bytes()
    assert HEADERS[name][0] in data
    path.write_bytes(data.replace(*HEADERS[name]) if name != "sound" else data)
    outcome = validate(path).of("container").outcome
    if name == "sound":
        assert outcome == "passed"
        return
    assert outcome == "failed"
    with pytest.raises(SafetensorError):
        load_file(path)


def test_checkpoints_of_several_files(made: Path, tmp_path: Path) -> None:
    weights, folder = made / "weights.pt", tmp_path / "folder"
    ckptmove.convert(weights, folder, max_shard_size=900)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    (index,) = folder.glob("*.index.json")
    for source in (folder, index):
        report = validate(source, against=weights)
        assert list(outcomes(report).values())[:3] == ["passed"] * 3, report
        assert report.of("reload").data["tensors"] == 6
    flipped(shards[-1], shards[-1], shards[-1].stat().st_size - 1)
    assert outcomes(validate(folder, against=weights))["against"] == "failed"
    assert validate(weights, against=folder).of("against").details[0].startswith("layer5: changed")
    shards[0].unlink()
    report = validate(folder)
    assert report.of("container").outcome == "failed"
    assert shards[0].name in told(report, "container")


def test_shards_of_torch_are_loaded_too(tmp_path: Path) -> None:
    hub: Any = pytest.importorskip("huggingface_hub")
    state = {f"layer{n}": torch.randn(100) for n in range(6)}
    folder = tmp_path / "folder"
    folder.mkdir()
    hub.save_torch_state_dict(state, folder, max_shard_size=900, safe_serialization=False)
    report = validate(folder)
    assert outcomes(report)["reload"] == "passed"
    assert report.of("reload").data["tensors"] == 6


# -- against ---------------------------------------------------------------------------------------

CHANGED: dict[str, Callable[[Path, Path], object]] = {
    "relocated.pt": lambda a, b: ckptmove.relocate(a, b, to="cuda:1"),
    "all.pt": lambda a, b: ckptmove.relocate(a, b, to="mps", all=True),
    "converted.safetensors": lambda a, b: ckptmove.convert(a, b),
    "cast.pt": lambda a, b: ckptmove.convert(a, b, dtype="bfloat16"),
    "cast.safetensors": lambda a, b: ckptmove.convert(a, b, dtype="float16"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_we_wrote_is_equal_to_its_source(made: Path, tmp_path: Path, name: str) -> None:
    CHANGED[name](made / "tied.pt", tmp_path / name)
    found = validate(tmp_path / name, against=made / "tied.pt").of("against")
    assert found.outcome == "passed", found
    assert bool(found.data["cast"]) == name.startswith("cast")
    if name.startswith("cast"):
        assert any(line.startswith("float32→") for line in found.details)


def test_there_and_back(made: Path, tmp_path: Path) -> None:
    back = tmp_path / "back.pt"
    ckptmove.convert(made / "run.safetensors", back)
    assert validate(back, against=made / "run.pt").of("against").outcome == "passed"
    assert validate(back, against=made / "run.safetensors").of("against").outcome == "passed"


def flip(tree: Tree) -> None:
    tree["model"]["embed.weight"].view(torch.int32)[3, 1] ^= 1


def swap(tree: Tree) -> None:
    model = tree["model"]
    model["one"], model["other"] = model["other"], model["one"]


def untie(tree: Tree) -> None:
    tree["model"]["head.weight"] = tree["model"]["head.weight"].clone()


def narrow(tree: Tree) -> None:
    tree["model"]["table"] = tree["model"]["table"].int()


FAULTS: dict[str, tuple[Callable[[Tree], object], list[str]]] = {
    "a flipped bit": (flip, ["model.embed.weight: changed in 1 of 160", "[3, 1]"]),
    "swapped keys": (swap, ["model.one: ", "model.other: "]),
    "an untied weight": (untie, ["model.embed.weight: unshared", "model.head.weight"]),
    "a dtype that is no cast": (narrow, ["model.table: retyped: int64 → int32"]),
    "a dropped moment": (
        lambda tree: tree["optimizer"]["state"][0].pop("exp_avg_sq"),
        ["optimizer.state.0.exp_avg_sq: removed"],
    ),
    "another step": (
        lambda tree: tree["optimizer"]["state"][0]["step"].add_(1),
        ["optimizer.state.0.step: changed"],
    ),
    "a hyper-parameter": (
        lambda tree: tree["optimizer"]["param_groups"][0].update(lr=0.5),
        ["optimizer.param_groups.0.lr: value: 0.001 → 0.5"],
    ),
    "a missing key": (lambda tree: tree["model"].pop("one"), ["model.one: removed"]),
}


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("name", FAULTS)
def test_one_planted_change_is_named(made: Path, tmp_path: Path, name: str, suffix: str) -> None:
    plant, expected = FAULTS[name]
    tree = loaded(made / "tied.pt")
    plant(tree)
    path = tmp_path / "bad.pt"
    torch.save(tree, path)
    if suffix != "pt":
        ckptmove.convert(path, path.with_suffix(".safetensors"))
    report = validate(path.with_suffix(f".{suffix}"), against=made / "tied.pt")
    assert outcomes(report)["against"] == "failed"
    assert outcomes(report)["container"] == outcomes(report)["reload"] == "passed"
    assert all(line in told(report, "against") for line in expected), report
    assert len(report.of("against").details) <= 4


def test_a_cast_does_not_hide_a_change(made: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.safetensors"
    ckptmove.convert(made / "weights.pt", half, dtype="bfloat16")
    tensors = load_file(half)
    tensors["layer2"].view(torch.int16)[7] ^= 1
    save_file(tensors, half)
    found = validate(half, against=made / "weights.pt").of("against")
    assert found.outcome == "failed"
    assert found.details[0].startswith("layer2: changed in 1 of 100 elements")


# -- reload ----------------------------------------------------------------------------------------


def test_what_torch_refuses_is_skipped_by_name(tmp_path: Path) -> None:
    path = tmp_path / "args.pt"
    torch.save({"args": argparse.Namespace(lr=1), "w": torch.ones(2)}, path)
    found = validate(path).of("reload")
    assert (found.outcome, found.details[0]) == ("skipped", "it names argparse.Namespace")


def test_formats_that_torch_loads_in_its_own_ways(made: Path, tmp_path: Path) -> None:
    state = loaded(made / "run.pt")["model"]
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(Convolutions()).save(str(tmp_path / "script.pt"))
    torch.save(state | {"nowhere": torch.empty(3, device="meta")}, tmp_path / "meta.pt")
    for name in ("legacy.pt", "script.pt", "meta.pt"):
        assert validate(tmp_path / name).of("reload").outcome == "passed"


@absent
def test_a_device_that_is_not_there(made: Path) -> None:
    report = validate(made / "run.cuda.pt", device="cuda")
    assert report.device == "cuda:0"
    assert report.of("reload").title == "there is no cuda:0 on this machine"
    assert outcomes(report)["reload"] == "skipped"
    assert validate(made / "run.cuda.pt").device == "cpu"
    with pytest.raises(DeviceError, match="cuda:0 can't be used"):
        validate(made / "run.cuda.pt", device="cuda", model=Convolutions)


WITHOUT_TORCH = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Wall())
from ckptmove.cli import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.sample(1)
@pytest.mark.cold
@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
def test_without_torch_the_bytes_are_still_checked(made: Path, tmp_path: Path, name: str) -> None:
    def run(*arguments: str, exit: int) -> Tree:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, "validate", *arguments, "--json"],
            cwd=made,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == exit, done.stderr
        return {each["check"]: each for each in json.loads(done.stdout)["checks"]}

    found = run(name, "--against", "run.pt", "--model", named(Convolutions), exit=0)
    assert [found[check]["outcome"] for check in ALL_CHECKS] == ["passed"] * 2 + ["skipped"] * 4
    assert {found[check]["title"] for check in ALL_CHECKS[2:]} == {"torch is not installed"}
    bad = flipped(made / "run.pt", tmp_path / "bad.pt", middle_of(made / "run.pt", "data/0"))
    found = run(str(bad), "--against", name, exit=1)
    assert [found[check]["outcome"] for check in ALL_CHECKS[:2]] == ["failed"] * 2


@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
def test_torch_that_has_no_room_is_not_called_missing(made: Path) -> None:
    code = """
import json, resource, sys
import ckptmove
ckptmove.validate
ckptmove.inspect(sys.argv[1])
pages = int(open("/proc/self/statm").read().split()[0])
room = pages * resource.getpagesize() + (100 << 20)  # torch maps far more than that
resource.setrlimit(resource.RLIMIT_AS, (room, room))
print(json.dumps(ckptmove.validate(sys.argv[1]).to_json()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, os.fspath(made / "run.safetensors")],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    assert found["reload"]["outcome"] == "skipped"
    assert found["reload"]["title"].startswith("torch can't be imported: ")


@pytest.mark.cold
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize("megabytes", [420, 500, 400, 450, 550])
@pytest.mark.parametrize("what", ["run.safetensors", "run.pt", "load", "doctor"])
def test_torch_with_too_little_room_does_not_end_us(what: str, megabytes: int, made: Path) -> None:
    """C++ and OpenBLAS end a process in which their allocations fail, with torch half imported."""
    room = megabytes << 20
    code = f"import ckptmove\ntry: ckptmove.load({os.fspath(made / 'run.pt')!r})\n"
    code += "except ImportError as error: print(error)"
    command = {"load": ["-c", code], "doctor": ["-m", "ckptmove", "doctor"]}
    validate = ["-m", "ckptmove", "validate", os.fspath(made / what)]
    done = subprocess.run(
        [sys.executable, *command.get(what, validate)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (room, room)),
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (what == "doctor")
    assert "torch can't be imported: it needs more memory than this process" in done.stdout
    assert "not installed" not in done.stdout
    assert done.stderr == "ckptmove: something is wrong\n" * (what == "doctor")


# -- model and step --------------------------------------------------------------------------------


def test_a_factory_that_fails_is_a_finding(run_pt: Path) -> None:
    report = validate(run_pt, model=named(rehearsing.unbuildable), input=IMAGES, step="train")
    assert outcomes(report)["model"] == "failed"
    assert "ValueError: no such luck" in told(report, "model")
    assert outcomes(report)["step"] == "skipped"


def test_a_model_of_another_shape_is_a_finding(run_pt: Path, run_cli: RunCli) -> None:
    asked = ["--model", named(rehearsing.Recurrent), "--input", rehearsing.SEQUENCES]
    done = run_cli("validate", run_pt, *asked, "--step", "train", exit=1)
    assert "FAILED  model" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_an_input_of_another_shape_is_a_finding(run_pt: Path) -> None:
    report = validate(run_pt, model=Convolutions, input="float32[4,7,8,8]", step="forward")
    assert outcomes(report)["model"] == "passed"
    assert outcomes(report)["step"] == "failed"
    assert "conv" in told(report, "step")


def test_nonsense_is_an_error(run_pt: Path) -> None:
    with pytest.raises(UsageError, match="must be forward or train"):
        validate(run_pt, model=Convolutions, step="fly")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is not valid"):
        validate(run_pt, model=Convolutions, input="float32[3", step="train")


# -- a device that isn't there ---------------------------------------------------------------------


def simulated(path: Path, model: type = Convolutions) -> ValidationReport:
    report = validate(
        path, model=named(model), input=IMAGES, step="train", device="cuda:0", simulate=True
    )
    assert (report.device, report.simulated) == ("cuda:0", True)
    assert report.of("reload").outcome == "skipped"
    return report


@absent
def test_a_relocated_checkpoint_trains_on_a_device_that_is_not_there(made: Path) -> None:
    report = simulated(made / "run.cuda.pt")
    assert [report.of(check).outcome for check in ALL_CHECKS[3:]] == ["passed"] * 3, report
    assert report.of("step").title == "a simulated training step on cuda:0"


@pytest.mark.slow
@absent
def test_a_step_that_was_moved_along_fails(made: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.pt"
    ckptmove.relocate(made / "run.pt", moved, to="cuda:0", all=True)
    report = simulated(moved)
    assert report.of("step").outcome == "failed"
    assert "stored on cuda:0; torch keeps it on cpu" in report.of("step").title
    with pytest.raises(CheckFailed, match="step: stored on cuda:0"):
        report.raise_if_failed()


@pytest.mark.slow
@absent
def test_a_tensor_made_on_the_cpu_fails(made: Path) -> None:
    report = simulated(made / "run.cuda.pt", rehearsing.MadeOnTheHost)
    assert report.of("step").outcome == "failed"
    assert "trial_models.py" in report.of("step").title


# -- nothing is executed ---------------------------------------------------------------------------


class Canary:
    """Unpickled, it leaves a file behind in the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch canary",)


def test_nothing_in_a_file_is_executed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.pt"
    torch.save({**loaded(made / "run.pt"), "canary": Canary()}, path)
    report = validate(path, against=path, model=Convolutions, input=IMAGES, step="train")
    assert report.ok
    assert report.of("step").outcome == "passed"
    assert "it names posix.system" in report.of("reload").details
    with pytest.raises(UnsupportedError, match="unpickling it runs its code"):
        validate(path, step="forward")
    with pytest.raises(InputError):
        validate(made / "run.pt", model=path)
    assert not Path("canary").exists()
    loaded(path)
    assert Path("canary").exists()  # it would have
