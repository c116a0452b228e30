"""What needs torch, on whatever torch is installed: `scripts/matrix` runs this with several.

Nothing here uses what only a new torch has, nor tests that need it to be collected.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmove

OPTIMIZERS = [
    name
    for name in (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "RMSprop",
        "RAdam",
        "Rprop",
        "SGD",
    )
    if hasattr(torch.optim, name)
]
#: Simulated, these ask for values that fake tensors lack; that is said, and nobody is blamed.
VALUE_SEEKERS = [name for name in ("Adafactor", "ASGD", "NAdam") if hasattr(torch.optim, name)]

pytestmark = pytest.mark.usefixtures("warm")
absent = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
Saved = dict[str, Any]


class Net(nn.Module):
    """Layers that ask torch about the device: batch norm does so in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return y


MODEL = f"{__file__}:Net"


def training(optimizer: str = "AdamW") -> Saved:
    """A training checkpoint after one step."""
    torch.manual_seed(0)
    net = Net()
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=1e-3)
    net(torch.randn(3, 4)).square().mean().backward()
    made.step()
    return {
        "model": net.state_dict(),
        "optimizer": made.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
    }


def on_cuda(folder: Path, optimizer: str = "AdamW") -> Path:
    """The same, as a GPU machine saves it."""
    before, after = folder / "in.pt", folder / "run.pt"
    torch.save(training(optimizer), before)
    ckptmove.relocate(before, after, to="cuda:0")
    return after


def assert_same(left: Any, right: Any) -> None:
    """Equal, tensors by their bits, with the same types of containers."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
        assert bits[0].equal(bits[1])
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_loaded_is_what_torch_loads(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "run.pt"
    torch.save(training(), path, _use_new_zipfile_serialization=zipped)
    assert_same(ckptmove.load(path), torch.load(path, weights_only=True))


@absent
def test_a_checkpoint_of_a_gpu_is_loaded_where_it_is_wanted(tmp_path: Path) -> None:
    path = on_cuda(tmp_path)
    with pytest.raises(ckptmove.CkptmoveError, match="cuda:0") as raised:
        ckptmove.load(path)
    assert "map_location" in str(raised.value)
    assert_same(ckptmove.load(path, map_location="cpu"), training())


def test_what_is_saved_loads(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    ckptmove.save(training(), path)
    assert_same(torch.load(path, weights_only=True), training())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex64"])
def test_views_are_gathered_on_the_way_there_and_back(tmp_path: Path, dtype: str) -> None:
    wide = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype))
    saved = OrderedDict(whole=wide, strided=wide.t(), part=wide[1:3, ::2])
    torch.save(saved, tmp_path / "in.pt")
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    ckptmove.convert(tmp_path / "out.safetensors", tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), saved)
    assert ckptmove.diff(tmp_path / "in.pt", tmp_path / "out.pt").equal


def test_casts_are_those_of_torch(tmp_path: Path) -> None:
    torch.save(training()["model"], tmp_path / "in.pt")
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "out.pt", dtype="bf16")
    cast = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in training()["model"].items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert_same(cast[name], wanted)


def test_a_model_takes_a_step_on_the_cpu(tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "run.pt")
    report = ckptmove.validate(
        tmp_path / "run.pt", model=MODEL, input="float32[3,4]", step="train", device="cpu"
    )
    report.raise_if_failed()
    assert [report.of(check).outcome for check in ("model", "step", "trace")] == ["passed"] * 3


@pytest.mark.sample(1)
@absent
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_simulated(tmp_path: Path, optimizer: str) -> None:
    report = _simulated(tmp_path, optimizer)
    outcomes = [report.of(check).outcome for check in ("model", "step", "trace")]
    assert outcomes == ["passed"] * 3, report


@pytest.mark.slow
@absent
@pytest.mark.parametrize("optimizer", VALUE_SEEKERS)
def test_who_needs_values_is_not_blamed(tmp_path: Path, optimizer: str) -> None:
    report = _simulated(tmp_path, optimizer)
    assert report.of("step").outcome in ("passed", "skipped"), report
    report.raise_if_failed()


def _simulated(folder: Path, optimizer: str) -> Any:
    return ckptmove.validate(
        on_cuda(folder, optimizer),
        model=MODEL,
        input="float32[3,4]",
        step="train",
        optimizer=f"torch.optim:{optimizer}",
        device="cuda:0",
        simulate=True,
    )


def test_a_living_model_is_reported_and_moved() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    names = {entry.name for entry in ckptmove.report(net, optimizer).tensors}
    gradients = len(list(net.parameters()))
    assert len(names) == len(net.state_dict()) + gradients + 3 * gradients  # Adam has three of each
    before = [each.data_ptr() for each in net.parameters()]
    ckptmove.move(net, optimizer, to="cpu")
    assert [each.data_ptr() for each in net.parameters()] == before


def test_batches_come_to_the_device() -> None:
    batch: Saved = {"x": torch.ones(3, 4), "n": [1, (torch.zeros(2), "text")]}
    brought = ckptmove.to_device(batch, "meta")
    assert brought["x"].device.type == brought["n"][1][0].device.type == "meta"
    assert [each["x"].shape for each in ckptmove.prefetch([batch, batch], "cpu")] == [(3, 4)] * 2


def test_a_step_is_traced() -> None:
    net = Net()
    with ckptmove.trace(net, device="cpu") as watch:
        net(torch.randn(3, 4)).sum().backward()
    assert not watch.verdicts
    assert sum(watch.trace.operations.values()) > 0
