"""A part of a checkpoint, under other names, where one object lies in several places."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmove
from ckptmove import RefusedError, convert
from tests.oracles.readers import load
from tests.oracles.sameness import assert_same_tree


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """One dict in two places."""
    weights = {"x": torch.ones(2), "y": torch.zeros(3)}
    torch.save({"a": weights, "b": weights, "c": torch.ones(1)}, path := tmp_path / "twice.pt")
    return path


def converted(path: Path, **options: Any) -> Any:
    convert(path, out := path.with_name("out.pt"), force=True, **options)
    return load(out, weights_only=False)


@pytest.mark.parametrize(
    "options",
    [
        {"select": ["a", "b.x"]},
        {"select": ["a.x", "b"]},
        {"select": ["a.x", "b.y"]},
        {"exclude_tensors": ["a.y"]},
        {"exclude_tensors": ["b.y"]},
    ],
)
def test_what_is_kept_in_one_place_is_not_lost_by_the_other(
    options: dict[str, Any], twice: Path
) -> None:
    with pytest.raises(RefusedError, match=r"'[ab]\.[xy]' and '[ab]\.[xy]' are the same object"):
        convert(twice, twice.with_name("out.pt"), **options)


def test_what_is_alike_in_all_places_goes_and_stays(twice: Path) -> None:
    saved = torch.load(twice)
    assert converted(twice, exclude_tensors="*.y").keys() == saved.keys()
    assert [list(each) for each in converted(twice, select="?.x").values()] == [["x"], ["x"]]
    for name in ("a", "b"):
        assert_same_tree({name: saved[name]}, converted(twice, select=name))
        assert_same_tree({name: saved[name]}, ckptmove.load(twice, select=name))
        found = converted(twice, select=f"{name}.y")
        assert_same_tree({name: {"y": saved[name]["y"]}}, found)
    rest = converted(twice, exclude_tensors=["a", "b.x"])
    assert_same_tree({"b": {"y": saved["b"]["y"]}, "c": saved["c"]}, rest)


def test_attributes_that_are_also_a_dict_are_taken_out_once(tmp_path: Path) -> None:
    given = Namespace(lr=1, decay=2, name="n", beta=3)
    torch.save({"args": given, "dict": vars(given)}, path := tmp_path / "saved.pt")
    found = converted(path, exclude_tensors="*.lr")
    assert found["args"] == Namespace(decay=2, name="n", beta=3)
    assert list(found["dict"]) == ["decay", "name", "beta"]


def test_what_holds_itself_can_be_selected_from(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"x": torch.ones(1), "y": torch.ones(2)}
    saved["inner"] = [saved]
    torch.save(saved, path := tmp_path / "saved.pt")
    found = converted(path, exclude_tensors="y")
    assert list(found) == ["x", "inner"]
    assert found["inner"][0] is found


@pytest.mark.slow
def test_a_few_objects_in_very_many_places(tmp_path: Path) -> None:
    """As many paths lead to the inmost as there are atoms in a drop of water."""
    inmost = {"x": torch.ones(1), "y": torch.ones(2)}
    many: Any = inmost
    for _ in range(60):
        many = [many, many]
    torch.save({"many": many, "c": torch.ones(3)}, path := tmp_path / "saved.pt")
    assert list(ckptmove.load(path, select="many")) == ["many"]
    assert list(converted(path, exclude_tensors="many")) == ["c"]
    with pytest.raises(RefusedError, match="too many places"):
        ckptmove.load(path, select="*.x")


def test_modules_that_two_state_dicts_tell_of_are_renamed_once(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(1, 1)).state_dict()
    torch.save({"model": state, "ema": copy.copy(state)}, path := tmp_path / "saved.pt")
    found = converted(path, add_prefix="net")
    for each in found.values():
        assert list(each) == ["net.0.weight", "net.0.bias"]
        assert list(each._metadata) == ["net", "net.0"]
