"""The folders are what the frameworks save, and the frameworks go on from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TrainingFolder
from tests.making.training_folders import FOLDERS, GOES_ON
from tests.oracles.readers import labels
from tests.oracles.sameness import assert_same_tree

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".optim", ".randomstate")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_saved_names_the_device(name: str, training_folder: TrainingFolder) -> None:
    """By torch's own reading of the tags; steps and RNG states are on the CPU."""
    folder = training_folder(name, "cuda:1")
    found = dict[str, str]()
    for path in folder.rglob("*"):
        if path.suffix in SUFFIXES or path.name.startswith("custom"):
            found |= {f"{path.name}: {key}": device for key, device in labels(path).items()}
    assert "cuda:1" in found.values()
    host = [key for key, device in found.items() if device == "cpu"]
    assert all("step" in key or "rng" in key or "cpu" in key for key in host), host


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", GOES_ON)
def test_the_library_goes_on_from_it_the_same_each_time(
    name: str, training_folder: TrainingFolder, tmp_path: Path
) -> None:
    folder = training_folder(name, "cpu")
    first, second = (GOES_ON[name](folder, tmp_path / each) for each in ("first", "second"))
    assert_same_tree(first, second)
