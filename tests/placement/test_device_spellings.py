"""Devices that are spelled beside the tags: by wrappers, meshes and XLA tensors, and by users."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove import RefusedError, inspect, relocate
from tests.making.checkpoints import MAKERS, save
from tests.making.subclasses import PairTensor
from tests.oracles.readers import Inert, inert_tree, labels, load, loads_safely, pid_locations
from tests.oracles.sameness import assert_same_tree


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """Source and destination."""
    return tmp_path / "in.pt", tmp_path / "out.pt"


# -- wrappers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tag", "to"),
    [
        ("wrapper_subclass_on_cuda", "cuda:0", "cuda:1"),
        ("wrapper_subclass_on_cuda", "cuda:0", "cpu"),
        ("wrapper_subclass_on_cuda", "cuda:0", "xpu:2"),
        ("wrapper_subclass", "cpu", "cuda:1"),
    ],
)
def test_a_wrapper_moves_with_what_it_wraps(
    name: str, tag: str, to: str, paths: tuple[Path, Path]
) -> None:
    source, out = paths
    save(source, MAKERS[name](), tag)
    relocate(source, out, to=to)
    assert set(labels(out).values()) == {to}
    assert {location for _, location in pid_locations(out)} == {to}


def test_a_wrapper_really_loads_where_it_was_moved_to(paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, MAKERS["wrapper_subclass_on_cuda"](), "cuda:0")
    with pytest.raises(RuntimeError):
        load(source, weights_only=False, map_location=None)
    relocate(source, out, to="cpu")
    loaded: Any = load(out, weights_only=False, map_location=None)
    pair: Any = loaded["pair"]
    assert isinstance(pair, PairTensor)
    assert {pair.device, pair.first.device, pair.second.device} == {torch.device("cpu")}
    twice: Any = pair + pair
    assert twice.first.tolist() == [2.0, 2.0]


def test_a_rule_for_a_wrapper_is_one_for_its_parts(paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, MAKERS["wrapper_subclass_on_cuda"](), "cuda:0")
    relocate(source, out, place={"pair": "cuda:1"})
    assert set(labels(out).values()) == {"cuda:1"}
    assert pid_locations(out) == [("0", "cuda:1"), ("1", "cuda:1")]


# -- meshes ------------------------------------------------------------------------------------


def meshes(node: Any) -> Iterator[str]:
    """The device types that the meshes of an inert tree spell."""
    if isinstance(node, (list, tuple)):
        for child in node:
            yield from meshes(child)
    elif isinstance(node, dict):
        for key, child in node.items():
            if key == "_device_type":
                yield child
            yield from meshes(child)
    elif isinstance(node, Inert):
        yield from meshes(list(vars(node).values()))


@pytest.mark.parametrize(("to", "kind"), [("cuda:1", "cuda"), ("cpu", "cpu"), ("npu:3", "npu")])
def test_a_mesh_is_of_the_kind_of_its_tensors(to: str, kind: str, paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, MAKERS["dtensor_state_dict"](), "cpu")
    assert set(meshes(inert_tree(source))) == {"cpu"}
    relocate(source, out, to=to)
    assert set(meshes(inert_tree(out))) == {kind}
    devices = {entry.name: entry.device for entry in inspect(out).tensors}
    assert {device for name, device in devices.items() if "rank_map" not in name} == {to}
    assert devices["weight._spec.mesh._rank_map"] == "cpu"


def test_tensors_of_one_mesh_are_on_one_kind_of_device(paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, MAKERS["dtensor_state_dict"](), "cpu")
    with pytest.raises(RefusedError, match="'weight' and 'bias' are DTensors"):
        relocate(source, out, place={"weight*": "cuda:0"}, map={"cpu": "mps"})
    relocate(source, out, place={"weight*": "cuda:0"}, map={"cpu": "cuda:1"})
    assert set(meshes(inert_tree(out))) == {"cuda"}


# -- XLA ---------------------------------------------------------------------------------------


class ThroughCpu:
    """Pickled as an XLA tensor is: its bytes in a CPU tensor, its device in a string."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (torch.ones(2), torch.float32, "xla:0", False)


@pytest.mark.parametrize("to", ["cpu", "meta"])
def test_an_xla_tensor_moves_by_its_string(to: str, paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, {"w": ThroughCpu(), "mine": "xla:0", "cpu": "cpu"}, "cpu")
    relocate(source, out, to=to)
    assert pid_locations(out) == [("0", "cpu")]
    loaded: Any = load(out, weights_only=True, map_location=None)
    assert loaded["w"].device.type == to
    assert (loaded["mine"], loaded["cpu"]) == ("xla:0", "cpu")


# -- values of the user's ----------------------------------------------------------------------

