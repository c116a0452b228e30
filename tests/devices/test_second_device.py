"""The second device is one: it computes as the CPU does, bit by bit, and is not the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.devices.second_device import DEVICE, apart, limited


class Images(nn.Module):
    """Convolutions, one of them transposed and grouped, with running statistics between."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.ConvTranspose2d(8, 4, 2, groups=2)

    def forward(self, batch: Tensor) -> Tensor:
        return nn.functional.max_pool2d(self.two(self.norm(self.one(batch)).relu()), 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(5, 4)),
    "embedding": (lambda: nn.Embedding(10, 8), lambda: torch.randint(10, (5, 7))),
    "images": (Images, lambda: torch.randn(2, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(4, 8, 2, bidirectional=True), lambda: torch.randn(3, 5, 4)),
    "gru": (lambda: nn.GRU(4, 8), lambda: torch.randn(3, 5, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: torch.randn(3, 5, 8)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def trained(model: str, optimizer: str, device: str) -> list[Tensor]:
    """The tensors after three steps of training on a device, still there."""
    torch.manual_seed(0)
    make, batches = MODELS[model]
    module = make().to(device)
    steps = OPTIMIZERS[optimizer](module)
    for _ in range(3):
        steps.zero_grad()
        made = module(batches().to(device))
        (made[0] if isinstance(made, tuple) else made).square().sum().backward()
        steps.step()
    state = [each for of in steps.state.values() for each in of.values()]
    return [*module.state_dict().values(), *(each for each in state if isinstance(each, Tensor))]


@pytest.mark.slow
@apart
def test_training_gives_the_same_bits_as_on_the_cpu() -> None:
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            there, here = (trained(model, optimizer, device) for device in (DEVICE, "cpu"))
            # The number of steps that AdamW made stays on the CPU, as with any device.
            assert all(each.device == torch.device(DEVICE) for each in there if each.dim())
            assert all(map(torch.equal, [each.cpu() for each in there], here)), model


@apart
def test_its_tensors_do_not_mix_with_those_of_the_cpu() -> None:
    here, there = torch.ones(3, 3), torch.ones(3, 3, device=DEVICE)
    assert not there.is_cpu
    mixed: list[Callable[[], object]] = [
        lambda: here + there,
        lambda: here @ there,
        lambda: here.add_(there),
        lambda: torch.tensor(1.0).add_(there.sum()),
        lambda: torch.cat([there, here]),
        lambda: nn.Linear(3, 3)(there),
        lambda: nn.LSTM(3, 3)(there),
        lambda: nn.functional.embedding(torch.tensor([1]), there),
    ]
    for each in mixed:
        with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
            each()
    assert torch.equal((there * torch.tensor(2.0)).cpu(), here * 2)
    assert there[torch.tensor([0, 1])].device == there.device  # as on any device
    with pytest.raises(RuntimeError, match="has one device"):
        torch.ones(3, device="privateuseone:1")


@pytest.mark.slow
@apart
def test_views_share_a_storage() -> None:
    whole = torch.arange(6.0, device=DEVICE).view(2, 3)
    storage = whole.untyped_storage()
    assert (storage.device, storage.nbytes()) == (torch.device(DEVICE), 24)
    for view in (
        whole.t(),
        whole[1:],
        whole.detach(),
        whole.view(torch.int32),
        whole.unfold(1, 2, 1),
    ):
        assert view.untyped_storage()._cdata == storage._cdata
        assert view.data_ptr() == storage.data_ptr() + view.storage_offset() * 4
    seen = torch.empty(0, device=DEVICE).set_(storage, 1, (2, 2), (3, 1))
    seen.zero_()
    assert whole.tolist() == [[0, 0, 0], [3, 0, 0]]
    assert whole.clone().data_ptr() != whole.data_ptr()
    assert copy.deepcopy(whole).tolist() == whole.tolist()
    assert torch.UntypedStorage(3, device=DEVICE).device == storage.device


@apart
def test_tensors_go_there_and_back() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64):
        here = torch.arange(4, dtype=torch.uint8).to(dtype)
        there = here.to(DEVICE)
        assert (there.device, there.dtype) == (torch.device(DEVICE), dtype)
        assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8))
        for target in (torch.empty_like(here), torch.empty_like(there)):
            for source in (here, there):
                assert target.zero_().copy_(source).tolist() == here.tolist()
    assert torch.tensor([1 + 2j], device=DEVICE).conj().tolist() == [1 - 2j]
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2, device=DEVICE))
    torch.utils.swap_tensors(one, other)
    assert (one.device.type, other.device.type) == ("privateuseone", "cpu")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        one.data = torch.ones(2)


@apart
def test_a_module_may_keep_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    module = mlp()
    module(torch.ones(1, 4)).sum().backward()
    before = list(module.parameters())
    for device in (DEVICE, "cpu"):
        module.to(device)
        for kept, parameter in zip(before, module.parameters(), strict=True):
            assert kept is parameter
            assert parameter.grad is not None
            assert parameter.device == parameter.grad.device == torch.device(device)


@pytest.mark.slow
@apart
def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    whole = torch.arange(6.0, device=DEVICE)
    torch.save({"whole": whole, "part": whole[2:]}, path := tmp_path / "there.pt")
    for to in (None, DEVICE, "cpu"):
        loaded = torch.load(path, map_location=to)
        assert loaded["part"].device == torch.device(to or DEVICE)
        assert loaded["part"].tolist() == [2, 3, 4, 5]
        assert loaded["part"].data_ptr() == loaded["whole"].data_ptr() + 8


@pytest.mark.slow
@apart
def test_it_runs_out_of_memory() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    with limited(150) as limit:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 64 bytes"):
            model.to(DEVICE)
        assert [each.device.type for each in model.parameters()] == [*["privateuseone"] * 2, "cpu"]
        assert limit.used == 128
        model.cpu()
        assert (limit.used, limit.peak) == (0, 128)
    with limited(200), pytest.raises(torch.OutOfMemoryError):
        model.to(DEVICE)(torch.ones(4, 4, device=DEVICE)).sum().backward()
    batch = torch.ones(8, requires_grad=True, device=DEVICE)
    loss = (batch * batch).sum()
    with limited(32), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
