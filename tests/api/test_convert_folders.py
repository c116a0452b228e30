"""Folders to folders: every checkpoint in one is converted, and the libraries load the result."""

from __future__ import annotations

import functools
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

import ckptmove
from ckptmove import CorruptError, InputError, RefusedError, convert
from tests.conftest import RunCli, TrainingFolder, in_turn
from tests.making.model_folders import FOLDERS, SNAPSHOT, copy_of
from tests.making.training_folders import GOES_ON
from tests.oracles.model_folders import dtype_said, loaded
from tests.oracles.sameness import assert_same_tree

#: Those of which the weights are all.
WEIGHTS = [name for name in FOLDERS if name != "accelerate"]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def zips(folder: Path) -> list[Path]:
    """Files that `torch.save` wrote."""
    return [each for each in sorted(folder.rglob("*")) if zipfile.is_zipfile(each)]


def source_of(name: str, folder: Path) -> Path:
    """What a user names of a folder of `model_folders`."""
    return folder / SNAPSHOT if name == "hub" else folder


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "diffusers" else n for n in WEIGHTS]
)
def test_its_library_loads_the_result(name: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path / "models--a--in", "cuda:0")
    made = tmp_path / "models--a--out"
    made.mkdir()
    source, out = source_of(name, folder), source_of(name, made)
    out.parent.mkdir(exist_ok=True)
    report = convert(source, out, to="cpu")
    assert zips(out) == []
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert report.pickles == ()
    assert set(report.files) == {str(out / each) for each in files(out)}
    plain = copy_of(name, tmp_path / "models--a--plain")
    assert_same_tree(loaded(name, made), loaded(name, plain))


def test_a_training_goes_there_and_back(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    report = convert(source, tmp_path / "safe")
    assert zips(tmp_path / "safe") == []
    assert report.parts["optimizer.bin"] == ("optimizer.bin.safetensors",)
    convert(
        tmp_path / "safe",
        tmp_path / "back",
        format="torch-zip",
        trust_objects=True,
        keep_files="model.*",
    )
    assert files(tmp_path / "back") == files(source)
    assert_same_tree(loaded("accelerate", tmp_path / "back"), loaded("accelerate", source))


def test_the_device_reaches_every_file(tmp_path: Path) -> None:
    source = copy_of("skorch", tmp_path / "in", "cuda:0")
    for format, suffix in (("safetensors", ".safetensors"), ("torch-zip", ".pt")):
        report = convert(source, tmp_path / format, to="cuda:1", format=format)
        for name in ("params", "optimizer.pt", "criterion"):
            stem = name.removesuffix(".pt") if suffix == ".pt" else name
            manifest = ckptmove.inspect(tmp_path / format / f"{stem}{suffix}")
            assert {each.device for each in manifest.tensors} == {"cuda:1"}, name
    report = convert(tmp_path / "torch-zip", tmp_path / "kept", to="cuda:0", dry_run=True)
    assert not report.written
    assert not (tmp_path / "kept").exists()


def test_the_configuration_says_the_new_dtype(tmp_path: Path) -> None:
    source = copy_of("transformers", tmp_path / "in")
    before = json.loads((source / "config.json").read_text())
    convert(source, tmp_path / "out", dtype="bf16")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (before.pop("dtype"), after.pop("dtype")) == ("float32", "bfloat16")
    assert before == after
    assert {each.dtype for each in loaded("transformers", tmp_path / "out").values()} == {
        torch.bfloat16
    }
    convert(source, tmp_path / "one", dtype={"*.ln_1.*": "bf16"})
    assert dtype_said(tmp_path / "one") == "float32"
    (source / "config.json").write_text(
        '{"torch_dtype": "float32", "a": "\\"dtype\\": \\"float32\\""}'
    )
    convert(source, tmp_path / "old", dtype="fp16")
    said = '{"torch_dtype": "float16", "a": "\\"dtype\\": \\"float32\\""}'
    assert (tmp_path / "old" / "config.json").read_text() == said


def test_the_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    convert(source, tmp_path / "out", dtype="bf16")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in list(file.keys())} == {torch.bfloat16}
    for name in ("optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"):
        safe = tmp_path / "out" / f"{name}.safetensors"
        convert(safe, tmp_path / "back.pt", force=True)
        before, after = (
            torch.load(each, weights_only=False) for each in (source / name, tmp_path / "back.pt")
        )
        assert_same_tree(after, before)


