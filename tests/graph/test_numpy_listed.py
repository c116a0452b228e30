"""numpy arrays in state dicts: listed as tensors, left where they are, compared once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptmove import diff, inspect, relocate, validate
from ckptmove.errors import CheckFailed
from ckptmove.manifest.manifest import Role, Section
from tests.graph.test_numpy_weights import PROTOCOLS, WRITERS, arrays, expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_array_is_listed(writer: str, protocol: int, tmp_path: Path) -> None:
    path, saved = tmp_path / "model.pkl", {"model": arrays(), "epoch": 3}
    WRITERS[writer](saved, path, protocol)
    manifest = inspect(path)
    listed = {str(entry.path[-1]): entry for entry in manifest.tensors}
    assert listed.keys() == arrays().keys()
    for key, array in arrays().items():
        entry = listed[key]
        assert (entry.kind, entry.role, entry.device) == ("numpy.ndarray", Role.ARRAY, "cpu")
        assert (entry.section, entry.state_key) == (Section.MODEL, key)
        assert entry.dtype == str(expected(array).dtype).removeprefix("torch.")
        assert (entry.shape, entry.nbytes) == (array.shape, array.nbytes)
        assert len(entry.stride) == array.ndim
        if key == "fortran":
            assert entry.stride == (1, 3)
    assert listed["matrix"].shared_with == ("model.again",)
    whole = sum(array.nbytes for key, array in arrays().items() if key != "again")
    for totals in (manifest.devices, manifest.dtypes, manifest.sections):
        assert sum(total.nbytes for total in totals.values()) == whole
        assert sum(total.tensors for total in totals.values()) == len(arrays())
    assert manifest.verdict == "uniform cpu"
    assert json.loads(json.dumps(manifest.to_json()))["schema"] == 1


def test_generators_and_loose_arrays_are_data(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    saved: dict[str, Any] = {
        "model": {"weight": torch.ones(2)},
        "rng": {"torch": torch.get_rng_state(), "numpy": np.arange(624, dtype="u4")},
        "states": [torch.get_rng_state(), np.random.get_state()],
        "beside": {"cpu": torch.get_rng_state(), "other": np.arange(624, dtype="u4")},
        "mixed": {"mean": np.ones(3), "epoch": 2},
        "texts": {"a": np.array(["x"])},
    }
    torch.save(saved, path)
    manifest = inspect(path)
    assert not any(entry.role is Role.ARRAY for entry in manifest.tensors)
    assert {entry.path[0] for entry in manifest.tensors} == {"model", "rng", "states", "beside"}
    by_name = {entry.name: entry.section for entry in manifest.tensors}
    assert by_name["rng.torch"] == by_name["beside.cpu"] == Section.RNG


def mixed(path: Path, device: str | None = "cuda:0") -> Path:
    """A model of tensors and arrays, its tensors on a device."""
    mean = np.ones(3)
    torch.save(
        {"model": {"weight": torch.ones(64), "mean": mean, "again": mean, "c": np.ones(2)}}, path
    )
    if device is not None:
        relocate(path, to=device, in_place=True)
    return path


def test_what_is_required_is_required_of_tensors(tmp_path: Path) -> None:
    manifest = inspect(mixed(tmp_path / "mixed.pt"))
    assert manifest.verdict == "mixed: cuda:0 86.5 %, cpu 13.5 % (3 numpy arrays)"
    manifest.require("cuda:0")
    with pytest.raises(CheckFailed, match=r"'model\.weight' is on cuda:0"):
        manifest.require("cpu")
    with pytest.raises(CheckFailed, match=r"'model\.weight' is on cuda:0"):
        manifest.require("cuda:1")
    alone = tmp_path / "alone.pkl"
    alone.write_bytes(pickle.dumps(arrays()))
    inspect(alone).require("cpu")
    with pytest.raises(CheckFailed, match="numpy arrays alone, which have no device"):
        inspect(alone).require("cuda:0")


@pytest.mark.parametrize("options", [{}, {"all": True}])
def test_arrays_stay_where_tensors_go(options: dict[str, Any], tmp_path: Path) -> None:
    source = mixed(tmp_path / "mixed.pt", None)
    report = relocate(source, tmp_path / "there.pt", to="cuda:1", **options)
    assert {move: moved.storages for move, moved in report.moved.items()} == {"cpu→cuda:1": 1}
    assert {kept.why for kept in report.kept} == {"numpy arrays have no device"}
    assert [kept.name for kept in report.kept] == ["model.mean", "model.again", "model.c"]
    inspect(tmp_path / "there.pt").require("cuda:1")
    quiet = relocate(source, tmp_path / "one.pt", place={"model.weight": "cuda:1"}, **options)
    assert not quiet.kept
    validate(tmp_path / "there.pt", against=source).raise_if_failed()
    assert diff(source, tmp_path / "there.pt", ignore_devices=True).equal


def test_a_generator_is_kept_in_silence(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "rng": np.random.get_state()}, tmp_path / "run.pt")
    report = relocate(tmp_path / "run.pt", tmp_path / "there.pt", to="cuda:0")
    assert not report.kept


def test_a_difference_of_arrays_is_one(tmp_path: Path) -> None:
    one, other = mixed(tmp_path / "one.pt", None), tmp_path / "other.pt"
    saved = torch.load(one, weights_only=False)
    saved["model"]["c"][0] = 5
    torch.save(saved, other)
    found = diff(one, other)
    (difference,) = found.differences
    assert difference.name.startswith("model.c")
    with pytest.raises(CheckFailed):
        validate(other, against=one).raise_if_failed()
    arrays_alone = tmp_path / "arrays.pt"
    torch.save({"state": {"a": np.ones(2)}, "x": torch.ones(1)}, arrays_alone)
    assert diff(arrays_alone, arrays_alone, select="model").equal
