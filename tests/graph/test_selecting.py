"""Names are each of one tensor alone, and a section's name selects what inspect shows under it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import ckptmove
from ckptmove import RefusedError, convert, diff, formats, inspect
from ckptmove.graph.edit.narrow import leave
from ckptmove.manifest.manifest import Manifest
from tests.conftest import RunCli
from tests.making.checkpoints import MAKERS
from tests.making.scripts import SCRIPT_MAKERS
from tests.oracles.sameness import assert_same_tree


def saved(content: object, folder: Path, name: str = "run.pt") -> Path:
    torch.save(content, path := folder / name)
    return path


# -- sections ----------------------------------------------------------------------------------

SEVERAL = {"gan", "odd_names"}  # models, of which none is meant


def check_sections(path: Path) -> None:
    """Each section's name leaves just the tensors that inspect shows in it."""
    names: dict[str, set[str]] = {}
    with formats.open_checkpoint(path) as found:
        shown = {name for name, total in found.manifest.sections.items() if total.tensors}
        for entry in found.draft().list_contents().tensors:
            names.setdefault(str(entry.section), set()).add(entry.name)
    assert names.keys() <= shown
    for section, wanted in names.items():
        with formats.open_checkpoint(path) as found:
            draft = found.draft()
            if path.stem in SEVERAL and section == "model":
                with pytest.raises(RefusedError, match="several models"):
                    leave(draft, select=[section])
                continue
            left = leave(draft, select=[section])
            told = {entry.name for entry in draft.list_contents().tensors}
        if section == "model" and left.to_json() is not None:
            others = (left.to_json() or {})["others"]
            beside = tuple(f"{each['name']}." for each in others if each["section"] == section)
            wanted = {name for name in wanted if not name.startswith(beside)}
        assert told == wanted, section


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", MAKERS)
def test_a_section_is_selected_by_its_name(name: str, tmp_path: Path) -> None:
    check_sections(saved(MAKERS[name](), tmp_path, f"{name}.pt"))


def test_sections_of_public_files_are_selected_by_their_names(corpus: Path) -> None:
    met = 0
    for path in sorted(corpus.iterdir()):
        try:
            manifest = inspect(path)
        except ckptmove.InputError:
            continue
        if manifest.tensors and path.stem != "Hopper-v2_ppo" and "Hopper" not in path.name:
            check_sections(path)
            met += 1
    assert met > 30


def test_a_section_whose_name_something_else_has(tmp_path: Path) -> None:
    model, optimizer = MAKERS["adamw_training"]()["model"], MAKERS["sgd"]()["optimizer"]  # type: ignore[index]
    for content in ({"model": None, "net": model}, {"model": "resnet", "net": {"sd": model}}):
        found = ckptmove.load(saved(content, tmp_path), select="model")
        assert found.keys() == {"net"}
    content = {"rng": {"python": 3, "torch": torch.get_rng_state()}, "more": torch.get_rng_state()}
    found = ckptmove.load(saved({**content, "x": torch.ones(1)}, tmp_path), select="rng")
    assert found.keys() == content.keys()
    assert found["rng"]["python"] == 3
    both = {"optimizer": "adam", "opt": optimizer, "x": 1}
    found = ckptmove.load(saved({**both, "model": model}, tmp_path), select="model")
    assert found.keys() == {"model"}


def test_what_a_section_is_not(tmp_path: Path) -> None:
    path = saved(
        {"model": {"w": torch.ones(1), "b": torch.ones(1)}, "t": [torch.ones(2)]}, tmp_path
    )
    assert ckptmove.load(path, select="other").keys() == {"t"}
    out = tmp_path / "out.pt"
    assert convert(path, out, exclude_tensors="model").left_out == ("model",)
    assert [entry.name for entry in inspect(out).tensors] == ["t.0"]


# -- lookalikes --------------------------------------------------------------------------------


class Storage:
    """As torch_geometric/data/storage.py has it."""

    def __init__(self, **mapping: torch.Tensor) -> None:
        self._mapping = mapping


class Data:
    """As torch_geometric/data/data.py has it."""

    def __init__(self, **mapping: torch.Tensor) -> None:
        self._store = Storage(**mapping)


