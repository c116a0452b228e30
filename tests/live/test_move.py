"""move: everything goes or nothing, and every object stays what it is."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptmove
from ckptmove import Moved, RefusedError
from ckptmove.live.inventory.holdings import holdings
from tests.conftest import examples
from tests.devices.second_device import DEVICE, apart, limited
from tests.making import moving
from tests.making.growing import grown, recipes


@apart
def test_everything_goes() -> None:
    moving.check_everything_goes(DEVICE)


@pytest.mark.slow
@apart
def test_training_continues() -> None:
    moving.check_training_continues(DEVICE)
    moving.check_training_there(DEVICE, exact=True)


@pytest.mark.slow
@apart
def test_hooks_stay() -> None:
    moving.check_hooks_stay(DEVICE)


@pytest.mark.slow
@apart
def test_kinds_of_modules() -> None:
    moving.check_kinds_of_modules(DEVICE)


# -- all or nothing --------------------------------------------------------------------------------


@pytest.mark.slow
@apart
def test_without_room_nothing_happens() -> None:
    model, optimizer, _ = moving.ready("AdamW")
    needed = ckptmove.move(model, optimizer, to=DEVICE, dry_run=True).nbytes
    for room in (0, 100, needed // 2, needed - 1):
        with limited(room) as limit:
            said = moving.check_nothing_happened(
                model, optimizer, lambda: ckptmove.move(model, optimizer, to=DEVICE)
            )
            assert "has too little free memory for" in str(said)
            assert limit.used == 0
    with limited(needed) as limit:
        ckptmove.move(model, optimizer, to=DEVICE)
        assert limit.peak == limit.used == needed
    moving.stepping(model, optimizer, DEVICE, 1, seed=3)


@pytest.mark.slow
@apart
def test_what_torch_refuses_to_swap_undoes_all() -> None:
    model, optimizer, _ = moving.ready("AdamW")
    reference = weakref.ref(model.norm.weight)
    with limited(10**6) as limit:
        said = moving.check_nothing_happened(
            model, optimizer, lambda: ckptmove.move(model, optimizer, to=DEVICE)
        )
        assert limit.peak > 0
        assert limit.used == 0
    assert "'norm.weight'" in str(said)
    assert "weak reference" in str(said)
    del reference
    ckptmove.move(model, optimizer, to=DEVICE)
    moving.stepping(model, optimizer, DEVICE, 1, seed=3)


@pytest.mark.slow
@apart
def test_results_that_are_yet_to_be_differentiated() -> None:
    model, optimizer, _ = moving.ready("SGD")
    loss = model(torch.zeros(2, 3, dtype=torch.long)).sum()
    moving.check_nothing_happened(
        model, optimizer, lambda: ckptmove.move(model, optimizer, to=DEVICE)
    )
    loss.backward()
    ckptmove.move(model, optimizer, to=DEVICE)  # the loss may live on
    moving.stepping(model, optimizer, DEVICE, 1, seed=3)


@pytest.mark.slow
@apart
def test_views_that_nobody_holds_are_no_obstacle_and_others_are() -> None:
    model: Any = nn.Module()
    whole = torch.arange(6.0)
    model.part = whole[1:3]
    ckptmove.move(model, to=DEVICE)
    assert model.part.tolist() == [1.0, 2.0]
    assert model.part.untyped_storage().nbytes() == 24

    model, view = nn.Module(), whole[2:]
    model.register_buffer("whole", whole)
    with pytest.raises(RefusedError, match=r"'whole' can't be exchanged: torch itself holds it"):
        ckptmove.move(model, to=DEVICE)
    assert whole.device.type == "cpu"
    del view
    ckptmove.move(model, to=DEVICE)


@apart
def test_an_interrupt_undoes_too() -> None:
    class Nasty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    model = Nasty()
    first = {id(each) for each in model.one.parameters()}
    real = torch.utils.swap_tensors

    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        if id(one) not in first and one.device.type == "cpu":
            raise KeyboardInterrupt
        real(one, other)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap
    try:
        with pytest.raises(KeyboardInterrupt):
            ckptmove.move(model, to=DEVICE)
    finally:
        torch.utils.swap_tensors = real
    assert {str(each.device) for each in model.parameters()} == {"cpu"}
    ckptmove.move(model, to=DEVICE)


# -- who goes where --------------------------------------------------------------------------------


@pytest.mark.slow
@apart
def test_a_step_on_the_device_comes_back() -> None:
    model, optimizer, _ = moving.ready("AdamW")
    ckptmove.move(model, optimizer, to=DEVICE)
    state = optimizer.state[model.norm.weight]
    step = state["step"] = state["step"].to(DEVICE)
    report = ckptmove.move(model, optimizer, to=DEVICE)
    assert report.moved == {f"{DEVICE}→cpu": Moved(1, 4)}
    assert step is state["step"]
    assert step.device.type == "cpu"
    moving.stepping(model, optimizer, DEVICE, 1, seed=3)


@pytest.mark.slow
@apart
def test_hyper_parameters_on_a_device_follow_the_parameters() -> None:
    model = nn.Linear(2, 2).to(DEVICE)
    rate = torch.tensor(0.1, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    report = ckptmove.move(model, optimizer, to="cpu")
    assert rate.device.type == "cpu"
    assert optimizer.param_groups[0]["lr"] is rate
    assert any("capturable" in each for each in report.warnings)
    report = ckptmove.move(model, optimizer, to=DEVICE)  # capturable: there it must be
    assert str(rate.device) == DEVICE
    assert not report.warnings


@apart
def test_state_follows_its_parameter() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.zero_grad()
    model.to(DEVICE)
    model.cpu()  # on this kind of device torch makes new parameters
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    buffer = torch.ones(2, 2, device=DEVICE)
    optimizer.state[model.weight]["momentum_buffer"] = buffer
    report = ckptmove.move(model, optimizer, device_map={"elsewhere": DEVICE})
    assert buffer.device.type == "cpu"
    assert "no tensor name matches 'elsewhere' of the device map" in report.warnings


@pytest.mark.slow
@apart
def test_parameters_of_the_optimizer_alone_stay() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    report = ckptmove.move(model, optimizer, to=DEVICE)
    assert any("parameters that the model does not have" in each for each in report.warnings)
    assert other.weight.device.type == "cpu"
    assert optimizer.state[other.weight]["exp_avg"].device.type == "cpu"
    report = ckptmove.move(model, optimizer, to=DEVICE, other=other)
    assert not report.warnings
    assert str(other.weight.device) == DEVICE
    assert str(optimizer.state[other.weight]["exp_avg"].device) == DEVICE


@pytest.mark.slow
@apart
def test_a_parameter_of_the_optimizer_that_shares_bytes_goes_with_them() -> None:
    weight = nn.Linear(2, 2).weight
    model = nn.ParameterDict({"0": nn.Parameter(torch.ones(1)), "1": weight})
    master = nn.Parameter(weight.data)
    master.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD([master], lr=1.0, momentum=0.9)
    optimizer.step()
    report = ckptmove.move(model, optimizer, device_map={"0": "cpu", "1": DEVICE})
    assert not report.warnings
    optimizer.step()
    assert torch.equal(weight, master)
    assert str(optimizer.state[master]["momentum_buffer"].device) == DEVICE


@pytest.mark.slow
@apart
def test_gradients_of_another_dtype() -> None:
    model = nn.Linear(2, 2, bias=False).bfloat16()
    if not hasattr(model.weight, "grad_dtype"):
        return  # before torch 2.10
    model.weight.grad_dtype = torch.float32
    grad = model.weight.grad = torch.ones(2, 2)
    ckptmove.move(model, to=DEVICE)
    assert model.weight.grad is grad
    assert grad.dtype is model.weight.grad_dtype is torch.float32


@pytest.mark.slow
@apart
def test_what_else_is_given_goes_too() -> None:
    model = nn.Linear(2, 2)
    average = AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    batch: dict[str, Any] = {"x": torch.ones(1, 2), "more": [torch.ones(2)]}
    one = torch.ones(1)
    report = ckptmove.move(model, to=DEVICE, ema=average, scaler=scaler, batch=batch, one=one)
    found = [*average.parameters(), *average.buffers(), scaler._scale, batch["x"], one]
    assert {str(each.device) for each in found if each is not None} == {DEVICE}
    assert not report.unregistered


@pytest.mark.slow
@apart
def test_results_and_chance_stay() -> None:
    model = nn.Linear(2, 2)
    vars(model)["device"], vars(model)["source"] = torch.device("cpu"), torch.Generator()
    model.chance = torch.get_rng_state()
    weight = model.weight
    model.last = torch.ones(1, requires_grad=True) * 2
    report = ckptmove.move(model, to=DEVICE)
    assert any(each.startswith("'last': results of an earlier") for each in report.warnings)
    assert model.weight is weight
    assert model.last.device.type == model.chance.device.type == "cpu"
    assert [each.name for each in report.kept] == ["chance"]
    assert str(model.device) == DEVICE


@apart
def test_two_devices() -> None:
    moving.check_two_devices(DEVICE)


@apart
def test_values_that_name_the_device() -> None:
    def made() -> Any:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Module())
        model.device, model.offload = torch.device("cpu"), "meta"
        model[0].device, model[2].where = "cpu", torch.device("cpu")
        model[1].where = torch.device("cpu")
        return model

    model = made()
    report = ckptmove.move(model, to=DEVICE, values=False)
    assert [each.name for each in report.values_rewritable] == [
        "device",
        "0.device",
        "1.where",
        "2.where",
    ]
    assert str(model.device) == "cpu"
    model = made()
    report = ckptmove.move(model, device_map={"0": DEVICE, "1": "cpu"})
    assert [each.name for each in report.values_rewritten] == ["0.device"]
    assert report.rewritten_to == (DEVICE,)
    assert [each.name for each in report.values_unchanged] == ["device", "2.where"]
    assert model[0].device == DEVICE
    assert str(model.device) == str(model[1].where) == "cpu"


@pytest.mark.slow
@apart
def test_lightning_and_transformers() -> None:
    lightning = pytest.importorskip("lightning")
    transformers = pytest.importorskip("transformers")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = lightning.LightningModule()
            self.inner.layer = nn.Linear(2, 2)
            self.empty = lightning.LightningModule()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    lit = Lit()
    ckptmove.move(lit, lit.configure_optimizers(), to=DEVICE, values=False)
    assert {str(each.device) for each in (lit, lit.inner, lit.empty)} == {DEVICE}

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).eval()
    words = torch.arange(6)[None]
    with torch.no_grad():
        wanted = model(words).logits
    ckptmove.move(model, to=DEVICE)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert str(model.device) == DEVICE
    made = model(words.to(DEVICE)).logits
    torch.testing.assert_close(made.cpu(), wanted)


# -- what is said ----------------------------------------------------------------------------------


@pytest.mark.slow
@apart
def test_a_dry_run_says_the_same() -> None:
    model, optimizer, schedule = moving.ready("AdamW tensor lr")
    before = moving.facts(holdings(model, optimizer, schedule))
    with limited(0):
        asked = ckptmove.move(model, optimizer, scheduler=schedule, to=DEVICE, dry_run=True)
    assert moving.facts(holdings(model, optimizer, schedule)) == before
    kept = {each.name for each in asked.kept}
    moving_ones = {fact.storage: fact.nbytes for name, fact in before.items() if name not in kept}
    report = ckptmove.move(model, optimizer, scheduler=schedule, to=DEVICE)
    assert replace(asked, done=True) == report
    lines = str(report).splitlines()
    assert lines[0].startswith(f"moved: cpu→{DEVICE}: ")
    assert str(asked).startswith(f"would be moved: cpu→{DEVICE}: ")
    assert any(
        line.startswith("kept on cpu: optimizer.state.embed.weight.step and ") for line in lines
    )
    assert any(line.startswith("not registered: both: self.register_buffer(") for line in lines)
    assert "both" in report.unregistered
    told = json.loads(json.dumps(report.to_json()))["moved"][f"cpu→{DEVICE}"]
    assert told["nbytes"] == report.nbytes == sum(moving_ones.values())
    assert told["storages"] == len(moving_ones)


# -- what every model has to bear ------------------------------------------------------------------


@apart
def test_any_model_is_the_same_after_it_was_there() -> None:
    @given(recipes)
    @settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
    def check(recipe: dict[str, Any]) -> None:
        model, optimizer = grown(recipe)
        before = moving.facts(holdings(model, optimizer))
        report = ckptmove.move(model, optimizer, to=DEVICE)
        there = moving.facts(holdings(model, optimizer))
        assert {n: moving.away(each) for n, each in there.items()} == {
            n: moving.away(each) for n, each in before.items()
        }
        assert {each.device for each in there.values()} == {DEVICE}
        assert sum(each.storages for each in report.moved.values()) == len(
            {each.storage for each in there.values()}
        )
        assert not ckptmove.move(model, optimizer, to=DEVICE).moved
        ckptmove.move(model, optimizer, to="cpu")
        assert moving.facts(holdings(model, optimizer)) == before

    check()


@pytest.mark.slow
@apart
def test_a_jagged_tensor_as_a_plain_attribute() -> None:
    model = nn.Module()
    model.held = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)], layout=torch.jagged)
    ckptmove.move(model, to=DEVICE)
    assert str(model.held.device) == DEVICE
    ckptmove.move(model, to="cpu")
    assert [each.tolist() for each in model.held.unbind()] == [[1.0, 1.0], [0.0, 1.0, 2.0]]
