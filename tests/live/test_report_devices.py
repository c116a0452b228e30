"""What reports say of devices, and of what is odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmove
from ckptmove import CheckFailed
from tests.making.living import (
    LanguageModel,
    entries,
    fake,
    nbytes,
    on_cuda,
    row,
)

# -- devices ---------------------------------------------------------------------------------------


def test_partial_placement_is_shown_by_module() -> None:
    model = LanguageModel()
    model.layers[5:].to("meta")
    report = ckptmove.report(model)
    assert row(report, "layers.{0..4}")[1:3] == ["cpu", "35"]
    assert row(report, "layers.{5..9}")[1:3] == ["meta", "35"]
    assert row(report, "embed")[1:] == ["cpu", "1", "112 B"]
    assert row(report, "head")[1:] == ["cpu", "tied to embed.weight"]
    assert report.devices["meta"].nbytes == 0
    assert (
        str(report).splitlines()[0]
        == report.verdict
        == ("mixed: cpu 100.0 %, meta 0.0 % (35 tensors without values)")
    )


def test_a_module_in_two_places_is_shown_by_tensor() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].bias = nn.Parameter(torch.empty(2, device="meta"))
    report = ckptmove.report(model)
    assert row(report, "a")[1:3] == ["cpu", "2"]
    assert row(report, "b.weight")[1:3] == ["cpu", "1"]
    assert row(report, "b.bias")[1:3] == ["meta", "1"]


def test_devices_that_are_not_there_are_told() -> None:
    model = on_cuda(LanguageModel(2))
    model.get_submodule("layers.1.inner").weight = fake("cuda:1", 4, 4)
    report = ckptmove.report(model)
    assert set(report.devices) == {"cuda:0", "cuda:1"}
    assert report.devices["cuda:1"].nbytes == 64
    assert report.inputs == "inputs go to cuda:0 (embed, the first module with parameters)"
    assert row(report, "layers.1.inner.weight")[1] == "cuda:1"
    assert row(report, "layers.0")[1] == "cuda:0"


def test_require_names_what_is_elsewhere() -> None:
    model = on_cuda(LanguageModel(1))
    assert ckptmove.report(model).verdict == "uniform cuda:0"
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": parameter.data}
    report = ckptmove.report(model, optimizer)
    assert "cpu" in report.devices
    report.require("cuda:0")  # steps are where torch keeps them
    report.require("cuda")
    with pytest.raises(CheckFailed) as raised:
        report.require("cuda:1")
    message = str(raised.value)
    assert message.startswith("not on cuda:1: 'pos' is on cuda:0, 'embed.weight' is on cuda:0, ")
    assert message.count(" is on ") == 5
    assert message.endswith(f" and {len(report.elsewhere('cuda:1')) - 5} more")
    assert raised.value.path == "LanguageModel"
    with pytest.raises(CheckFailed, match="there are no tensors"):
        ckptmove.report(nn.Identity()).require("cpu")
    ckptmove.report(LanguageModel(1)).require("cpu")


def test_a_model_without_values_says_how_to_get_some() -> None:
    with torch.device("meta"):
        model = LanguageModel(1)
    report = ckptmove.report(model)
    assert report.verdict == "uniform meta"
    (told,) = report.warnings
    assert "without values (" in told
    assert "model.to_empty(device=…)" in told
    assert entries(report, "parameter")["head.weight"].shared_with == ("embed.weight",)
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = LanguageModel(1)
    assert "without values (" in ckptmove.report(model).warnings[0]


def test_what_accelerate_keeps_on_the_cpu() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = LanguageModel(2)
    whole = nbytes(model.parameters())
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.embed.weight.device.type == "meta"
    report = ckptmove.report(model)
    assert report.devices["cpu (offloaded)"].nbytes == whole
    assert report.inputs == (
        "inputs go to cpu (embed, the first module with parameters); accelerate moves them there"
    )
    (told,) = report.warnings
    assert told.startswith("accelerate keeps the data of 'embed.weight', ")
    assert "on cpu, and moves it to cpu whenever the module runs" in told
    with pytest.raises(CheckFailed, match=r"'embed.weight' is on cpu \(offloaded\)"):
        report.require("cpu")
    assert row(report, "head")[1:] == ["cpu (offloaded)", "tied to embed.weight"]
    model(torch.arange(3))  # what is told is so
    assert model.embed.weight.device.type == "meta"


def test_what_accelerate_brings_for_a_whole_block() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = LanguageModel(2)
    accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["Block"])
    report = ckptmove.report(model)
    assert entries(report, "parameter")["layers.0.inner.weight"].device == "cpu (offloaded)"
    assert not any("without values" in each for each in report.warnings)


def test_what_accelerate_keeps_on_disk(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    whole = nbytes(model.parameters())
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    before = {each: each.stat().st_atime_ns for each in tmp_path.glob("*.dat")}
    report = ckptmove.report(model)
    assert report.devices["disk (offloaded)"] == (4, 4, whole)
    assert report.verdict == "uniform disk (offloaded)"
    assert before == {each: each.stat().st_atime_ns for each in tmp_path.glob("*.dat")}


def test_a_dispatched_model(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = LanguageModel(2)
    sizes = {n: nbytes(m.parameters()) for n, m in model.named_modules()}
    device_map = {"embed": "cpu", "layers.0": "cpu", "layers.1": "disk", "head": "cpu"}
    accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path)
    report = ckptmove.report(model)
    assert report.devices["disk (offloaded)"].nbytes == sizes["layers.1"]
    assert row(report, "layers.0")[1] == "cpu"
    assert row(report, "layers.1.inner")[1] == "disk (offloaded)"
    model = LanguageModel(2)
    accelerate.dispatch_model(model, dict.fromkeys(device_map, "cpu"), force_hooks=True)
    assert ckptmove.report(model).verdict == "uniform cpu"


# -- what is odd -----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Whatever people forget to register."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.pos = torch.ones(3)
        self.blocks = [nn.Linear(2, 2)]
        self.heads = {"a": nn.Linear(2, 2)}
        self.scales = [nn.Parameter(torch.ones(2))]
        self.cache = [torch.ones(2)]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("pos", 'self.register_buffer("pos", …, persistent=False)'),
        ("blocks.0.weight", "make self.blocks an nn.ModuleList"),
        ("heads.a.weight", "make self.heads an nn.ModuleDict"),
        ("scales.0", "make self.scales an nn.ParameterList"),
        ("cache.0", "register each as a buffer: self.register_buffer(name, …, persistent=False)"),
    ],
)
def test_what_is_not_registered_is_told_with_advice(name: str, advice: str) -> None:
    report = ckptmove.report(Odd())
    assert name in entries(report, "attribute")
    (told,) = [each for each in report.warnings if each.startswith(name)]
    assert told.endswith(f"behind. Fix: {advice}")
    assert len(report.warnings) == 5
    ckptmove.report(Odd(), odd=Odd())


def test_what_is_computed_but_once_is_told() -> None:
    model = nn.Linear(2, 2)
    model.twice = model.weight * 2
    (told,) = ckptmove.report(model).warnings
    assert told.endswith(
        "behind. Fix: compute it in forward, from parameters that move with the model"
    )


def test_the_same_slip_in_many_layers_is_told_once() -> None:
    (told,) = [
        each
        for each in ckptmove.report(nn.Sequential(*(Odd() for _ in range(9)))).warnings
        if 'register_buffer("pos"' in each
    ]
    assert told.startswith("0.pos, 1.pos, 2.pos, 3.pos, 4.pos, 5.pos, 6.pos, 7.pos and 1 more are")


def test_what_hooks_hold_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    mean = torch.zeros(2)

    def subtract(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output - mean

    model[0].register_forward_hook(subtract)
    report = ckptmove.report(model)
    assert list(entries(report, "hook")) == ["0.hook subtract.mean"]
    assert "let the hook read it from a buffer" in report.warnings[0]


def test_what_moves_itself_is_no_mistake() -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(2)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.total = fn(self.total)
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    report = ckptmove.report(Metric())
    assert list(entries(report, "attribute")) == ["total"]
    assert report.warnings == ()


def test_an_optimizer_of_other_parameters_is_told() -> None:
    model, before = nn.Linear(2, 2), nn.Linear(2, 2)
    told = ckptmove.report(model, torch.optim.SGD(before.parameters())).warnings
    assert told[0].startswith("the optimizer holds old parameters: the model now has new ones, so ")
    assert "weight, bias will never change. Fix: create the optimizer after" in told[0]
    (alone,) = ckptmove.report(model, torch.optim.SGD([model.weight])).warnings
    assert alone.startswith("no optimizer trains bias, though requires_grad is True. Fix: add it")
    also = torch.optim.SGD([*model.parameters(), before.weight])
    (foreign,) = ckptmove.report(model, also).warnings
    assert foreign.startswith(
        "the optimizer holds parameters that the model does not have: optimizer.param_groups.0."
    )
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight])
    assert ckptmove.report(model, optimizer).warnings == ()


def test_state_and_gradients_away_from_their_parameter_are_told() -> None:
    model = on_cuda(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    weight = model.get_parameter("weight")
    optimizer.state[weight] = {"momentum_buffer": torch.ones(2, 2)}
    (told,) = ckptmove.report(model, optimizer).warnings
    assert told.startswith(
        "optimizer.state.weight.momentum_buffer: on cpu, and the parameter on cuda:0. Fix: "
    )
    optimizer.state[weight] = {"momentum_buffer": torch.tensor(1.0)}
    assert ckptmove.report(model, optimizer).warnings == ()
    optimizer.param_groups[0]["capturable"] = True
    assert len(ckptmove.report(model, optimizer).warnings) == 1


def test_a_batch_elsewhere_is_told() -> None:
    model = on_cuda(nn.Linear(2, 2))
    batch = {"x": torch.ones(2), "rest": [fake("cuda:0", 2).data]}
    report = ckptmove.report(model, batch=batch)
    (told,) = report.warnings
    assert told == (
        'the batch is on cpu: batch.x. Fix: batch = ckptmove.to_device(batch, "cuda:0")'
    )


def test_a_walk_that_was_cut_short_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmove.live.inventory.object_walk.MOST_VALUES", 3)
    model = nn.Linear(2, 2)
    model.words = [{"a": 1} for _ in range(9)]  # type: ignore[assignment]  # as users do
    assert "tensors may be missing from this list" in ckptmove.report(model).warnings[0]
