"""move: what is asked of it, what it says, and models that make it difficult."""

from __future__ import annotations

import json
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import ckptmove
from ckptmove import RefusedError, UsageError
from ckptmove.live.inventory.holdings import holdings
from ckptmove.live.inventory.ownership import unregistered_tensors
from ckptmove.trial.model.import_by_name import import_named, optimizer_name
from tests.conftest import examples
from tests.devices.second_device import DEVICE, apart
from tests.making import moving
from tests.making.growing import grown, recipes

# -- what is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [5, [("", "cpu")], {1: "cpu"}, {None: "cpu"}],
)
def test_a_device_map_that_is_none(given: Any) -> None:
    with pytest.raises(UsageError, match="device map"):
        ckptmove.move(nn.Linear(1, 1), device_map=given)


def test_a_device_map_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"": "cpu:0"}')
    assert not ckptmove.move(nn.Linear(1, 1), device_map=tmp_path / "map.json").moved


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_the_cpu_by_any_name(device: Any) -> None:
    assert not ckptmove.move(nn.Linear(1, 1), to=device).moved


@pytest.mark.slow
@apart
def test_a_number_is_the_accelerator() -> None:
    model = nn.Linear(1, 1)
    if str(torch.device(0)) != DEVICE:
        pytest.skip("another accelerator is there")
    ckptmove.move(model, to=0)
    assert str(model.weight.device) == DEVICE


@pytest.mark.slow
@apart
def test_a_generator_of_optimizers_is_read_once() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=True)
    ckptmove.move(model, (each for each in [optimizer]), to=DEVICE)
    assert str(rate.device) == DEVICE


@pytest.mark.slow
@apart
def test_in_the_order_of_report() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    vars(schedule)["kept"] = torch.ones(1)
    batch: dict[str, Any] = {"x": [torch.ones(1, 2)], "again": model.weight}
    ckptmove.move(model, optimizer, schedule, batch, to=DEVICE)
    assert str(batch["x"][0].device) == DEVICE
    assert str(model.weight.device) == DEVICE


@pytest.mark.slow
@apart
def test_names_of_a_compiled_model_are_its_own() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model: Any = torch.compile(inner, backend="eager")
    report = ckptmove.move(model, device_map={"0": DEVICE, "1": "cpu"})
    assert not report.warnings
    assert str(inner[0].weight.device) == DEVICE
    assert str(inner[1].weight.device) == "cpu"
    report = ckptmove.move(nn.Sequential(model), device_map={"": "cpu", "0.1": DEVICE})
    assert not report.warnings
    assert str(inner[1].weight.device) == DEVICE


@pytest.mark.slow
@apart
def test_by_globs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ckptmove.move(model, place={"*.bias": DEVICE})
    assert {str(each.device) for n, each in model.named_parameters() if "bias" in n} == {DEVICE}
    assert str(model[0].weight.device) == "cpu"


# -- what has no values ----------------------------------------------------------------------------


def _hint(model: nn.Module, **asked: Any) -> str:
    with pytest.raises(RefusedError, match="is on the meta device") as caught:
        ckptmove.move(model, to="cpu", **asked)
    return caught.value.hint or ""


def test_no_advice_destroys_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, device="meta")))
    assert _hint(model) == (
        'model.get_submodule("1").to_empty(device="cpu"), then load its state dict'
    )
    model.get_submodule("1").to_empty(device="cpu")
    model.register_buffer("x", torch.zeros(2, device="meta"), persistent=False)
    assert _hint(model) == "assign it again; no state dict holds it"
    del model.x
    vars(model)["loose"] = torch.zeros(2, device="meta")
    assert _hint(model) == "assign it again; no state dict holds it"


def test_all_of_a_model_may_be_made_empty() -> None:
    model = nn.Linear(2, 2, device="meta")
    assert _hint(model) == 'model.to_empty(device="cpu"), then load its state dict'
    model.register_buffer("x", torch.zeros(2, device="meta"), persistent=False)
    assert _hint(model) == (
        'model.to_empty(device="cpu"), then load its state dict, '
        "and set x, which no state dict holds"
    )
    assert _hint(nn.Linear(1, 1), ema=nn.Linear(1, 1, device="meta")).startswith("ema.to_empty(")


# -- values that name a device ---------------------------------------------------------------------