Storage.__module__ = "torch_geometric.data.storage"
Data.__module__ = "torch_geometric.data.data"


def graphs() -> Iterator[object]:
    yield {"x": torch.ones(3, 2), "edge_index": torch.zeros(2, 4, dtype=torch.int64)}
    yield (
        {"x": torch.ones(3, 2), "edge_index": torch.zeros(2, 4, dtype=torch.int64)},
        {"x": torch.tensor([0, 3]), "edge_index": torch.tensor([0, 4])},
    )


@pytest.mark.parametrize("n", range(2))
def test_graphs_are_no_models(n: int, tmp_path: Path) -> None:
    path = saved(list(graphs())[n], tmp_path)
    assert {entry.section for entry in inspect(path).tensors} == {"other"}
    with pytest.raises(RefusedError, match="no weights of a model"):
        convert(path, tmp_path / "out.safetensors", preset="hf")


def test_graphs_of_pyg_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch_geometric", "torch_geometric.data"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for kind in (Data, Storage):
        module = ModuleType(kind.__module__)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, kind.__module__, module)
    path = saved([Data(x=torch.ones(3), y=torch.ones(1))], tmp_path)
    assert [entry.section for entry in inspect(path).tensors] == ["other", "other"]


def test_example_inputs_are_no_part_of_a_program(tmp_path: Path) -> None:
    SCRIPT_MAKERS["traced"](tmp_path / "traced.pt", "cpu")
    found = {
        entry.name.split(".")[0]: entry.section for entry in inspect(tmp_path / "traced.pt").tensors
    }
    assert found["traced_inputs"] == "other"


def test_a_module_does_not_drown_what_is_besides(tmp_path: Path, run_cli: RunCli) -> None:
    class Net(nn.Module):
        pass

    Net.__qualname__ = "Sequential"
    Net.__module__ = "torch.nn.modules.container"
    made = nn.Sequential(nn.Linear(1, 1))
    made.settings = {"depth": 3}  # type: ignore[assignment]
    saved(made, tmp_path)
    shown = run_cli("inspect", "run.pt", exit=0).stdout
    assert "other values: settings (dict of 1)\n" in shown
    assert "builtins.set" not in shown


# -- names -------------------------------------------------------------------------------------

ALIKE: list[tuple[Any, dict[str, float]]] = [
    (
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1) * 2}},
        {'"a.b"': 1, "a.b": 2},
    ),
    (
        {"a.b": {"c": torch.ones(1)}, "a": {"b.c": torch.ones(1) * 2}, "d.e": torch.ones(1) * 3},
        {'"a.b".c': 1, 'a."b.c"': 2, "d.e": 3},
    ),
    ({0: torch.ones(1), "0": torch.ones(1) * 2}, {"0": 1, '"0"': 2}),
    ({None: torch.ones(1), "None": torch.ones(1) * 2}, {"None": 1, '"None"': 2}),
    ({1.5: torch.ones(1), 1: {5: torch.ones(1) * 2}}, {"(1.5)": 1, "1.5": 2}),
    ([{"x.0": torch.ones(1), "x": [torch.ones(1) * 2]}], {'0."x.0"': 1, "0.x.0": 2}),
]


def valued(manifest: Manifest, path: Path) -> dict[str, float]:
    """The value of each tensor by its name, read by its path."""
    tree = torch.load(path, weights_only=False)
    found = {}
    for entry in manifest.tensors:
        value = tree
        for key in entry.path:
            value = value[key]
        found[entry.name] = float(value)
    return found


