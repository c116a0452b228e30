"""Where everything goes: as training there would have saved it, or as the rules say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmove import RefusedError, RelocateReport, UsageError, inspect, relocate
from tests.making.checkpoints import MAKERS, kept_on_cpu, save, save_tagged
from tests.oracles.readers import pid_locations


class Bench:
    """A folder with one checkpoint in it."""

    def __init__(self, folder: Path) -> None:
        self.source, self.out, self.wanted = (folder / f"{n}.pt" for n in ("in", "out", "wanted"))

    def save(self, saved: object, tag: Any = "cuda:0") -> Bench:
        """Put an object there, as a machine with that device saves it."""
        save(self.source, saved, tag)
        return self

    def relocate(self, **rules: Any) -> RelocateReport:
        """Relocate it."""
        return relocate(self.source, self.out, force=True, **rules)

    def devices(self) -> dict[str, str]:
        """Where each tensor is then."""
        return {entry.name: entry.device for entry in inspect(self.out).tensors}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Somewhere to work."""
    return Bench(tmp_path)


# -- --to --------------------------------------------------------------------------------------


@pytest.mark.sample(95)
@pytest.mark.parametrize("tag", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", MAKERS)
def test_to_is_as_training_there_would_have_saved_it(name: str, tag: str, bench: Bench) -> None:
    saved = MAKERS[name]()
    stays = kept_on_cpu(saved)
    save_tagged(saved, bench.source, tag, stays)
    save_tagged(saved, bench.wanted, "cuda:1", stays)
    bench.relocate(to="cuda:1")
    assert pid_locations(bench.out) == pid_locations(bench.wanted)
    bench.relocate(to="cpu")
    assert {location for _, location in pid_locations(bench.out)} <= {"cpu"}


@pytest.mark.parametrize("name", ["adamw_training", "nadam", "adam_tensor_lr", "nested_strided"])
def test_all_moves_also_what_torch_keeps_on_the_cpu(name: str, bench: Bench) -> None:
    bench.save(MAKERS[name](), "cpu")
    assert bench.relocate(to="cuda:1").kept
    assert bench.relocate(to="cuda:1", all=True).kept == ()
    assert {location for _, location in pid_locations(bench.out)} == {"cuda:1"}


@pytest.mark.parametrize(
    ("name", "why", "kept"),
    [
        ("rng_state_file", "RNG states only from the CPU", {"cpu", "cuda.0"}),
        ("generator", "RNG states only from the CPU", {"generator.<state>.2"}),
        ("adam_tensor_lr", "never moves hyper-parameters", {"optimizer.param_groups.0.lr"}),
        ("adam_mixed_capturable", "optimizer steps on the CPU", {"optimizer.state.1.step"}),
        ("nested_strided", "shape of a nested tensor", {"sizes", "strides", "offsets"}),
        ("dtensor_state_dict", "ranks of a device mesh", {"weight._spec.mesh._rank_map"}),
        ("meta_tensor", "no data to load", {"meta"}),
    ],
)
def test_what_stays_is_told_and_why(name: str, why: str, kept: set[str], bench: Bench) -> None:
    report = bench.save(MAKERS[name](), "cpu").relocate(to="cuda:1")
    assert {each.name for each in report.kept if why in each.why} == kept
    assert {each.device for each in report.kept} <= {"cpu", "meta"}


def test_to_where_everything_is_keeps_nothing_back(bench: Bench) -> None:
    saved = MAKERS["adamw_training"]()
    save_tagged(saved, bench.source, "cuda:0", kept_on_cpu(saved))
    report = bench.relocate(to="cpu")
    assert report.kept == ()
    assert list(report.moved) == ["cuda:0→cpu"]


def test_capturable_on_the_cpu_is_warned_of(bench: Bench) -> None:
    bench.save(MAKERS["adam_capturable"]())
    assert "capturable=False" in bench.relocate(to="cpu").warnings[0]
    assert bench.relocate(to="cuda:1").warnings == ()
    assert bench.save(MAKERS["adam_fused"]()).relocate(to="cpu").warnings == ()


# -- rules -------------------------------------------------------------------------------------

THREE = {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}
WHERE = {4: "cuda:0", 8: "cuda:1", 12: "cpu"}


def three(storage: torch.UntypedStorage) -> str:
    """A device for each of `THREE`."""
    return WHERE[storage.nbytes()]


@pytest.mark.parametrize(
    ("rules", "devices"),
    [
        ({"map": {"cuda:1": "cuda:0"}}, "cuda:0 cuda:0 cpu"),
        ({"map": {"cuda:*": "mps"}}, "mps mps cpu"),
        ({"map": {"*": "meta"}}, "meta meta meta"),
        ({"map": {"cuda:*": "mps", "cuda:1": "xpu:0"}}, "mps xpu:0 cpu"),
        ({"map": {"*": "mps", "cpu": "cuda:7"}}, "mps mps cuda:7"),
        ({"map": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}, "cuda:1 cuda:0 cpu"),
        ({"map": {"cpu": "cuda:3"}, "to": "mps"}, "mps mps cuda:3"),
        ({"place": {"a": "mps"}}, "mps cuda:1 cpu"),
        ({"place": {"*": "mps", "b": "cpu"}}, "mps cpu mps"),
        ({"place": {"b": "cpu", "*": "mps"}}, "mps mps mps"),
        ({"place": {"[ab]": "mps"}}, "mps mps cpu"),
        ({"place": {"A": "mps"}}, "cuda:0 cuda:1 cpu"),
        ({"place": {"a": "mps"}, "map": {"cuda:0": "cpu"}, "to": "cuda:5"}, "mps cuda:5 cuda:5"),
        ({"device_map": {"a": 3, "": "cpu"}}, "cuda:3 cpu cpu"),
        ({"device_map": {"a": 3}, "to": "mps"}, "cuda:3 mps mps"),
        ({"device_map": {"a": 3, "b": 4}, "place": {"b": "mps"}}, "cuda:3 mps cpu"),
        ({"device_map": {"": 0}, "map": {"cpu": "mps"}}, "cuda:0 cuda:0 cuda:0"),
    ],
)
def test_the_first_rule_that_speaks_decides(
    rules: dict[str, Any], devices: str, bench: Bench
) -> None:
    bench.save(THREE, three).relocate(**rules, allow_unmatched=True)
    assert [location for _, location in pid_locations(bench.out)] == devices.split()


def test_what_torch_keeps_on_the_cpu_is_kept_by_every_rule(bench: Bench) -> None:
    bench.save({"rng": torch.get_rng_state(), "w": torch.ones(1)}, "cpu")
    for rules in ({"map": {"cpu": "cuda:0"}}, {"place": {"*": "cuda:0"}}, {"device_map": {"": 0}}):
        report = bench.relocate(**rules)
        assert bench.devices() == {"rng": "cpu", "w": "cuda:0"}
        assert [kept.name for kept in report.kept] == ["rng"]


def test_rules_that_speak_of_nothing_are_told(bench: Bench) -> None:
    bench.save(THREE, three)
    rules = {"place": {"x*": "mps", "a": "mps"}, "map": {"cuda:5": "cpu"}, "device_map": {"y": 0}}
    for only in ("place", "map"):
        with pytest.raises(RefusedError) as caught:
            bench.relocate(**{only: rules[only]})
        assert "--allow-unmatched" in str(caught.value.hint)
    assert not bench.out.exists()
    assert bench.relocate(**rules, allow_unmatched=True).warnings == (
        "no tensor's name matches 'x*', which should move to mps",
        "nothing is on cuda:5, which should move to cpu",
        "no tensor name matches 'y' of the device map",
        "no rule matches 'b', 'c'; they stay where they are",
    )
    assert bench.relocate(to="cpu", map={"cuda:*": "mps"}).warnings == ()


def test_on_meta_data_is_out_of_reach_and_that_is_told(bench: Bench) -> None:
    (warning,) = bench.save(THREE, "cpu").relocate(to="meta").warnings
    assert warning.startswith("on meta tensors have no data: torch.load will not read the bytes")
    assert all(each.is_meta for each in torch.load(bench.out, weights_only=True).values())


def no_rule(bench: Bench) -> None:
    """Ask for nothing at all."""
    bench.relocate()


def test_no_rule_is_a_usage_error(bench: Bench) -> None:
    with pytest.raises(UsageError, match="the device is missing"):
        no_rule(bench.save(THREE))


# -- device maps -------------------------------------------------------------------------------

LAYERS = {
    f"{part}.{n}.{leaf}": torch.ones(1)
    for part in ("encoder.block", "decoder.block")
    for n in (1, 10)
    for leaf in ("weight", "norm.weight")
}


@pytest.mark.parametrize("prefix", ["", "model", "state_dict", "checkpoint.model"])
@pytest.mark.parametrize(
    ("device_map", "devices"),
    [
        ({"encoder": 1}, {"encoder": "cuda:1"}),
        (
            {"": "cpu", "encoder": 1, "encoder.block.1": "mps"},
            {"": "cpu", "encoder": "cuda:1", "encoder.block.1.": "mps"},
        ),
        (
            {"encoder.block.1": 2, "encoder.block.10": 3},
            {"encoder.block.1.": "cuda:2", "encoder.block.10.": "cuda:3"},
        ),
        (
            {"encoder.block.1.norm.weight": 2, "encoder.block.1": 3},
            {"encoder.block.1.": "cuda:3", "encoder.block.1.norm.": "cuda:2"},
        ),
        ({"enc": 1, "encoder.bl": 1, "encoder.block.1": 0}, {"encoder.block.1.": "cuda:0"}),
        ({"encoder": 1, "decoder": 2, "block.1": 3}, {"encoder": "cuda:1", "decoder": "cuda:2"}),
    ],
)
def test_the_longest_prefix_of_a_device_map_wins(
    device_map: dict[str, Any], devices: dict[str, str], prefix: str, bench: Bench
) -> None:
    saved: Any = LAYERS
    for key in reversed(prefix.split(".") if prefix else []):
        saved = {key: saved, "epoch": 1}
    bench.save(saved, "xpu:0").relocate(device_map=device_map)
    for name, device in bench.devices().items():
        bare = name.removeprefix(f"{prefix}.")
        best = max((key for key in devices if bare.startswith(key)), key=len, default=None)
        assert device == ("xpu:0" if best is None else devices[best]), name


def test_the_numbers_of_parameters_are_no_names_of_modules(bench: Bench) -> None:
    """State 0 and 1 belong to module 0, state 2 to module 1: a device map can't tell."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    bench.save(saved).relocate(device_map={"0": 0, "1": 1})
    found = bench.devices()
    assert found["model.1.weight"] == "cuda:1"
    assert {found[name] for name in found if name.startswith("optimizer")} == {"cuda:0"}


def test_a_device_map_may_lie_in_a_file(bench: Bench, tmp_path: Path) -> None:
    device_map = {"a": 3, "": "cpu"}
    (tmp_path / "map.json").write_text(json.dumps(device_map))
    bench.save(THREE, three).relocate(device_map=tmp_path / "map.json")
    assert bench.devices() == {"a": "cuda:3", "b": "cpu", "c": "cpu"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read"),
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\x00", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ('"cpu"', "is not a JSON object"),
        ("null", "is not a JSON object"),
        ('{"": "disk"}', "offloads '' to disk"),
        ('{"a": null}', "'a': .* is not a device"),
        ('{"a": [0]}', "'a': .* is not a device"),
        ('{"a": true}', "'a': .* is not a device"),
        ('{"a": 1.0}', "'a': .* is not a device"),
        ('{"a": -1}', "'cuda:-1' is not a device"),
        ('{"a": 1000}', "only up to 127"),
        ('{"a": "0"}', "'0' is not a device"),
    ],
)
def test_a_device_map_that_makes_no_sense(
    text: str | None, message: str, bench: Bench, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "map.json").write_text(text)
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        bench.save(THREE, three).relocate(device_map=tmp_path / "map.json")
    assert not bench.out.exists()


# -- contradictions ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied_weights", "flat_parameter_views", "ema"])
def test_tensors_of_one_storage_go_together_or_not_at_all(name: str, bench: Bench) -> None:
    bench.save(MAKERS[name]())
    entry = next(entry for entry in inspect(bench.source).tensors if entry.shared_with)
    with pytest.raises(RefusedError, match="share a storage") as raised:
        bench.relocate(place={entry.name: "cuda:1"})
    assert repr(entry.name) in str(raised.value)
    assert any(repr(other) in str(raised.value) for other in entry.shared_with)
    assert raised.value.hint == "place them on the same device"
    assert not bench.out.exists()
    alike = {each: "cuda:1" for each in (entry.name, *entry.shared_with)}
    bench.relocate(place=alike)
    assert {bench.devices()[name] for name in alike} == {"cuda:1"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("sparse_coo", "values"),
        ("sparse_coo", "indices"),
        ("sparse_csr", "col_indices"),
        ("nested_jagged", "offsets"),
        ("wrapper_subclass", "pair.second"),
        ("wrapper_subclass_on_cuda", "pair.first"),
        ("quantized_per_channel_qint8", "scales"),
        ("dtensor_state_dict", "weight._local_tensor"),
    ],
)
def test_parts_of_one_tensor_are_not_torn_apart(name: str, part: str, bench: Bench) -> None:
    bench.save(MAKERS[name]())
    whole = next(entry for entry in inspect(bench.source).tensors if entry.name == part).part_of
    with pytest.raises(RefusedError, match="is part of") as raised:
        bench.relocate(place={part: "cuda:1"})
    assert repr(whole) in str(raised.value)
    assert not bench.out.exists()


def test_two_tensors_may_have_one_name(bench: Bench) -> None:
    twins = {"a": {"b": torch.eye(2).to_sparse()}, "a.b": torch.eye(3).to_sparse()}
    bench.save(twins, lambda s: "cuda:0" if s.nbytes() in (32, 8) else "cuda:1")
    bench.relocate(map={"cuda:0": "mps"})
    assert [location for _, location in pid_locations(bench.out)] == ["mps"] * 2 + ["cuda:1"] * 2