@pytest.mark.parametrize("preset", ["hf", "deploy"])
def test_presets_leave_the_training_out(preset: str, tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    report = convert(source, tmp_path / "out", preset=preset)
    assert files(tmp_path / "out") == {"model.safetensors"}
    left_out = files(source) - {"model.safetensors"}
    assert set(report.left_out) == left_out


def test_a_glob_may_speak_of_one_component(tmp_path: Path) -> None:
    source = copy_of("sentence_transformers", tmp_path / "in")
    convert(source, tmp_path / "out", dtype={"linear.*": "bf16"})
    with safe_open(tmp_path / "out" / "2_Dense" / "model.safetensors", "pt") as file:
        assert file.get_tensor("linear.weight").dtype == torch.bfloat16
    with pytest.raises(RefusedError, match="no name in it matches 'nothing'"):
        convert(source, tmp_path / "none", keep_dtype="nothing", dtype="bf16")


# -- what stays, and what is damaged ---------------------------------------------------------------


def test_a_pickle_that_stays_is_named(tmp_path: Path, run_cli: RunCli) -> None:
    source = copy_of("timm", tmp_path / "in")
    (source / "labels.pkl").write_bytes(pickle.dumps({"a": 1}))
    done = run_cli("convert", "in", "out", "--dry-run", exit=1)
    assert not (tmp_path / "out").exists()
    done = run_cli("convert", "in", "out", exit=1)
    assert "not converted: labels.pkl is a plain pickle" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "ckptmove: in: labels.pkl stays a pickle (--keep-files 'labels.pkl' accepts that)"
    )
    assert (tmp_path / "out" / "labels.pkl").read_bytes() == (source / "labels.pkl").read_bytes()
    done = run_cli("convert", "in", "again", "--keep-files", "*.pkl", exit=0)
    assert "labels" not in done.stdout


def test_what_safetensors_cannot_hold_stays_and_is_named(tmp_path: Path) -> None:
    source = copy_of("timm", tmp_path / "in")
    with zipfile.ZipFile(source / "odd.pt", "w") as made:
        torch.save({"a": torch.ones(2)}, source / "whole")
        with zipfile.ZipFile(source / "whole") as whole:
            for name in whole.namelist():
                made.writestr(name, whole.read(name))
        made.writestr("whole/extra/more.bin", b"more")
    (source / "whole").unlink()
    report = convert(source, tmp_path / "out")
    assert [each.name for each in report.pickles] == ["odd.pt"]
    assert (tmp_path / "out" / "odd.pt").read_bytes() == (source / "odd.pt").read_bytes()


def test_a_distributed_checkpoint_in_it_becomes_one_file(tmp_path: Path) -> None:
    source = copy_of("timm", tmp_path / "in")
    before = files(source)
    save({"a": torch.ones(3)}, checkpoint_id=source / "optimizer_0", no_dist=True)
    report = convert(source, tmp_path / "out")
    assert not report.pickles
    assert files(tmp_path / "out") == before - {"pytorch_model.bin"} | {"optimizer.bin.safetensors"}
    state = ckptmove.load(tmp_path / "out" / "optimizer.bin.safetensors")
    assert torch.equal(state["a"], torch.ones(3))