@pytest.mark.parametrize(("content", "names"), ALIKE)
def test_no_two_tensors_have_one_name(
    content: Any, names: dict[str, float], tmp_path: Path
) -> None:
    path = saved(content, tmp_path)
    assert valued(inspect(path), path) == names
    for name, value in names.items():
        report = convert(path, out := tmp_path / "out.pt", select=name, force=True)
        assert list(valued(inspect(out), out).values()) == [value]
        convert(path, out, exclude_tensors=name, force=True)
        assert sorted(valued(inspect(out), out).values()) == sorted({*names.values()} - {value})
        assert float(ckptmove.load(convert(path, out, root=name, force=True).destination)) == value
        del report
        ckptmove.relocate(path, out, place={name: "cuda:1"}, force=True)
        moved = {e.name: e.device for e in inspect(out).tensors}
        assert moved == {each: "cuda:1" if each == name else "cpu" for each in names}
    convert(path, tensors := tmp_path / "out.safetensors")
    with safe_open(tensors, framework="pt") as file:
        assert {key: float(file.get_tensor(key)) for key in file.keys()} == names  # noqa: SIM118
    convert(tensors, back := tmp_path / "back.pt")
    assert_same_tree(content, torch.load(back, weights_only=False))
    other = saved(content, tmp_path, "other.pt")
    assert diff(path, other).equal
    tree = torch.load(other, weights_only=False)
    holder = tree[0] if isinstance(tree, list) else tree
    first = next(iter(holder.values()))
    (first if isinstance(first, torch.Tensor) else next(iter(first.values()))).add_(7)
    found = diff(path, saved(tree, tmp_path, "other.pt"))
    assert [each.name for each in found.differences] == [next(iter(names))]


def test_several_things_under_one_name_are_told_apart(tmp_path: Path) -> None:
    path = saved({"a.b": {"x": torch.ones(1)}, "a": {"b": {"y": torch.ones(1)}}}, tmp_path)
    for root, key in (('"a.b"', "x"), ("a.b", "y")):
        convert(path, tmp_path / "out.pt", root=root, force=True)
        assert torch.load(tmp_path / "out.pt").keys() == {key}
    path = saved({"a.b": {"c": torch.ones(1)}, "a": {"b.c": torch.ones(1)}}, tmp_path)
    with pytest.raises(RefusedError, match=r"several entries are called 'a\.b\.c'") as refused:
        convert(path, tmp_path / "no.pt", root="a.b.c")
    assert {'"a.b".c', 'a."b.c"'} <= {*str(refused.value.hint).split()}


def test_usual_names_are_not_quoted(tmp_path: Path) -> None:
    state = OrderedDict({"layers.0.weight": torch.ones(1), "layers.1.weight": torch.ones(1)})
    path = saved({"model": state, "layers": {0: {"weight": torch.ones(1)}}}, tmp_path)
    names = [entry.name for entry in inspect(path).tensors]
    assert names == ["model.layers.0.weight", "model.layers.1.weight", "layers.0.weight"]


# -- nothing to look at ------------------------------------------------------------------------


def test_a_verdict_is_not_about_nothing(tmp_path: Path, run_cli: RunCli) -> None:
    saved({"model": {"w": torch.ones(1)}, "epoch": 1, "extra": 2}, tmp_path)
    saved({"epoch": 1}, tmp_path, "none.pt")
    done = run_cli("diff", "run.pt", "run.pt", "--select", "e*", exit=4)
    assert "none of the 1 tensor is selected: no tensors compared" in done.stderr
    done = run_cli("diff", "run.pt", "run.pt", "--select", "epoch", exit=0)
    assert "no tensors compared" in done.stdout
    done = run_cli("diff", "none.pt", "none.pt", exit=0)
    assert "no tensors compared" in done.stdout
    done = run_cli("validate", "none.pt", exit=0)
    assert "torch-zip, no tensors: " in done.stdout
    assert "passed: container, reload; it holds no tensors" in done.stdout
    done = run_cli("validate", "none.pt", "--against", "run.pt", "--subset", exit=1)
    assert "none of the tensors of run.pt is in it" in done.stdout
    done = run_cli("relocate", "none.pt", "--to", "cuda:0", exit=0)
    assert "nothing to move" in done.stdout


@pytest.mark.slow
def test_a_batch_refuses_item_by_item(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "runs").mkdir()
    saved({"model": {"w": torch.ones(1)}}, tmp_path / "runs", "good.pt")
    saved({"model": None, "ema": {"w": torch.ones(1)}}, tmp_path / "runs", "averaged.pt")
    results = list(ckptmove.batch("convert", tmp_path / "runs", tmp_path / "out", preset="hf"))
    reasons = {each.name: each.reason for each in results}
    assert not reasons["good.pt"]
    assert "averages of weights (EMA) are under 'ema' (1 tensor)" in str(reasons["averaged.pt"])
    run_cli("batch", "convert", "runs", "ema", "--weights", "ema", "--include", "aver*", exit=0)
