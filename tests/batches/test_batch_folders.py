"""Folders in a tree: the folder of a model or a trainer is one item, also to be relocated."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from tests.conftest import RunCli, TrainingFolder
from tests.making import model_folders
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


def test_in_place_each_file_is_an_item_and_what_stores_no_devices_is_done(tree: Path) -> None:
    before = contents(tree)
    with ckptmove.batch("relocate", tree, to="cpu", in_place=True, jobs=1) as batch:
        assert set(outcomes(batch).values()) == {"done"}
    now = contents(tree)
    changed = {name for name in now if now[name] != before[name]}
    parts = ("optimizer.bin", "custom_checkpoint_0.pkl")
    folders = ("a/checkpoint-1", "a/checkpoint-2")
    assert changed == {"alone.pt"} | {f"{folder}/{part}" for folder in folders for part in parts}


def test_a_pipeline_is_one_item_with_all_its_components(tmp_path: Path) -> None:
    model_folders.copy_of("diffusers", tmp_path / "runs" / "pipe", "cuda:1")
    before = contents(tmp_path / "runs")
    with ckptmove.batch("relocate", tmp_path / "runs", tmp_path / "out", to="cpu", jobs=1) as batch:
        assert outcomes(batch) == {"pipe": "done"}
    assert contents(tmp_path / "out").keys() == before.keys()


def test_a_run_below_a_training_folder_is_not_a_part_of_it(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree / "a" / "checkpoint-1", tree / "a" / "checkpoint-2" / "checkpoint-3")
    with ckptmove.batch("relocate", tree / "a", tmp_path / "out", to="cpu", jobs=1) as batch:
        assert {"checkpoint-1", "checkpoint-2/checkpoint-3"} < outcomes(batch).keys()


def test_one_training_is_no_tree(tree: Path, run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("batch", "relocate", "runs/a/checkpoint-1", "out", "--to=cpu", exit=3)
    assert "is one checkpoint, not a tree of them (run it without batch)" in done.stderr
    assert not (tmp_path / "out").exists()
