"""Living models to move, what is remembered of one, and what must hold on any second device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import ckptmove
from ckptmove import RefusedError
from ckptmove.live.inventory.holdings import HeldTensor, Holdings, holdings

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

# Where it may choose, torch computes differently on a CPU and elsewhere.
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, foreach=False),
    "SGD momentum": lambda p: torch.optim.SGD(
        p, lr=0.01, momentum=0.9, nesterov=True, foreach=False
    ),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(
        p, lr=0.01, momentum=0.5, centered=True, foreach=False
    ),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=False),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class Tangled(nn.Module):
    """A model that holds tensors in every way: ties, views, attributes, closures."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)
        self.both = torch.arange(24.0).view(4, 6)
        self.rows = self.both[1:3]  # a view, which says so
        self.columns = self.both.detach()[:, ::2]  # one that doesn't
        self.cached = {"one": torch.ones(1).expand(6), "many": [torch.zeros(2, 0), torch.tensor(2)]}
        self.device = torch.device("cpu")
        self._device = "cpu"
        offset = torch.full((6,), 0.5)
        self.inner.register_forward_hook(lambda module, args, output: output + offset)
        self.offset = [lambda: offset]

    def forward(self, words: Tensor) -> Tensor:
        mean: Tensor = self.embed(words).mean(1)
        mean = self.inner(self.norm(mean)) * self.scale + self.rows.sum(0) + self.cached["one"]
        return self.head(mean)  # type: ignore[no-any-return]


class Fact(NamedTuple):
    """What must be the same about a tensor after it went to a device and back."""

    identity: int
    kind: type
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    is_leaf: bool
    flips: tuple[bool, bool]
    values: bytes
    device: str
    storage: int  # the first that shares it
    nbytes: int


