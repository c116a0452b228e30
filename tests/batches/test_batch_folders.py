"""Folders in a tree: the folder of a model or a trainer is one item, also to be relocated."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from tests.conftest import RunCli, TrainingFolder
from tests.faults.injecting import command, needs_strace, run
from tests.making import model_folders
from tests.making.distributed import save_dcp
from tests.making.saving import save
from tests.making.trees import contents, left_over, outcomes
from tests.oracles.readers import labels


@pytest.fixture
def tree(training_folder: TrainingFolder, tmp_path: Path) -> Path:
    """Two checkpoints of accelerate, a model without devices, and files outside of folders."""
    root = tmp_path / "runs"
    state = training_folder("accelerate", "cuda:1")
    for name in ("a/checkpoint-1", "a/checkpoint-2"):
        shutil.copytree(state, root / name)
    (root / "model").mkdir()
    for path in (root / "model" / "model.safetensors", root / "alone.safetensors"):
        save_file({"w": torch.ones(3)}, path, {"format": "pt"})
    (root / "model" / "config.json").write_text("{}")
    save(root / "alone.pt", {"w": torch.ones(3)}, "cuda:1")
    (root / "notes.txt").write_text("precious")
    return root


def test_each_folder_is_one_item_and_complete(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = contents(tree)
    with ckptmove.batch("relocate", tree, out, to="cpu", jobs=1) as batch:
        found = outcomes(batch)
    items = ("a/checkpoint-1", "a/checkpoint-2", "alone.pt", "alone.safetensors", "model")
    assert found == dict.fromkeys(items, "done")
    made = contents(out)
    assert made.keys() == before.keys() - {"notes.txt"}
    for name in ("optimizer.bin", "custom_checkpoint_0.pkl"):
        assert set(labels(out / "a/checkpoint-2" / name).values()) == {"cpu"}
    ckptmove.relocate(tree / "a/checkpoint-1", tmp_path / "alone", to="cpu")
    assert contents(tmp_path / "alone") == contents(out / "a/checkpoint-1")
    for name in ("model/config.json", "model/model.safetensors", "alone.safetensors"):
        assert made[name] == before[name]
    assert left_over(tmp_path) == []
    with ckptmove.batch("relocate", tree, out, to="cpu", jobs=1) as batch:
        assert len(batch.plan.done) == len(items)
        assert outcomes(batch) == dict.fromkeys(items, "skipped")


def test_an_output_that_is_there_is_compared(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "a").mkdir(parents=True)
    ckptmove.relocate(tree / "a/checkpoint-1", out / "a/checkpoint-1", to="cpu")
    ckptmove.relocate(tree / "a/checkpoint-2", out / "a/checkpoint-2", to="cuda:3")
    with ckptmove.batch("relocate", tree, out, to="cpu", jobs=1, include="checkpoint-*") as batch:
        assert outcomes(batch) == {"a/checkpoint-1": "skipped", "a/checkpoint-2": "refused"}
    with ckptmove.batch("relocate", tree, out, to="cpu", jobs=1, force=True) as batch:
        assert "refused" not in outcomes(batch).values()
    assert contents(out / "a/checkpoint-1") == contents(out / "a/checkpoint-2")


def test_a_damaged_file_fails_its_folder_alone(tree: Path, tmp_path: Path, run_cli: RunCli) -> None:
    damaged = tree / "a" / "checkpoint-1" / "optimizer.bin"
    damaged.write_bytes(damaged.read_bytes()[:-90])
    done = run_cli("batch", "relocate", tree, tmp_path / "out", "--to", "cpu", exit=1)
    assert "checkpoint-1" in done.stdout + done.stderr
    assert not (tmp_path / "out" / "a" / "checkpoint-1").exists()
    assert len(contents(tmp_path / "out" / "a" / "checkpoint-2")) == 5


def test_in_place_a_folder_is_an_item_and_what_stores_no_devices_is_done(tree: Path) -> None:
    before = contents(tree)
    with ckptmove.batch("relocate", tree, to="cpu", in_place=True, jobs=1) as batch:
        items = {"a/checkpoint-1", "a/checkpoint-2", "alone.pt", "alone.safetensors", "model"}
        assert outcomes(batch) == dict.fromkeys(items, "done")
    with ckptmove.batch("relocate", tree, to="cpu", in_place=True, jobs=1) as batch:
        assert outcomes(batch) == dict.fromkeys(items, "skipped")
    now = contents(tree)
    changed = {name for name in now if now[name] != before[name]}
    parts = ("optimizer.bin", "custom_checkpoint_0.pkl")
    folders = ("a/checkpoint-1", "a/checkpoint-2")
    assert changed == {"alone.pt"} | {f"{folder}/{part}" for folder in folders for part in parts}


def test_in_place_what_did_not_change_is_counted_so(tmp_path: Path, run_cli: RunCli) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    save(tree / "a.pt", {"w": torch.ones(2)}, "cuda:1")
    save(tree / "b.pt", {"w": torch.ones(2)}, "cpu")
    save_file({"w": torch.ones(2)}, tree / "c.safetensors")
    words = ("batch", "relocate", "tree", "--to", "cpu", "--in-place")
    assert "relocate 1 item, " in (told := run_cli(*words, "--dry-run", exit=0).stdout)
    assert told.endswith("; 2 unchanged; in place, where only device tags change\n")
    told = run_cli(*words, exit=0).stdout
    assert told.startswith("relocated 1 item, ")
    assert told.endswith("; 2 unchanged\n")


def test_in_place_all_files_of_a_folder_change_or_none(tree: Path) -> None:
    held = tree / "a" / "checkpoint-1" / "optimizer.bin"
    (tree / "a" / "link.bin").hardlink_to(held)  # not changed without --force
    before = contents(tree)
    options: dict[str, Any] = {"to": "cpu", "in_place": True, "jobs": 1, "include": "checkpoint-*"}
    with ckptmove.batch("relocate", tree, **options) as batch:
        assert outcomes(batch) == {"a/checkpoint-1": "refused", "a/checkpoint-2": "done"}
    now = contents(tree)
    changed = {name.rpartition("/")[0] for name in now if now[name] != before[name]}
    assert changed - {""} == {"a/checkpoint-2"}


@pytest.mark.slow
def test_in_place_a_map_is_not_applied_twice(tree: Path) -> None:
    swap = {"cuda:1": "cuda:0", "cuda:0": "cuda:1"}
    options: dict[str, Any] = {"map": swap, "in_place": True, "jobs": 1}
    with ckptmove.batch("relocate", tree, **options) as batch:
        assert set(outcomes(batch).values()) == {"done"}
    once = contents(tree)
    for name in ("a/checkpoint-1/optimizer.bin", "a/checkpoint-1/model.safetensors"):
        (tree / name).touch()
    with ckptmove.batch("relocate", tree, **options) as batch:
        assert outcomes(batch)["a/checkpoint-1"] == "refused"
    assert contents(tree) == once


@pytest.mark.slow
def test_a_pipeline_is_one_item_with_all_its_components(tmp_path: Path) -> None:
    model_folders.copy_of("diffusers", tmp_path / "runs" / "pipe", "cuda:1")
    before = contents(tmp_path / "runs")
    with ckptmove.batch("relocate", tmp_path / "runs", tmp_path / "out", to="cpu", jobs=1) as batch:
        assert outcomes(batch) == {"pipe": "done"}
    assert contents(tmp_path / "out").keys() == before.keys()


@pytest.mark.slow
def test_the_epochs_of_torchtune_are_one_item_with_its_recipe(tmp_path: Path) -> None:
    model_folders.torchtune_run(tmp_path / "runs" / "tuned", "cuda:1")
    before = contents(tmp_path / "runs")
    with ckptmove.batch("relocate", tmp_path / "runs", tmp_path / "out", to="cpu", jobs=1) as batch:
        assert outcomes(batch) == {"tuned": "done"}
    assert contents(tmp_path / "out").keys() == before.keys()
    shutil.rmtree(tmp_path / "runs" / "tuned" / "recipe_state")
    with ckptmove.batch("inspect", tmp_path / "runs", jobs=1) as batch:
        assert outcomes(batch).keys() == {
            f"tuned/epoch_{n}/model-00001-of-00001.bin" for n in range(2)
        }


def test_a_run_below_a_training_folder_is_not_a_part_of_it(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree / "a" / "checkpoint-1", tree / "a" / "checkpoint-2" / "checkpoint-3")
    with ckptmove.batch("relocate", tree / "a", tmp_path / "out", to="cpu", jobs=1) as batch:
        assert {"checkpoint-1", "checkpoint-2/checkpoint-3"} < outcomes(batch).keys()


@pytest.mark.slow
def test_weights_beside_checkpoints_get_the_name_that_libraries_load(
    training_folder: TrainingFolder, tmp_path: Path
) -> None:
    shutil.copytree(training_folder("accelerate"), tmp_path / "runs" / "checkpoint-1")
    torch.save({"w": torch.ones(2)}, tmp_path / "runs" / "pytorch_model.bin")
    for dry in (True, False):
        with ckptmove.batch("convert", tmp_path / "runs", tmp_path / "out", dry_run=dry) as batch:
            assert {Path(each.output or "").name for each in batch} == {
                "checkpoint-1",
                "model.safetensors",
            }
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w"}


def test_one_training_is_no_tree(tree: Path, run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("batch", "relocate", "runs/a/checkpoint-1", "out", "--to=cpu", exit=3)
    assert "is one checkpoint, not a tree of them (run it without batch)" in done.stderr
    assert not (tmp_path / "out").exists()


# -- a run, with a model beside its checkpoints ----------------------------------------------------


@pytest.fixture
def run_folder(tree: Path) -> Path:
    """The folder of a run: two checkpoints, and the model of the best one with its files."""
    root = tree / "a"
    save_file({"w": torch.ones(3)}, root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_text('{"model_type": "bert", "torch_dtype": "float32"}')
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "vocab.txt").write_text("a b c")
    return root


@pytest.mark.sample(1)
@pytest.mark.parametrize("whole", [True, False], ids=["the run is the tree", "it is below"])
def test_a_model_beside_its_checkpoints_keeps_its_files(
    whole: bool, run_folder: Path, tmp_path: Path
) -> None:
    tree = run_folder if whole else run_folder.parent
    (run_folder.parent / "alone.pt").unlink()
    with ckptmove.batch("relocate", tree, tmp_path / "out", to="cpu", jobs=1) as batch:
        assert set(outcomes(batch).values()) == {"done"}
    made, before = contents(tmp_path / "out"), contents(tree)
    assert made.keys() == before.keys() - {"notes.txt"}
    with ckptmove.batch("convert", tree, tmp_path / "half", jobs=1, dtype="bf16") as batch:
        assert set(outcomes(batch).values()) == {"done"}
    there = tmp_path / "half" / ("" if whole else "a")
    assert '"torch_dtype": "bfloat16"' in (there / "config.json").read_text()
    assert (there / "tokenizer" / "vocab.txt").is_file()
    assert (there / "checkpoint-1" / "model.safetensors").is_file()
    with ckptmove.batch("convert", tree, tmp_path / "half", jobs=1, dtype="bf16") as batch:
        assert set(outcomes(batch).values()) == {"skipped"}


@pytest.mark.slow
def test_a_folder_of_dcp_is_one_item_that_is_copied(tree: Path, tmp_path: Path) -> None:
    save_dcp(tree / "step-1" / "dcp", {"w": torch.arange(6.0)})
    for dry in (True, False):
        with ckptmove.batch(
            "relocate", tree, tmp_path / "out", to="cpu", jobs=1, dry_run=dry, strict=True
        ) as batch:
            found = {each.name: each for each in batch}
        for name in ("step-1/dcp", "model", "alone.safetensors"):
            assert (found[name].outcome, found[name].copied) == ("done", True)
        assert not found["a/checkpoint-1"].copied
    before = contents(tree / "step-1")
    assert contents(tmp_path / "out" / "step-1") == before
    with ckptmove.batch("relocate", tree, to="cpu", in_place=True, jobs=1) as batch:
        assert outcomes(batch)["step-1/dcp"] == "done"
    assert contents(tree / "step-1") == before
    (cut,) = (tree / "step-1" / "dcp").glob("*.distcp")
    os.truncate(cut, cut.stat().st_size - 1)
    for options in ({"dst": tmp_path / "second"}, {"in_place": True}):
        with ckptmove.batch("relocate", tree, to="cpu", jobs=1, **options) as batch:
            assert outcomes(batch)["step-1/dcp"] == "failed"
    assert not (tmp_path / "second" / "step-1" / "dcp").exists()


# -- pickles that stay -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pickle_that_stays_is_named_and_foretold(tree: Path, run_cli: RunCli) -> None:
    (tree / "alone.pt").unlink()
    (tree / "a" / "checkpoint-1" / "labels.pkl").write_bytes(pickle.dumps({"a": torch.ones(2)}))
    command = ("batch", "convert", "runs", "out", "--jobs=1")
    line = (
        "failed  a/checkpoint-1 → out/a/checkpoint-1: labels.pkl stays a pickle "
        "(--keep-files 'labels.pkl' accepts that)"
    )
    for more in (["--dry-run"], [], ["--dry-run"], []):  # the last two find the output
        done = run_cli(*command, *more, exit=1)
        assert line in done.stdout.splitlines()
    assert (tree.parent / "out" / "a" / "checkpoint-1" / "labels.pkl").is_file()
    run_cli(*command, "--keep-files", "labels.pkl", "--dry-run", exit=0)
    run_cli(*command, "--keep-files", "labels.pkl", exit=0)
    run_cli(*command, "--keep-files", "labels.pkl", exit=0)


@needs_strace
def test_what_was_interrupted_in_place_is_recovered_in_the_whole_tree(
    tree: Path, run_cli: RunCli
) -> None:
    before = contents(tree)
    folder = tree / "a" / "checkpoint-1"
    command_line = command("relocate", "-q", folder, "--to=cpu", "--in-place")
    assert run(command_line, inject="unlinkat:signal=KILL:when=1").code < 0
    assert contents(tree) != before
    done = run_cli("recover", "runs", exit=0)
    assert "a/checkpoint-1" in done.stdout
    assert contents(tree) == before
    assert run(command_line, inject="unlinkat:signal=KILL:when=1").code < 0
    for _ in range(2):  # the first undoes it and changes all, the second has nothing to do
        run_cli("batch", "relocate", "runs", "--to=cpu", "--in-place", exit=0)
    devices = ckptmove.inspect(folder, select="optimizer.*").devices
    assert devices.keys() == {"cpu"}


@pytest.mark.slow
@needs_strace
def test_killed_at_any_call_in_place_each_folder_is_old_or_new_and_the_next_run_ends_it(
    tmp_path: Path, run_cli: RunCli
) -> None:
    """Every call that changes a file system, of whichever process of the batch makes it."""
    tree, to = tmp_path / "runs", ("--to=cpu", "--in-place", "--jobs=1")
    for n in (1, 2):
        folder = tree / f"checkpoint-{n}"
        (folder / "below").mkdir(parents=True)
        save(folder / "optimizer.pt", {"state": {0: torch.ones(n)}, "param_groups": []}, "cuda:1")
        save(folder / "below" / "more.pt", {"w": torch.ones(3)}, "cuda:1")
        save_file({"w": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    old = contents(tree)
    batch = command("batch", "relocate", "-q", tree, *to)
    assert run(batch, log=tmp_path / "log", names=_CHANGING).code == 0
    new = contents(tree)
    changed = sorted(name for name in old if old[name] != new[name])
    assert [name.rpartition("/")[2] for name in changed] == ["more.pt", "optimizer.pt"] * 2
    text = (tmp_path / "log").read_text(errors="replace")
    most = dict.fromkeys(_CHANGING, 0)  # of the calls that one process makes
    for (_, name), n in Counter(re.findall(r"^(\d+) +(\w+)\(", text, re.MULTILINE)).items():
        most[name] = max(most[name], n)
    ends = set[bool]()
    for name, ordinal in [(each, n) for each in most for n in range(1, 1 + most[each])]:
        shutil.rmtree(tree)
        for each, content in old.items():
            (tree / each).parent.mkdir(parents=True, exist_ok=True)
            (tree / each).write_bytes(content)
        run(batch, inject=f"{name}:signal=KILL:when={ordinal}")
        run_cli("recover", "-q", tree, exit=0)
        found = contents(tree)
        for start in ("checkpoint-1/", "checkpoint-2/"):
            ours = [each for each in changed if each.startswith(start)]
            states = {found[each] == new[each] for each in ours}
            assert len(states) == 1, (name, ordinal, start)
            assert all(found[each] in (old[each], new[each]) for each in ours)
            ends |= states
        run_cli("batch", "relocate", "-q", tree, *to, exit=0)
        assert {each: contents(tree)[each] for each in new} == new, (name, ordinal)
    assert ends == {True, False}


_CHANGING = ("pwrite64", "fsync", "renameat", "renameat2", "rename", "unlinkat", "unlink")


def test_snapshots_of_the_cache_of_the_hub_are_items_and_blobs_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    save(whole / "pytorch_model.bin", {"w": torch.ones(3)}, "cuda:1")
    (whole / "config.json").write_text("{}")
    hub = tmp_path / "hub"
    for name in ("models--a--b", "models--a--c"):
        model_folders.cached_on_hub(whole, hub / name)
    shutil.copytree(hub / "models--a--b" / "blobs", hub / "other" / "blobs")  # anyone's
    (hub / "other" / "snapshots").mkdir()
    with ckptmove.batch("inspect", hub, jobs=1) as batch:
        found = outcomes(batch)
        notes = batch.plan.notes
    inside = model_folders.SNAPSHOT
    assert found.keys() - {f"models--a--{x}/{inside}" for x in "bc"} == {f"other/blobs/{1:064x}"}
    assert len(found) == 3
    said = "left out, since snapshots link to what is in it: models--a--b/blobs and 1 more"
    assert said in notes
    monkeypatch.chdir(hub / "models--a--b")
    with ckptmove.batch("relocate", ".", tmp_path / "out", to="cpu", jobs=1) as batch:
        assert outcomes(batch) == {inside: "done"}
    made = tmp_path / "out" / inside / "pytorch_model.bin"
    assert set(labels(made).values()) == {"cpu"}
    assert not made.is_symlink()