@pytest.mark.slow
@apart
def test_only_what_certainly_means_the_device_is_rewritten() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.device, self._device = "cpu", "cpu"
            self.where = torch.device("cpu")
            self.offload_device, self.log_on = "cpu", "cpu"

    model = Named()
    report = ckptmove.move(model, to=DEVICE)
    assert [model.device, model._device, str(model.where)] == [DEVICE] * 3
    assert [model.offload_device, model.log_on] == ["cpu", "cpu"]
    assert [each.name for each in report.values_unchanged] == ["offload_device", "log_on"]
    assert [each.name for each in report.values_naming_devices] == ["offload_device", "log_on"]
    assert report.to_json()["values_naming_devices"][0]["name"] == "offload_device"
    ckptmove.move(model, to="cpu")
    assert [model.device, model.offload_device, model.log_on] == ["cpu"] * 3


# -- what is not registered ------------------------------------------------------------------------


@pytest.mark.slow
@apart
def test_what_is_not_registered_is_advised_as_in_a_report() -> None:
    model, optimizer, _ = moving.ready("SGD")
    told = {each.name: each.advice for each in unregistered_tensors(holdings(model, optimizer))}
    report = ckptmove.move(model, optimizer, to=DEVICE)
    assert report.unregistered == told
    assert json.loads(json.dumps(report.to_json()))["unregistered"] == told
    text = str(report)
    assert 'not registered: both: self.register_buffer("both", …, persistent=False)' in text


# -- what its own hook computes --------------------------------------------------------------------


def _old(kind: str) -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would like others to be used
        if kind == "weight_norm":
            torch.nn.utils.weight_norm(inner)
        elif kind == "spectral_norm":
            torch.nn.utils.spectral_norm(inner)
        else:
            prune.l1_unstructured(inner, "weight", amount=0.5)
            prune.random_unstructured(inner, "weight", amount=0.5)
    return nn.Sequential(inner, nn.ReLU())


@pytest.mark.sample(1)
@apart
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune"])
def test_weights_that_a_hook_computes(kind: str) -> None:
    model: Any = _old(kind)
    batch = torch.ones(1, 2)
    for trained in (False, True):
        if trained:
            model(batch).sum().backward()
        value = model[0].weight.detach().clone()
        dry = ckptmove.move(model, to=DEVICE, dry_run=True)
        report = ckptmove.move(model, to=DEVICE)
        assert dry.moved == report.moved
        assert not report.warnings
        assert {str(each.tensor.device) for each in holdings(model).all} == {DEVICE}
        torch.testing.assert_close(model[0].weight.detach().cpu(), value)
        ckptmove.move(model, to="cpu")
        torch.testing.assert_close(model[0].weight.detach(), value)
    model(batch).sum().backward()
    reference = weakref.ref(model[0].bias)
    with pytest.raises(RefusedError, match="weak reference"):
        ckptmove.move(model, to=DEVICE)
    assert model[0].weight.device.type == "cpu"
    model(batch).sum().backward()
    del reference


@pytest.mark.slow
@apart
def test_a_result_that_is_in_the_way_is_named() -> None:
    model: Any = nn.Linear(2, 2)
    model.penalty = model.weight.pow(2).sum()
    for dry in (True, False):
        with pytest.raises(RefusedError, match="'weight' can't be exchanged") as caught:
            ckptmove.move(model, to=DEVICE, dry_run=dry)
        assert "delete what may hold it ('penalty', which is a result" in (caught.value.hint or "")
    model.penalty = None
    ckptmove.move(model, to=DEVICE)


# -- what torch can't exchange ---------------------------------------------------------------------


@pytest.mark.slow
@apart
def test_what_holds_its_tensors_itself() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    for model in (scripted, traced, nn.Sequential(traced)):
        for dry in (True, False):
            with pytest.raises(RefusedError, match="TorchScript holds it") as caught:
                ckptmove.move(model, to=DEVICE, dry_run=dry)
            assert "map_location" in (caught.value.hint or "")


@pytest.mark.slow
@apart
def test_an_exported_program() -> None:
    model = torch.export.export(nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 2),)).module()
    for dry in (True, False):
        with pytest.raises(RefusedError, match="an exported program") as caught:
            ckptmove.move(model, to=DEVICE, dry_run=dry)
        assert "move_to_device_pass" in (caught.value.hint or "")