def facts(found: Holdings) -> dict[str, Fact]:
    storages: dict[int, int] = {}
    made: dict[str, Fact] = {}
    for n, each in enumerate(found.all):
        tensor = each.tensor
        storage = tensor.untyped_storage()
        name = (
            each.name if each.name not in made else f"{each.name} at {n}"
        )  # hooks are called alike
        made[name] = Fact(
            id(tensor),
            type(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
            tensor.is_leaf,
            (tensor.is_conj(), tensor.is_neg()),
            _bytes(storage),
            str(tensor.device),
            storages.setdefault(storage._cdata, n),
            storage.nbytes(),
        )
    return made


def _bytes(storage: torch.UntypedStorage) -> bytes:
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return bytes(raw.cpu().tolist())


def away(fact: Fact) -> Fact:
    return fact._replace(device="")


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int, seed: int
) -> None:
    """Train `Tangled`, with the same batches wherever it is."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        words = torch.randint(12, (8, 3), generator=chance).to(device)
        wanted = torch.randint(12, (8,), generator=chance).to(device)

        def closure(words: Tensor = words, wanted: Tensor = wanted) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words), wanted)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)  # type: ignore[arg-type]  # it may give a tensor


def ready(name: str) -> tuple[Tangled, torch.optim.Optimizer, Any]:
    """A model in training, with its optimizer and scheduler, on the CPU."""
    torch.manual_seed(0)
    model = Tangled()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    stepping(model, optimizer, "cpu", 2, seed=1)
    return model, optimizer, schedule


# -- what must hold on any device ------------------------------------------------------------------


def check_everything_goes(device: str) -> None:
    """Every tensor is on the device, every object the same, and sharing is kept."""
    for name in OPTIMIZERS:
        model, optimizer, schedule = ready(name)
        before = facts(holdings(model, optimizer, schedule))
        report = ckptmove.move(model, optimizer, scheduler=schedule, to=device)
        there = facts(holdings(model, optimizer, schedule))
        kept = {each.name for each in report.kept}
        assert {n: away(fact) for n, fact in there.items()} == {
            n: away(fact) for n, fact in before.items()
        }
        assert {n for n, fact in there.items() if fact.device != device} == kept, name
        assert all(n.split(".")[0] in ("optimizer", "scheduler") for n in kept)
        assert sum(each.nbytes for each in report.moved.values()) == report.nbytes
        assert str(model.device) == device
        assert model._device == device
        again = ckptmove.move(model, optimizer, scheduler=schedule, to=device)
        assert not again.moved
        assert str(again).startswith("nothing to move")
        ckptmove.move(model, optimizer, scheduler=schedule, to="cpu")
        assert facts(holdings(model, optimizer, schedule)) == before
        assert str(model.device) == model._device == "cpu"


def check_training_continues(device: str) -> None:
    """A model that went there and back trains as one that never left, bit by bit."""
    for name in OPTIMIZERS:
        stayed, itself, _ = ready(name)
        model, optimizer, _ = ready(name)
        ckptmove.move(model, optimizer, to=device)
        ckptmove.move(model, optimizer, to="cpu")
        for module, trainer in ((stayed, itself), (model, optimizer)):
            stepping(module, trainer, "cpu", 3, seed=2)
        assert state_of(model, optimizer) == state_of(stayed, itself), name


def check_training_there(device: str, exact: bool) -> None:
    """It trains on the device too; with `exact`, to the same bits as on the CPU."""
    for name in OPTIMIZERS:
        stayed, itself, _ = ready(name)
        model, optimizer, _ = ready(name)
        ckptmove.move(model, optimizer, to=device)
        stepping(model, optimizer, device, 3, seed=2)
        stepping(stayed, itself, "cpu", 3, seed=2)
        ckptmove.move(model, optimizer, to="cpu")
        if exact:
            assert state_of(model, optimizer) == state_of(stayed, itself), name
        else:
            for key, value in model.state_dict().items():
                torch.testing.assert_close(value, stayed.state_dict()[key], rtol=1e-2, atol=1e-2)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = holdings(model, optimizer).all
    return {each.name: _bytes(each.tensor.untyped_storage()) for each in found}


def check_nothing_happened(
    model: nn.Module, optimizer: torch.optim.Optimizer, act: Callable[[], object]
) -> RefusedError:
    """An error is raised, and everything is as before, down to the same storages."""

    def places() -> list[tuple[str, int, int]]:
        found = holdings(model, optimizer).all
        return [(e.name, id(e.tensor), e.tensor.untyped_storage().data_ptr()) for e in found]

    before, told = places(), facts(holdings(model, optimizer))
    values = [(each.attribute, each.value) for each in holdings(model).naming]
    with pytest.raises(RefusedError) as caught:
        act()
    assert places() == before
    assert facts(holdings(model, optimizer)) == told
    assert [(each.attribute, each.value) for each in holdings(model).naming] == values
    return caught.value


def check_two_devices(device: str) -> None:
    model: Any = nn.ModuleDict({"encoder": nn.Linear(2, 3), "decoder": nn.Linear(3, 2)})
    model.register_buffer("rest", torch.ones(2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        first = model["encoder"](torch.ones(1, 2, device=model["encoder"].weight.device))
        model["decoder"](first.to(model["decoder"].weight.device)).sum().backward()
        optimizer.step()

    step()
    plan = {"encoder": device, "decoder": "cpu"}
    report = ckptmove.move(model, optimizer, to=device, device_map=plan)
    assert not report.warnings
    where = {each.name: str(each.tensor.device) for each in holdings(model, optimizer).all}
    for name, place in where.items():
        there = "decoder" not in name and not name.endswith("step")
        assert place == (device if there else "cpu"), name
    step()
    report = ckptmove.move(model, optimizer, device_map={"": "cpu"})
    assert {str(each.tensor.device) for each in holdings(model, optimizer).all} == {"cpu"}

    tied = Tangled()
    with pytest.raises(RefusedError, match=r"'embed.weight' and 'head.weight' share a storage"):
        ckptmove.move(tied, device_map={"": "cpu", "embed": device})
    assert str(tied.embed.weight.device) == "cpu"


def check_hooks_stay(device: str) -> None:
    """Hooks on parameters and gradients, attributes and classes of parameters stay."""

    class Marked(nn.Parameter):
        mark: str

    module: Any = nn.Linear(2, 1)
    module.weight = Marked(module.weight.detach().clone())
    module.weight.mark = "kept"
    module.bias.requires_grad_(False)
    called: list[str] = []
    handle = module.weight.register_hook(lambda grad: called.append("hook"))
    module.weight.register_post_accumulate_grad_hook(lambda tensor: called.append("after"))
    module(torch.ones(1, 2)).sum().backward()
    weight, grad = module.weight, module.weight.grad
    ckptmove.move(module, to=device)
    assert module.weight is weight
    assert weight.grad is grad
    assert grad is not None
    assert str(grad.device) == device
    assert type(module.weight) is Marked
    assert module.weight.mark == "kept"
    assert not module.bias.requires_grad
    module(torch.ones(1, 2, device=device)).sum().backward()
    assert called == ["hook", "after"] * 2
    assert weight.grad is grad
    assert grad.tolist() == [[2.0, 2.0]]
    handle.remove()
    module(torch.ones(1, 2, device=device)).sum().backward()
    assert called[4:] == ["after"]


def check_kinds_of_modules(device: str) -> None:
    """Modules that hold weights in an unusual way still compute the same."""
    torch.manual_seed(0)
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    frozen = nn.Linear(4, 4).requires_grad_(False)
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    kinds: dict[str, Any] = {
        "lstm": nn.LSTM(4, 4, 2, bidirectional=True),
        "gru": nn.GRU(4, 4),
        "weight norm": weighted,
        "spectral norm": bounded.eval(),
        "frozen": frozen,
        "half": nn.Linear(4, 4).bfloat16(),
        "compiled": compiled,
        "eval": nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(),
        "copied": copy.deepcopy(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
    }
    for name, module in kinds.items():
        dtype = next(module.parameters()).dtype
        batch = torch.randn(2, 3, 4, dtype=dtype)
        parameters = [id(each) for each in module.parameters()]
        with torch.no_grad():
            wanted = _first(module(batch)) if name != "compiled" else None
            ckptmove.move(module, to=device)
            if name != "compiled":
                made = _first(module(batch.to(device))).cpu()
                torch.testing.assert_close(made, wanted, rtol=1e-2, atol=1e-2)
        assert [id(each) for each in module.parameters()] == parameters
        assert {str(each.device) for each in module.parameters()} == {device}
        flat = getattr(module, "_flat_weights", [])
        assert {id(each) for each in flat} <= set(parameters)


def _first(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]


def named(found: list[HeldTensor]) -> dict[str, Tensor]:
    return {each.name: each.tensor for each in found}
