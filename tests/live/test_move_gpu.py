"""move, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import ckptmove
from ckptmove.live.inventory.holdings import holdings
from tests.making import moving
from tests.making.growing import composites, grown, recipes

GPU = "cuda:0"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch says so of its own thread for backward, and goes on.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def test_everything_goes() -> None:
    moving.check_everything_goes(GPU)


def test_training_continues() -> None:
    moving.check_training_continues(GPU)
    moving.check_training_there(GPU, exact=False)


def test_and_cpu_by_a_device_map() -> None:
    moving.check_two_devices(GPU)


def test_hooks_stay() -> None:
    moving.check_hooks_stay(GPU)


def test_kinds_of_modules() -> None:
    moving.check_kinds_of_modules(GPU)


def test_pinned_memory() -> None:
    model = nn.Linear(64, 64)
    model.weight.data = model.weight.data.pin_memory()
    wanted = model.weight.tolist()
    ckptmove.move(model, to=GPU, non_blocking=True)
    assert model.weight.tolist() == wanted
    ckptmove.move(model, to="cpu", non_blocking=True)
    assert model.weight.tolist() == wanted


def test_without_room_nothing_happens() -> None:
    torch.cuda.empty_cache()
    model: Any = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])  # 16 MiB each
    optimizer = torch.optim.SGD(model.parameters())
    total = torch.cuda.get_device_properties(GPU).total_memory
    used = torch.cuda.memory_reserved(GPU)
    torch.cuda.set_per_process_memory_fraction((used + 100 * 2**20) / total, GPU)
    try:
        before = torch.cuda.memory_allocated(GPU)
        said = moving.check_nothing_happened(
            model, optimizer, lambda: ckptmove.move(model, optimizer, to=GPU)
        )
        assert "has too little free memory for" in str(said)
        assert torch.cuda.memory_allocated(GPU) == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    ckptmove.move(model, optimizer, to=GPU)
    assert str(model[-1].weight.device) == GPU


@pytest.mark.parametrize("kind", [kind for kind in composites() if kind != "by channel"])
def test_composites(kind: str) -> None:
    tensor = composites()[kind]
    model: Any = nn.Module()
    model.held = tensor
    told = str(tensor)
    ckptmove.move(model, to=GPU)
    assert model.held is tensor
    assert str(tensor.device) == GPU
    ckptmove.move(model, to="cpu")
    assert str(tensor) == told


@given(recipes)
@settings(suppress_health_check=list(HealthCheck))
def test_any_model_is_the_same_after_it_was_there(recipe: dict[str, Any]) -> None:
    model, optimizer = grown(recipe)
    before = moving.facts(holdings(model, optimizer))
    ckptmove.move(model, optimizer, to=GPU)
    there = moving.facts(holdings(model, optimizer))
    assert {each.device for each in there.values()} == {GPU}
    ckptmove.move(model, optimizer, to="cpu")
    assert moving.facts(holdings(model, optimizer)) == before
