"""Folders of training: every file in them counts, whichever library wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove import CheckFailed, CorruptError, inspect, load
from tests.making.frameworks import hf_trainer_folder
from tests.making.saving import tagging
from tests.oracles.sameness import assert_same_tree


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a Hugging Face Trainer saves, its optimizer on cuda:0."""
    return hf_trainer_folder(tmp_path_factory.mktemp("run"), "cuda:0")


def test_everything_in_a_trainers_folder_is_told(trainer: Path) -> None:
    manifest = inspect(trainer)
    assert manifest.format == "training-folder"
    assert set(manifest.sections) == {"model", "optimizer", "rng"}
    assert {e.device for e in manifest.tensors if e.name.endswith(".exp_avg")} == {"cuda:0"}
    with pytest.raises(CheckFailed, match=r"'optimizer\.state\.0\.exp_avg' is on cuda:0"):
        inspect(trainer, require="cpu")
    names = {entry.name for entry in inspect(trainer, select="optimizer").tensors}
    assert names == {e.name for e in manifest.tensors if e.name.startswith("optimizer.")}


def test_its_parts_are_what_torch_loads(trainer: Path) -> None:
    loaded = load(trainer, "cpu", select=["optimizer", "scheduler"])
    for name in ("optimizer", "scheduler"):
        whole = torch.load(trainer / f"{name}.pt", weights_only=True, map_location="cpu")
        assert_same_tree(loaded[name], whole)


def test_parts_of_the_same_names_stay_apart(tmp_path: Path) -> None:
    ones, twos = {"w": torch.ones(2)}, {"w": torch.full((2,), 2.0)}
    save_file(ones, tmp_path / "model.safetensors")
    save_file(twos, tmp_path / "model_1.safetensors")
    torch.save(ones, tmp_path / "pytorch_model.bin")
    for rank in range(2):
        with tagging(f"cuda:{rank}"):
            torch.save({"state": twos}, tmp_path / f"random_states_{rank}.pkl")
    manifest = inspect(tmp_path)
    assert [(entry.name, entry.device) for entry in manifest.tensors] == [
        *(("model_1.w", "cpu"), ("model.w", "cpu"), ("pytorch_model.w", "cpu")),
        *(("rng.0.state.w", "cuda:0"), ("rng.1.state.w", "cuda:1")),
    ]
    assert len(manifest.storages) == 5
    assert "pytorch_model.bin seems to hold the same weights as model.safetensors" in (
        manifest.warnings
    )
    found = load(tmp_path, "cpu")
    assert_same_tree(found["model_1"], twos)
    assert_same_tree(found["model"], ones)
    assert_same_tree(found["rng"][1], {"state": twos})


def test_damage_in_one_file_is_named(trainer: Path, tmp_path: Path) -> None:
    for path in trainer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "optimizer.pt").write_bytes((trainer / "optimizer.pt").read_bytes()[:1000])
    with pytest.raises(CorruptError) as raised:
        inspect(tmp_path)
    assert raised.value.path == str(tmp_path / "optimizer.pt")
    assert not ckptmove.validate(tmp_path).ok
