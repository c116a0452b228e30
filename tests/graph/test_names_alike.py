"""usual_names(): the names that a listing of the whole content gives as well, or nothing."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmove import diff, formats
from ckptmove.graph.compare.names_alike import names_alike, usual_names
from ckptmove.graph.draft import CheckpointGraph
from tests.making.checkpoints import MAKERS, save


def names_in(path: Path) -> tuple[list[str] | None, CheckpointGraph]:
    with formats.open_checkpoint(path) as read:
        draft = read.draft(nested=True, program=True)
        return usual_names(draft.graph), draft


def assert_as_listed(path: Path) -> list[str] | None:
    """Where there are names, they are those of the listing, but for quoting what is alike."""
    names, draft = names_in(path)
    listed = draft.list_contents()
    assert names_alike(draft) == listed.alike
    if names is not None:
        assert len(names) == len(listed.tensors)
        apart = {entry.name for entry in listed.tensors}
        assert {name for name in names if name not in listed.alike} <= apart
        if not listed.alike:
            assert sorted(names) == sorted(apart)
    return names


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", MAKERS)
def test_whatever_people_save(name: str, tmp_path: Path) -> None:
    assert_as_listed(save(tmp_path / "made.pt", MAKERS[name]()))


keys = st.sampled_from(["a", "b", "a.b", "", "0", "b.0", "state", "optimizer", 0, 1, True, (1, 2)])


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, children, max_size=4)
    lists = st.lists(children, max_size=3)
    twice = children.map(lambda child: [child, {"b": child}])
    return st.one_of(dicts, dicts.map(OrderedDict), lists, lists.map(tuple), twice)


leaves = st.one_of(st.builds(lambda: torch.ones(2)), st.sampled_from([None, 1, 0.5, "cpu", b"x"]))


@given(tree=st.recursive(leaves, _containers, max_leaves=14))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree(tree: object, tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "made.pt")
    assert_as_listed(tmp_path / "made.pt")


def test_a_model_and_its_optimizer_are_usual(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    names = assert_as_listed(save(tmp_path / "made.pt", saved))
    assert names is not None
    assert "model.weight" in names
    assert "optimizer.state.0.exp_avg" in names


def test_names_alike_quote_their_keys_in_a_difference(tmp_path: Path) -> None:
    for n, path in enumerate((tmp_path / "a.pt", tmp_path / "b.pt")):
        torch.save({"a": {"b": torch.ones(2)}, "a.b": torch.ones(2) + n}, path)
    assert assert_as_listed(tmp_path / "a.pt") == ["a.b", "a.b"]
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [each.name for each in found.differences] == ['"a.b"']


def test_a_tensor_in_very_many_places_is_left_to_the_listing(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    torch.save([tensor] * 2000, tmp_path / "made.pt")
    assert names_in(tmp_path / "made.pt")[0] is None
