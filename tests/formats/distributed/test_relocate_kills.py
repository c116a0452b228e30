"""A folder of DeepSpeed that is relocated, and killed: all of it is old, or all of it is new."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptmove
from tests.faults.breaking_folder import FolderScene
from tests.faults.injecting import Call, few, needs_strace
from tests.making.zero import Run, save_zero
from tests.writing.test_in_place_folder import killed_at, killed_beside


class ZeroScene(FolderScene):
    """A folder of ZeRO 2 of two ranks."""

    def fill(self) -> None:
        """Make it, and move it to a GPU."""
        weights = {"embed": torch.arange(12.0).reshape(4, 3), "head": torch.ones(5)}
        made = save_zero(self.root / "made", Run(stage=2, ranks=2, groups=[weights]))
        ckptmove.relocate(made, self.folder, to="cuda:1")
        shutil.rmtree(made)
        files = (path for path in self.folder.rglob("*_states.pt"))
        self.first = str(min(files).relative_to(self.folder))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> FolderScene:
    made = ZeroScene(tmp_path_factory.mktemp("scene"))
    assert len(made.changed) == 3
    return made


def some(calls: list[Call]) -> list[Call]:
    """Of the calls of each name, the first and the last."""
    return few(calls, 2)


@needs_strace
def test_killed_at_the_end_all_files_of_ranks_are_new(scene: FolderScene, tmp_path: Path) -> None:
    last = scene.calls(scene.in_place, tmp_path / "log")[-1:]
    assert killed_at(scene, last) == [(False, False, False)]


@pytest.mark.slow
@needs_strace
def test_killed_at_some_calls_all_files_of_ranks_are_old_or_all_are_new(
    scene: FolderScene, tmp_path: Path
) -> None:
    ends = killed_at(scene, some(scene.calls(scene.in_place, tmp_path / "log")))
    assert (False, True, True) in ends, "killed with a journal, and old again"
    assert ends[-1] == (False, False, False), "killed at the end, and new"


@pytest.mark.slow
@needs_strace
def test_killed_at_some_calls_a_new_folder_of_ranks_is_whole_or_absent(
    scene: FolderScene, tmp_path: Path
) -> None:
    ends = killed_beside(scene, "relocate", some, tmp_path / "log")
    assert list(dict.fromkeys(ends)) == [False, True]