@pytest.mark.parametrize("nbytes", [0, 30, -100])
@pytest.mark.parametrize("name", ["optimizer.pt", "params.pt"])
def test_damage_is_named_and_nothing_is_written(nbytes: int, name: str, tmp_path: Path) -> None:
    source = copy_of("skorch", tmp_path / "in")
    whole = (source / name).read_bytes()
    (source / name).write_bytes(whole[:nbytes])
    with pytest.raises(InputError) as raised:
        convert(source, tmp_path / "out")
    assert raised.value.path == str(source / name)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    source = copy_of("skorch", tmp_path / "in")
    damaged = bytearray((source / "optimizer.pt").read_bytes())
    state = torch.load(source / "optimizer.pt", weights_only=True)["state"][0]["exp_avg"]
    damaged[damaged.index(bytes(state.numpy().data))] ^= 1
    (source / "optimizer.pt").write_bytes(damaged)
    with pytest.raises((CorruptError, InputError)) as raised:
        convert(source, tmp_path / "out")
    assert raised.value.path == str(source / "optimizer.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# -- names -----------------------------------------------------------------------------------


def test_names_of_an_optimizer_are_those_of_no_weights(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    wrong: list[dict[str, Any]] = [{"select": "optimizer"}, {"exclude_tensors": "rng"}]
    for options in (*wrong, {"root": "optimizer"}):
        with pytest.raises(RefusedError) as raised:
            convert(source, f"{tmp_path}/out/", **options)
        assert "one.safetensors" in str(raised.value.hint)
        convert(source, tmp_path / "one.safetensors", force=True, **options)
    assert not (tmp_path / "out").exists()


def test_two_files_of_one_name_are_refused_until_one_is_kept(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    (source / "optimizer.bin.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(RefusedError, match=r"would be called 'optimizer\.bin\.safetensors'") as no:
        convert(source, f"{tmp_path}/out/")
    assert no.value.hint == "--keep-files 'optimizer.bin' copies that as it is"
    convert(source, f"{tmp_path}/out/", keep_files="optimizer.bin")
    assert {"optimizer.bin", "optimizer.bin.safetensors"} <= files(tmp_path / "out")


# -- weights in two forms -----------------------------------------------------------------------


def two_forms(folder: Path, *, same: bool, sharded: bool = False) -> Path:
    """A model as safetensors and as a file of torch, or two with an index."""
    state = {f"w{n}": torch.arange(9.0) + n for n in range(3)}
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    state = state if same else {**state, "w1": torch.zeros(9)}
    if not sharded:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    torch.save({"w0": state["w0"]}, folder / names[0])
    torch.save({"w1": state["w1"], "w2": state["w2"]}, folder / names[1])
    where = {"w0": names[0], "w1": names[1], "w2": names[1]}
    index = {"metadata": {"total_size": 108}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("dst", ["out/", "one.pt", "one.safetensors"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "an index"])
def test_weights_in_another_form_are_compared_before_they_are_left_out(
    dst: str, sharded: bool, tmp_path: Path
) -> None:
    right = two_forms(tmp_path / "right", same=True, sharded=sharded)
    report = convert(right, f"{tmp_path}/right-{dst}")
    assert report.dropped == ()
    assert not any("not compared" in each for each in report.warnings)
    wrong = two_forms(tmp_path / "wrong", same=False, sharded=sharded)
    name = "pytorch_model.bin.index.json" if sharded else "pytorch_model.bin"
    with pytest.raises(RefusedError) as raised:
        convert(wrong, f"{tmp_path}/{dst}")
    assert f"{name}, which holds other tensors than model.safetensors: w1 (" in str(raised.value)
    assert f"--drop '{name}'" in str(raised.value.hint)
    assert not (tmp_path / dst).exists()
    assert convert(wrong, f"{tmp_path}/{dst}", drop=name).dropped[0].name == name
    convert(wrong, f"{tmp_path}/again-{dst}", dry_run=True)


@pytest.mark.slow
def test_weights_in_another_form_may_be_kept(tmp_path: Path, run_cli: RunCli) -> None:
    two_forms(tmp_path / "in", same=False)
    done = run_cli("convert", "in", "out/", exit=4)
    assert "--keep-files 'pytorch_model.bin' copies it as it is" in done.stderr
    run_cli("convert", "in", "out/", "--keep-files", "pytorch_model.bin", exit=0)
    kept = (tmp_path / "out" / "pytorch_model.bin").read_bytes()
    assert kept == (tmp_path / "in" / "pytorch_model.bin").read_bytes()


def test_parts_without_an_index_can_not_be_compared(tmp_path: Path) -> None:
    source = two_forms(tmp_path / "in", same=True, sharded=True)
    (source / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(RefusedError, match="no index names it"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("trainer", [False, True], ids=["model", "trainer"])
def test_parts_that_the_index_does_not_name_are_no_copies(trainer: bool, tmp_path: Path) -> None:
    source = two_forms(tmp_path / "in", same=True, sharded=True)
    for each in source.glob("*.safetensors"):
        each.unlink()
    if trainer:
        torch.save({"last_epoch": 1}, source / "scheduler.pt")
    stray = source / "pytorch_model-00003-of-00003.bin"
    torch.save({"other": torch.ones(2)}, stray)
    for dst in ("out/", "one.pt"):
        with pytest.raises(RefusedError, match=f"{stray.name}, which .*no index names it"):
            convert(source, f"{tmp_path}/{dst}", format="torch-zip")
    found = ckptmove.validate(source).checks[0]
    assert found.details[0] == f"{stray.name} was not checked: no index names it"
    stray.unlink()
    assert not any(stray.name in each for each in ckptmove.validate(source).checks[0].details)


# -- going on -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def went_on(
    made_folder: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Mapping[str, object]]:
    """What a library has after it went on from the folder that it saved itself."""

    @functools.cache
    def result(name: str) -> Mapping[str, object]:
        saved, scratch = made_folder(name, "cpu"), tmp_path_factory.mktemp(name)
        folder = Path(shutil.copytree(saved, scratch / saved.name))
        return GOES_ON[name](folder, scratch / "on")

    return result


@pytest.mark.parametrize(
    ("name", "through"),
    in_turn([(each,) for each in GOES_ON], [("file",), ("nothing",), ("safetensors",)], 2),
)
@pytest.mark.sample(1)
def test_the_library_goes_on_from_the_result_as_if_nothing_had_happened(
    name: str,
    through: str,
    training_folder: TrainingFolder,
    went_on: Callable[[str], Mapping[str, object]],
    tmp_path: Path,
) -> None:
    """From a folder of torch's files that was made at once, or by way of safetensors."""
    if name == "poutyne" and through == "safetensors":
        pytest.skip("a folder of safetensors does not tell that its weights were called .ckpt")
    source = training_folder(name, "cuda:1")
    out = tmp_path / "elsewhere" / source.name
    out.parent.mkdir()
    options: dict[str, Any] = {"trust_objects": True, "to": "cpu"}
    if through == "file":
        convert(source, tmp_path / "one.safetensors", trust_objects=True)
        convert(tmp_path / "one.safetensors", f"{out}/", **options)
    else:
        if through == "safetensors":
            convert(source, tmp_path / "safe", trust_objects=True)
        start = tmp_path / "safe" if through == "safetensors" else source
        convert(start, out, format="torch-zip", keep_files="model.safetensors", **options)
    assert_same_tree(GOES_ON[name](out, tmp_path / "on"), went_on(name))


def test_what_is_deployed_has_no_optimizer_and_says_its_dtype(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder("trainer", "cuda:1")
    convert(source, tmp_path / "out", preset="deploy", dtype="bf16")
    left = {each for each in files(tmp_path / "out") if not each.endswith(".json")}
    assert left == {"model.safetensors"}
    assert "trainer_state.json" not in files(tmp_path / "out")
    assert dtype_said(tmp_path / "out") == "bfloat16"
    assert {each.dtype for each in loaded("transformers", tmp_path / "out").values()} == {
        torch.bfloat16
    }


def test_the_report_names_the_folder_that_the_user_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    assert convert(folder, tmp_path / "out.pt").source == str(folder)