@apart
def test_a_dry_run_refuses_what_a_move_does() -> None:
    def weak(model: Any) -> object:
        return weakref.ref(model.weight)

    def pending(model: Any) -> object:
        return model(torch.ones(1, 2, requires_grad=True)).pow(2).sum()

    def view(model: Any) -> object:
        model.register_buffer("whole", torch.ones(4))
        return model.whole[1:]

    cases: list[Callable[[Any], object]] = [weak, pending, view]
    for make in cases:
        model = nn.Linear(2, 2)
        held = make(model)
        said = []
        for dry in (True, False):
            with pytest.raises(RefusedError, match="can't be exchanged") as caught:
                ckptmove.move(model, to=DEVICE, dry_run=dry)
            said.append((str(caught.value), caught.value.hint))
        assert said[0] == said[1]
        del held, caught
        ckptmove.move(model, to=DEVICE, dry_run=True)
        ckptmove.move(model, to=DEVICE)


@pytest.mark.slow
@apart
def test_a_chain_of_conjugates_moves_with_its_base() -> None:
    for look in (torch.conj, lambda base: base.conj().imag, lambda base: base.conj().conj().real):
        model, base = nn.Linear(2, 2), torch.ones(2, dtype=torch.complex64)
        model.register_buffer("base", base)
        model.register_buffer("look", look(base))
        del base
        asked = ckptmove.move(model, to=DEVICE, dry_run=True)
        assert ckptmove.move(model, to=DEVICE).moved == asked.moved


@pytest.mark.slow
@apart
def test_conjugates_of_a_view_move_with_it() -> None:
    for conjugate in (torch.conj, lambda view: view.conj().imag, lambda view: view.conj().conj()):
        for keeps_base in (False, True):
            model: Any = nn.Linear(2, 2)
            base = torch.arange(4.0).to(torch.complex64)
            view = base.view(2, 2)
            model.register_buffer("look", conjugate(view))
            model.register_buffer("view", view)
            if keeps_base:
                model.register_buffer("base", base)
            values = model.look.tolist()
            del base, view
            asked = ckptmove.move(model, to=DEVICE, dry_run=True)
            assert ckptmove.move(model, to=DEVICE).moved == asked.moved
            assert {str(each.device) for each in model.buffers()} == {DEVICE}
            assert model.look.tolist() == values
            model.view[0, 0] = 5 + 5j
            assert conjugate(model.view).tolist() == model.look.tolist() != values


@apart
def test_what_holds_a_view_is_told_and_nothing_moves() -> None:
    model: Any = nn.Module()
    base = torch.ones(4, dtype=torch.complex64)
    view = base.view(2, 2)
    model.register_buffer("look", view.conj())
    model.register_buffer("view", view)
    held = view.conj()
    with pytest.raises(RefusedError, match="'view' can't be exchanged"):
        ckptmove.move(model, to=DEVICE)
    assert {str(each.device) for each in model.buffers()} == {"cpu"}
    model.view[0, 0] = 5j
    assert model.look.tolist() == held.tolist() == view.conj().tolist()


@pytest.mark.slow
@apart
def test_a_dry_run_refuses_no_more() -> None:
    for model in (nn.LSTM(2, 2), AveragedModel(nn.Linear(2, 2)), moving.Tangled()):
        ckptmove.move(model, to=DEVICE, dry_run=True)

    @given(recipes)
    @settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
    def check(recipe: dict[str, Any]) -> None:
        model, optimizer = grown(recipe)
        asked = ckptmove.move(model, optimizer, to=DEVICE, dry_run=True)
        assert asked.moved == ckptmove.move(model, optimizer, to=DEVICE).moved
        asked = ckptmove.move(model, optimizer, to="cpu", dry_run=True)
        assert asked.moved == ckptmove.move(model, optimizer, to="cpu").moved

    check()


# -- how it shows itself ---------------------------------------------------------------------------


def test_it_shows_itself_in_a_notebook() -> None:
    report = ckptmove.move(nn.Linear(1, 1), to="cpu")
    assert re.search(r">nothing to move<", report._repr_html_())


def test_a_device_may_come_second_as_in_model_to() -> None:
    model = nn.Linear(2, 2)
    for device in ("cpu", torch.device("cpu")):
        assert str(ckptmove.move(model, device)) == str(ckptmove.move(model, to=device))
    with pytest.raises(ckptmove.DeviceError):
        ckptmove.move(model, "gpu:0")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ckptmove.UsageError, match="device is missing"):
        ckptmove.move(model, optimizer)


def test_an_optimizer_may_be_named_as_torch_names_it() -> None:
    assert import_named(optimizer_name("SGD"), "--optimizer") is torch.optim.SGD
    assert import_named(optimizer_name("torch.optim:Adam"), "--optimizer") is torch.optim.Adam
    with pytest.raises(ckptmove.UsageError, match=r"torch.optim has no 'SDG'"):
        import_named(optimizer_name("SDG"), "--optimizer")
