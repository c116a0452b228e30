"""A folder is relocated as a whole: each checkpoint in it, and every other file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove import CorruptError, RefusedError, UnsupportedError, UsageError
from tests.conftest import RunCli, TrainingFolder
from tests.making import model_folders
from tests.making.saving import save
from tests.making.staging import journals, leaving_nothing
from tests.making.training_folders import FOLDERS, GOES_ON
from tests.making.trees import contents
from tests.oracles.model_folders import loaded
from tests.oracles.readers import labels
from tests.oracles.sameness import assert_same_tree

#: Libraries that take seconds to load a model.
SLOW = ("diffusers", "sentence_transformers", "open_clip")
#: Folders of training on a GPU in which meters of the training and a version lie on the CPU: once
#: all is on the CPU, nothing tells these from the others.
KEEPS_SOME_ON_THE_CPU = ("fairseq",)
PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar")


def devices(folder: Path) -> dict[str, str]:
    """The device of every tensor in the zips of a folder, as torch reads the tags."""
    found = dict[str, str]()
    for path in sorted(folder.rglob("*")):
        if path.suffix in PICKLED and path.read_bytes()[:2] == b"PK":
            found |= {f"{path.name}: {key}": device for key, device in labels(path).items()}
    return found


def sharded(folder: Path, tag: str = "cuda:1") -> Path:
    """A model folder as transformers wrote it before safetensors: two files and their index."""
    folder.mkdir()
    files = {
        "pytorch_model-00001-of-00002.bin": {"a.weight": torch.arange(6.0)},
        "pytorch_model-00002-of-00002.bin": {"b.weight": torch.ones(3, 2)},
    }
    for name, state in files.items():
        save(folder / name, state, tag)
    where = {key: name for name, state in files.items() for key in state}
    index = {"metadata": {"total_size": 48}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


# All of it


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FOLDERS)
def test_there_and_back_is_the_same(
    name: str, training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder(name, "cuda:1")
    before, tags = contents(source), devices(source)
    with leaving_nothing(tmp_path):
        report = ckptmove.relocate(source, tmp_path / "there", map={"cuda:1": "cuda:0"})
        there = contents(tmp_path / "there")
        assert there.keys() == before.keys() == {each.name for each in report.files}
        moved = {each: "cuda:0" if tag == "cuda:1" else tag for each, tag in tags.items()}
        assert devices(tmp_path / "there") == moved
        assert "cuda:1" in tags.values()
        for each in report.files:
            changed = there[each.name] != before[each.name]
            assert changed == (each.method in ("patch", "relay")), each
            assert each.nbytes == len(there[each.name])
        back = ckptmove.relocate(tmp_path / "there", tmp_path / "back", map={"cuda:0": "cuda:1"})
        assert contents(tmp_path / "back") == contents(source) == before
        assert list(back.moved.values()) == list(report.moved.values())


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [each for each in FOLDERS if each not in KEEPS_SOME_ON_THE_CPU])
def test_what_was_taken_to_the_cpu_comes_back(
    name: str, training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder(name, "cuda:1")
    ckptmove.relocate(source, tmp_path / "there", to="cpu")
    ckptmove.relocate(tmp_path / "there", tmp_path / "back", to="cuda:1")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", GOES_ON)
def test_the_library_goes_on_from_it_as_if_it_had_been_there(
    name: str, training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder(name, "cuda:1")
    out = tmp_path / "elsewhere" / source.name
    out.parent.mkdir()
    ckptmove.relocate(source, out, to="cpu")
    assert set(devices(out).values()) == {"cpu"}
    shutil.rmtree(source)
    never_moved = training_folder(name, "cpu")
    assert_same_tree(
        GOES_ON[name](out, tmp_path / "first"), GOES_ON[name](never_moved, tmp_path / "second")
    )


@pytest.mark.parametrize(
    "name",
    [
        "transformers",
        "peft",
        "timm",
        *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_the_library_loads_a_model_from_it(name: str, tmp_path: Path) -> None:
    source = model_folders.copy_of(name, tmp_path / "in", "cuda:1")
    plain = model_folders.copy_of(name, tmp_path / "plain", "cpu")
    ckptmove.relocate(source, tmp_path / "out", to="cpu")
    assert contents(tmp_path / "out").keys() == contents(source).keys()
    assert_same_tree(loaded(name, tmp_path / "out"), loaded(name, plain))


def test_rules_hold_for_all_of_it(training_folder: TrainingFolder, tmp_path: Path) -> None:
    """By the names that `inspect` shows; files that store no devices stay what they are."""
    source = training_folder("accelerate", "cuda:1")
    names = [each.name for each in ckptmove.inspect(source).tensors]
    assert any(name.startswith("optimizer.state.0.") for name in names)
    rules = {"optimizer.*": "cpu", "custom_checkpoint.*": "cuda:3"}
    report = ckptmove.relocate(source, tmp_path / "out", place=rules)
    found = devices(tmp_path / "out")
    assert {device for key, device in found.items() if key.startswith("optimizer")} == {"cpu"}
    assert found["custom_checkpoint_0.pkl: seen"] == "cuda:3"
    assert set(report.moved) == {"cuda:1→cpu", "cuda:1→cuda:3"}
    silent = {each.name for each in report.files if not each.stores_devices}
    assert silent == {"model.safetensors"}


def test_a_folder_of_pickled_shards(tmp_path: Path) -> None:
    source = sharded(tmp_path / "model")
    (source / "sub").mkdir()
    save(source / "sub" / "pytorch_model.bin", {"w": torch.ones(3)}, "cuda:1")
    (source / "empty").mkdir()
    ckptmove.relocate(source, tmp_path / "out", to="cuda:0")
    assert set(devices(tmp_path / "out").values()) == {"cuda:0"}
    assert (tmp_path / "out" / "empty").is_dir()
    ckptmove.relocate(source, to="cuda:0", in_place=True)
    assert contents(tmp_path / "out") == contents(source)


def test_weights_in_two_forms_both_move(tmp_path: Path) -> None:
    source = sharded(tmp_path / "model")
    save_file({"a.weight": torch.arange(6.0)}, source / "model.safetensors", {"format": "pt"})
    before = (source / "model.safetensors").read_bytes()
    ckptmove.relocate(source, tmp_path / "out", to="cpu")
    assert set(devices(tmp_path / "out").values()) == {"cpu"}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_where_nothing_stores_devices_there_is_nothing_to_move(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    save_file({"w": torch.ones(3)}, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text("{}")
    report = ckptmove.relocate(source, to="cuda:0")
    assert (report.destination, report.method, report.moved) == (None, "none", {})
    assert "no file in it stores devices" in str(report)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    report = ckptmove.relocate(source, tmp_path / "out", to="cuda:0")
    assert (report.written, report.method, report.moved) == (True, "clone", {})
    assert contents(tmp_path / "out") == contents(source)
    report = ckptmove.relocate(source, to="cuda:0", in_place=True)
    assert not report.written


def test_of_another_checkpoint_in_it_nobody_knows_what_is_meant(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder("accelerate")
    shutil.copytree(source, source / "checkpoint-600")
    with pytest.raises(UnsupportedError, match="checkpoint-600 in it is a checkpoint of its own"):
        ckptmove.relocate(source, tmp_path / "out", to="cpu")
    assert not (tmp_path / "out").exists()


# Where to


def test_the_default_is_beside_it(
    training_folder: TrainingFolder, tmp_path: Path, run_cli: RunCli
) -> None:
    source = training_folder("meta").rename(tmp_path / "llama-3.1")
    assert str(ckptmove.relocate(f"{source}/", to="cpu").destination) == f"{source}.cpu"
    done = run_cli("relocate", ".", "--map", "cuda:0=cuda:1", exit=0, cwd=source)
    assert f"wrote {source}.relocated: 4 files, " in done.stdout
    assert len(contents(tmp_path / "llama-3.1.relocated")) == 4


def test_what_is_refused(training_folder: TrainingFolder, tmp_path: Path) -> None:
    source = training_folder("meta")
    before = contents(tmp_path)
    inside = "the destination is inside the source"
    for destination, match in {
        source: "the destination is the source itself",
        source / "new": inside,
        source / "a" / ".." / "new": inside,
        tmp_path: "the source is inside the destination",
        tmp_path / "missing" / "out": "can't be written",
        source / "params.json": inside,
    }.items():
        for dry_run in (True, False):
            with pytest.raises(RefusedError, match=match):
                ckptmove.relocate(source, destination, to="cpu", force=True, dry_run=dry_run)
    with pytest.raises(UsageError, match="a folder becomes a folder"):
        ckptmove.relocate(source, tmp_path / "out.pt", to="cpu")
    assert contents(tmp_path) == before


def test_a_folder_may_be_called_like_a_suffix(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    ckptmove.relocate(training_folder("meta"), tmp_path / ".pt", to="cuda:1")
    assert (tmp_path / ".pt").is_dir()


def test_what_is_there_is_replaced_only_if_asked(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source, out = training_folder("meta"), tmp_path / "out"
    ckptmove.relocate(source, out, to="cuda:5")
    with pytest.raises(RefusedError, match="the destination exists"):
        ckptmove.relocate(source, out, to="cpu")
    ckptmove.relocate(source, out, to="cpu", force=True)
    assert set(devices(out).values()) == {"cpu"}
    (out / "notes.txt").touch()
    with pytest.raises(RefusedError, match=r"'notes\.txt' in it would be gone"):
        ckptmove.relocate(source, out, to="cuda:5", force=True)
    assert set(devices(out).values()) == {"cpu"}


def test_a_dry_run_says_what_would_be_done(training_folder: TrainingFolder, tmp_path: Path) -> None:
    source, out = training_folder("accelerate", "cuda:1"), tmp_path / "out"
    before = contents(tmp_path)
    for options in ({"dst": out}, {"in_place": True}):
        dry = ckptmove.relocate(source, to="cpu", dry_run=True, **options)
        assert contents(tmp_path) == before
        assert not dry.written
        real = ckptmove.relocate(source, to="cpu", **options)
        assert (dry.files, dry.moved, dry.kept) == (real.files, real.moved, real.kept)
        assert (dry.method, dry.destination) == (real.method, real.destination)
        shutil.rmtree(out, ignore_errors=True)
        if "in_place" not in options:
            assert contents(tmp_path) == before


# What is wrong with it


def test_damage_in_any_file_is_named_and_nothing_is_written(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    for name in ("optimizer.bin", "model.safetensors", "custom_checkpoint_0.pkl"):
        source = training_folder("accelerate", "cuda:1")
        (source / name).write_bytes((source / name).read_bytes()[:-90])
        for options in ({"dst": tmp_path / "out"}, {"in_place": True}):
            before = contents(tmp_path)
            with pytest.raises(CorruptError) as raised:
                ckptmove.relocate(source, to="cpu", **options)
            assert raised.value.path == str(source / name)
            assert contents(tmp_path) == before
        shutil.rmtree(source)


def test_links_are_followed_within_it_and_elsewhere_if_asked(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder("accelerate", "cuda:1")
    elsewhere = tmp_path / "elsewhere.bin"
    (source / "optimizer.bin").rename(elsewhere)
    (source / "optimizer.bin").symlink_to(elsewhere)
    with pytest.raises(UnsupportedError, match="leads outside its folder"):
        ckptmove.relocate(source, tmp_path / "out", to="cpu")
    ckptmove.relocate(source, tmp_path / "out", to="cpu", follow_links=True)
    assert set(devices(tmp_path / "out").values()) == {"cpu"}
    assert not (tmp_path / "out" / "optimizer.bin").is_symlink()
    with pytest.raises(RefusedError, match="is a link"):
        ckptmove.relocate(source, to="cpu", follow_links=True, in_place=True, force=True)
    (source / "optimizer.bin").unlink()
    elsewhere.rename(source / "state.bin")
    (source / "optimizer.bin").symlink_to("state.bin")
    ckptmove.relocate(source, tmp_path / "again", to="cpu")
    assert set(devices(tmp_path / "again").values()) == {"cpu"}


# In place


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["accelerate", "meta", "mmengine"])
def test_in_place_it_is_the_same_and_the_rest_is_not_touched(
    name: str, training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder(name, "cuda:1")
    ckptmove.relocate(source, tmp_path / "out", to="cuda:0")
    for path in source.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    with leaving_nothing(tmp_path):
        report = ckptmove.relocate(source, to="cuda:0", in_place=True)
    assert contents(source) == contents(tmp_path / "out")
    touched = {each.name for each in report.files if each.method == "in-place"}
    assert touched
    for each in report.files:
        assert ((source / each.name).stat().st_mtime > 1_000_000_000) == (each.name in touched)
    assert 0 < report.bytes_written < report.nbytes / 2
    assert journals(tmp_path) == []
    assert "nothing to move" in str(ckptmove.relocate(source, to="cuda:0", in_place=True))


def test_if_one_file_cannot_be_changed_in_place_none_is(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder("mmengine", "cuda:1")
    before = contents(source)
    os.link(source / "epoch_2.pth", tmp_path / "second")
    for dry_run in (True, False):
        with pytest.raises(RefusedError, match="hard links") as raised:
            ckptmove.relocate(source, to="cpu", in_place=True, dry_run=dry_run)
        assert raised.value.path == str(source / "epoch_2.pth")
    assert contents(source) == before
    assert journals(tmp_path) == []
    ckptmove.relocate(source, to="cpu", in_place=True, force=True)
    assert set(devices(source).values()) == {"cpu"}


def test_what_can_not_be_read_is_not_said_to_store_no_devices(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder("accelerate")
    (source / "strange.bin").write_bytes(b"no checkpoint at all")
    report = ckptmove.relocate(source, tmp_path / "out", to="cpu")
    lines = str(report).splitlines()
    assert "copied unchanged, can't be read: 1 file, 20 B (strange.bin)" in lines
    assert not any("strange.bin" in line for line in lines if "stores no devices" in line)
    assert [each.name for each in report.files if each.is_unread] == ["strange.bin"]


def test_a_run_names_its_checkpoints_for_every_verb(
    training_folder: TrainingFolder, tmp_path: Path, run_cli: RunCli
) -> None:
    source = training_folder("accelerate")
    run = tmp_path / "run"
    for n in (5, 600):
        shutil.copytree(source, run / f"checkpoint-{n}")
    told = "checkpoint-5, checkpoint-600 in it are checkpoints of their own"
    for words in (
        "inspect run",
        "relocate run out --to=cpu",
        "relocate run --to=cpu --in-place",
        "convert run out/",
        "convert run out.pt",
        "diff run run/checkpoint-5",
    ):
        done = run_cli(*words.split(), exit=3)
        assert told in done.stderr
        assert "give one of them, such as run/checkpoint-600; or use batch" in done.stderr
    assert told in run_cli("validate", "run", exit=1).stdout
    shutil.copy(source / "model.safetensors", run)
    assert told in run_cli("relocate", "run", "out", "--to=cpu", exit=3).stderr


def test_a_run_with_one_checkpoint_is_that_checkpoint_for_every_verb(
    training_folder: TrainingFolder, tmp_path: Path, run_cli: RunCli
) -> None:
    source = training_folder("accelerate")
    run = tmp_path / "run"
    shutil.copytree(source, run / "checkpoint-5")
    (run / "logs").mkdir()
    (run / "logs" / "events.out").write_text("x")
    told = "checkpoint-5 is the only checkpoint in it"
    shown = run_cli("inspect", "run", exit=0)
    assert told in shown.stderr
    assert "run/checkpoint-5: training-folder" in shown.stdout
    for words in (
        "relocate run out --to=cpu",
        "convert run converted/",
        "convert run one.pt",
        "diff run run/checkpoint-5",
        "validate run",
        "validate run/checkpoint-5 --against run",
    ):
        assert told in run_cli(*words.split(), exit=0).stderr, words
    ckptmove.relocate(source, tmp_path / "alone", to="cpu")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert not (tmp_path / "converted" / "checkpoint-5").exists()
    assert ckptmove.load(run, map_location="cpu").keys() >= {"model", "optimizer"}
    assert told in run_cli("relocate", "run", "--to=cpu", "--in-place", exit=0).stderr
    assert contents(run / "checkpoint-5") == contents(tmp_path / "alone")
    (run / "final").mkdir()
    shutil.copy(source / "model.safetensors", run / "final")  # now it is not all
    assert "give one of them" in run_cli("inspect", "run", exit=3).stderr


def test_a_distributed_model_in_it_is_copied_as_it_is(tmp_path: Path, run_cli: RunCli) -> None:
    """As FSDP saves it under accelerate: the optimizer of a file, the model of two ranks."""
    folder = tmp_path / "in"
    folder.mkdir()
    weight = torch.arange(6.0).reshape(3, 2)
    save(tmp_path / "model.pt", {"weight": weight}, "cuda:1")
    ckptmove.convert(tmp_path / "model.pt", folder / "pytorch_model_fsdp_0", format="dcp", ranks=2)
    save(
        folder / "optimizer.bin", {"state": {0: {"exp_avg": weight}}, "param_groups": []}, "cuda:1"
    )
    before = contents(folder / "pytorch_model_fsdp_0")
    done = run_cli("relocate", "in", "out", "--to", "cpu", exit=0)
    assert "copied unchanged, stores no devices: 3 files" in done.stdout
    assert devices(tmp_path / "out") == {"optimizer.bin: state.0.exp_avg": "cpu"}
    assert contents(tmp_path / "out" / "pytorch_model_fsdp_0") == before
    run_cli("relocate", "in", "--to", "cpu", "--in-place", exit=0)
    assert contents(folder) == contents(tmp_path / "out")


@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("name", ["model", "training"])
def test_who_may_look_into_a_folder_may_look_into_what_is_made_of_it(
    name: str, mode: int, tmp_path: Path
) -> None:
    src = tmp_path / name
    (src / "sub").mkdir(parents=True)
    save(src / "pytorch_model.bin", {"w": torch.ones(2)}, "cuda:1")
    if name == "training":
        save(src / "optimizer.pt", {"state": {}, "param_groups": []}, "cuda:1")
    (src / "config.json").write_text("{}")
    (src / "sub" / "notes.txt").write_text("x")
    (src / "pytorch_model.bin").chmod(0o600)
    src.chmod(mode)
    ckptmove.relocate(src, tmp_path / "moved", to="cpu")
    ckptmove.convert(src, f"{tmp_path}/converted/")
    for made in ("moved", "converted"):
        assert (tmp_path / made).stat().st_mode & 0o777 == mode
