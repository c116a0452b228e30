"""Folders within folders, deeper than Python calls functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptmove import convert, inspect, recover, relocate, validate
from ckptmove.sources.place import walk
from ckptmove.writing.staged_folder import remove_tree
from tests.making.saving import tagging

DEPTH, LIMIT = 640, 600


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a training, with empty folders in it; named from where it is."""
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    folder.mkdir()
    with tagging("cuda:0"):
        torch.save({"w": torch.ones(2)}, folder / "params.pt")
        torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    before = sys.getrecursionlimit()
    at = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    sys.setrecursionlimit(LIMIT)
    yield folder
    sys.setrecursionlimit(before)
    for each in Path().iterdir():
        remove_tree(str(each))


def depth_of(folder: str) -> int:
    return max(inside.count("/") for inside, _, _ in walk(folder))


def test_deep_folders_are_looked_into_and_changed_in_place(deep: Path) -> None:
    assert set(inspect(deep).devices) == {"cuda:0"}
    assert validate(deep).of("container").outcome == "passed"
    assert not recover(deep).files
    relocate(deep, to="cpu", in_place=True)
    assert set(inspect(deep).devices) == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("verb", [relocate, convert])
def test_deep_folders_are_written(verb: object, deep: Path) -> None:
    assert callable(verb)
    for force in (False, True):  # the old one is removed
        verb(deep, "out", to="cpu", force=force)
        assert depth_of("out") == DEPTH
        assert {each.name for each in Path().iterdir()} == {"run", "out"}


def test_what_is_removed_is_all_of_it_and_nothing_that_links_lead_to(deep: Path) -> None:
    outside = Path("outside")
    outside.mkdir()
    (outside / "kept").write_text("x")
    (deep / "d" / "d" / "folder").symlink_to(outside.resolve())
    (deep / "d" / "file").symlink_to(outside.resolve() / "kept")
    remove_tree("run")
    assert not deep.exists()
    assert (outside / "kept").read_text() == "x"