VALUES = {
    "text": "cuda:0",
    "other": "cuda:1",
    "bare": "cuda",
    "in a sentence": "on cuda:0",
    "cuda:0": "a key",
    "device": torch.device("cuda", 0),
    "other device": torch.device("cuda", 1),
    "bare device": torch.device("cuda"),
    "cpu": torch.device("cpu"),
    "args": argparse.Namespace(device="cuda:0", devices=[torch.device("cuda", 0), "cpu"]),
}


def values_at(path: Path) -> dict[str, str]:
    """The user's values in a file, as torch loads them."""
    loaded: Any = load(path, weights_only=False)
    args = vars(loaded.pop("args"))
    found = {**loaded, "args": args["device"], "0": args["devices"][0], "1": args["devices"][1]}
    return {key: str(value) for key, value in found.items() if key != "weight"}


def test_values_stay_and_are_told(paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, {**VALUES, "weight": torch.ones(1)})
    report = relocate(source, out, to="mps")
    assert values_at(out) == values_at(source)
    assert len(report.values_naming_devices) == 10
    assert report.values_rewritten == ()


def test_values_that_are_a_moved_device_are_rewritten_when_asked(paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, {**VALUES, "weight": torch.ones(1)})
    report = relocate(source, out, to="mps", values=True)
    rewritten = dict.fromkeys(("text", "device", "args", "0"), "mps")
    assert values_at(out) == {**values_at(source), **rewritten}
    assert [value.name for value in report.values_rewritten] == [
        *("text", "device", "args.device", "args.devices.0"),
    ]
    left = {value.name for value in report.values_naming_devices}
    assert left == {"other", "bare", "bare device", "other device", "cpu", "args.devices.1"}
    assert len(report.to_json()["values_rewritten"]) == 4


def test_a_device_value_gets_and_loses_its_index(paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, [torch.device("cpu"), torch.device("cpu"), torch.ones(1)], "cpu")
    relocate(source, out, to="cuda:12", values=True)
    assert load(out, weights_only=True)[:2] == [torch.device("cuda", 12)] * 2  # type: ignore[index]
    relocate(out, source, to="cpu", values=True, force=True)
    assert load(source, weights_only=True)[:2] == [torch.device("cpu")] * 2  # type: ignore[index]


def test_a_value_whose_device_goes_two_ways_stays(paths: tuple[Path, Path]) -> None:
    source, out = paths
    save(source, {"a": torch.ones(1), "b": torch.ones(1), "device": torch.device("cuda", 0)})
    report = relocate(source, out, place={"a": "cpu", "b": "mps"}, values=True)
    assert [value.name for value in report.values_naming_devices] == ["device"]
    assert load(out, weights_only=True)["device"] == torch.device("cuda", 0)  # type: ignore[index]


def test_values_move_with_no_tensor_only_if_a_tensor_moves(paths: tuple[Path, Path]) -> None:
    source, _ = paths
    save(source, {"device": "cuda:0", "where": torch.device("cuda", 0)})
    report = relocate(source, to="cpu", values=True)
    assert (report.destination, report.values_rewritten) == (None, ())


def test_a_generators_device_stays_with_its_state(paths: tuple[Path, Path]) -> None:
    """Its state is that of a CPU generator, which no other device takes."""
    source, out = paths
    save(source, MAKERS["generator"](), "cpu")
    relocate(source, out, to="cuda:0", values=True)
    loaded: Any = load(out, weights_only=False)
    assert loaded["generator"].device == torch.device("cpu")


@pytest.mark.sample(24)
@pytest.mark.parametrize("to", ["cuda:1", "privateuseone:15", "mps", "meta"])
@pytest.mark.parametrize(
    "name",
    [
        *("cpu_string_first", "cpu_string_last", "cpu_key_between", "rng_state_file"),
        *("adamw_training", "device_values", "numpy_values", "whole_tied_module"),
    ],
)
@pytest.mark.parametrize("everything", [False, True])
def test_a_string_in_the_memo_slot_of_a_tag_stays(
    name: str, to: str, everything: bool, paths: tuple[Path, Path]
) -> None:
    source, out = paths
    save(source, MAKERS[name](), "cpu")
    relocate(source, out, to=to, all=everything)
    assert_same_tree(inert_tree(source), inert_tree(out))
    assert_same_tree(load(source, weights_only=False), load(out, weights_only=False))
    assert loads_safely(source) == loads_safely(out)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_string_in_the_slot_of_a_tag_can_be_rewritten_too(
    protocol: int, paths: tuple[Path, Path]
) -> None:
    source, out = paths
    saved = {"cpu": "cpu", "w": torch.ones(1), "x": torch.ones(2), "more": ["cpu", "cpu"]}
    save(source, saved, "cpu", pickle_protocol=protocol)
    relocate(source, out, to="cuda:3", values=True)
    loaded: Any = load(out, weights_only=False)
    assert list(loaded) == list(saved)
    assert (loaded["cpu"], loaded["more"]) == ("cuda:3", ["cuda:3", "cuda:3"])
    assert pid_locations(out) == [("0", "cuda:3"), ("1", "cuda:3")]
