"""move, as far as the CPU alone shows it: tensors get other bytes there, and what is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ckptmove
from ckptmove import DeviceError, RefusedError, UsageError
from ckptmove.live.inventory.holdings import HeldTensor, holdings
from ckptmove.live.transfer.swap_storages import Exchange, TensorMove
from tests.making import moving
from tests.making.growing import composites, grown, recipes


@given(recipes)
def test_any_model_is_the_same_on_other_bytes(recipe: dict[str, Any]) -> None:
    """As between a CPU and a GPU: there the inside is not swapped, but set."""
    model, optimizer = grown(recipe)
    found = holdings(model, optimizer)
    before, places = moving.facts(found), _places(found.all)
    with pytest.raises(RuntimeError, match="on purpose"):
        renew([(each.name, each.tensor) for each in found.all], fails=True)
    assert moving.facts(holdings(model, optimizer)) == before
    assert places == _places(holdings(model, optimizer).all)
    renew([(each.name, each.tensor) for each in found.all])
    assert moving.facts(holdings(model, optimizer)) == before
    assert not places & _places(holdings(model, optimizer).all)


def _places(found: list[HeldTensor]) -> set[int]:
    storages = [each.tensor.untyped_storage() for each in found]
    return {each.data_ptr() for each in storages if each.nbytes()}


def renew(tensors: Iterable[tuple[str, torch.Tensor]], fails: bool = False) -> None:
    """Give tensors of the CPU other bytes there, as `move` gives them some elsewhere."""
    exchange = Exchange()
    exchange.prepare(TensorMove(name, tensor, torch.device("cpu")) for name, tensor in tensors)

    def then(undoing: object) -> None:
        if fails:
            raise RuntimeError("on purpose")

    exchange.commit(then)


def test_what_a_view_is_a_view_of_goes_along() -> None:
    part = torch.arange(6.0)[1:3]
    place = part.untyped_storage().data_ptr()
    renew([("part", part)])
    assert part._base is not None
    assert part._base.untyped_storage().data_ptr() == part.untyped_storage().data_ptr() != place
    part.add_(nn.Parameter(torch.ones(2)))  # autograd goes by what it is a view of
    part.sum().backward()


@pytest.mark.parametrize("kind", list(composites()))
def test_composites(kind: str) -> None:
    tensor = composites()[kind]
    told, facts = str(tensor), (id(tensor), type(tensor), tensor.requires_grad, tensor.layout)
    places = parts_at(tensor)
    for fails in (True, False):
        before = parts_at(tensor)
        with pytest.raises(RuntimeError) if fails else nullcontext():
            renew([(kind, tensor)], fails=fails)
        after = parts_at(tensor)
        assert (after == before) if fails else not after & places
        assert str(tensor) == told
        assert (id(tensor), type(tensor), tensor.requires_grad, tensor.layout) == facts


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storages that a tensor is made of."""
    if tensor.layout is torch.jagged:
        return [tensor.values()]  # offsets aren't copied to where they are
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [each for each in inner if isinstance(each, torch.Tensor)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is not torch.strided:
        return [tensor.values()]
    return [tensor]


def parts_at(tensor: torch.Tensor) -> set[int]:
    """Where the bytes of a tensor are."""
    return {each.untyped_storage().data_ptr() for each in parts_of(tensor)} - {0}


def test_what_a_sparse_tensor_shares_it_still_shares() -> None:
    values = torch.ones(2)
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), values, (3,), is_coalesced=True, check_invariants=False
    )
    assert tensor._values().data_ptr() == values.data_ptr()
    renew([("values", values), ("sparse", tensor)])
    assert tensor._values().data_ptr() == values.data_ptr()


def test_a_tensor_that_let_go_of_its_bytes() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(
        RefusedError, match="'freed' can't be moved to cpu: it reaches beyond the 0"
    ):
        renew([("freed", tensor)])


class Subclass(torch.Tensor):
    """A tensor that asks to be asked, and then refuses."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        raise AssertionError(f"it was asked for {function}")


def test_subclasses_are_asked_nothing() -> None:
    tensor = torch.Tensor._make_subclass(Subclass, torch.arange(3.0))
    renew([("odd", tensor)])
    assert type(tensor) is Subclass
    assert torch.equal(torch.Tensor._make_subclass(torch.Tensor, tensor), torch.arange(3.0))


def test_inference_tensors_stay_what_they_are() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        batch = torch.ones(1, 2)
        wanted = model(batch)
    weight, place = model.weight, model.weight.data_ptr()
    renew([("weight", model.weight), ("bias", model.bias)])
    assert model.weight is weight
    assert weight.is_inference()
    assert weight.data_ptr() != place
    with torch.inference_mode():
        assert torch.equal(model(batch), wanted)


def test_a_move_within_inference_mode_makes_no_inference_tensors() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        renew([("weight", model.weight), ("bias", model.bias)])
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_scripted_modules() -> None:
    made = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    batch = torch.randn(3, 2)
    wanted = made.eval()(batch)
    places = _places(holdings(made).all)
    renew([(each.name, each.tensor) for each in holdings(made).all])
    assert not places & _places(holdings(made).all)
    assert torch.equal(made(batch), wanted)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "the device is missing"),
        ({"to": "meta"}, "moving to meta would delete every value"),
        ({"device_map": {"": "meta"}}, "moving to meta would delete every value"),
        ({"to": "gpu"}, "'gpu' is not a device type of torch"),
        ({"to": True}, "True is not a device"),
        ({"device_map": {"": "disk"}}, "the device map offloads '' to disk"),
        ({"to": "cuda:99"}, "'cuda:99' can't be used here: "),
        ({"device_map": {"": 98}}, "'cuda:98' can't be used here: "),
    ],
)
def test_devices_that_make_no_sense(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        ckptmove.move(nn.Linear(1, 1), **asked)
    if "used here" in said:
        assert isinstance(caught.value, DeviceError)
        assert "ckptmove doctor" in (caught.value.hint or "")


class OfItsOwn(nn.Parameter):
    """A parameter that has its own way to move, as those of bitsandbytes do."""

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class DistributedDataParallel(nn.Sequential):
    """By its name as torch's, which wants a process group."""


def dispatched() -> nn.Module:
    """A model that accelerate brings from the CPU while it runs."""
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(1, 1))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def of_its_own() -> nn.Module:
    model = nn.Linear(1, 1)
    model.weight = OfItsOwn(torch.ones(1, 1))
    return model


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(1, 1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "meta": (
        lambda: nn.Linear(1, 1, device="meta"),
        "'weight' is on the meta device",
        "to_empty(device=",
    ),
    "fake": (fake, "'weight' is a fake tensor", "FakeTensorMode"),
    "lazy": (lambda: nn.LazyLinear(1), "'weight' is not initialized", "run a batch"),
    "dispatched": (dispatched, "dispatched by accelerate", "remove_hook_from_submodules(model)"),
    "distributed": (
        lambda: nn.Sequential(DistributedDataParallel(nn.Linear(1, 1))),
        "'0' is a DistributedDataParallel",
        "then wrap it",
    ),
    "its own": (of_its_own, "has its own way to move", "bitsandbytes"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_moved(name: str) -> None:
    make, said, hint = REFUSED[name]
    model = make()
    with pytest.raises(RefusedError, match=re.escape(said)) as caught:
        ckptmove.move(model, to="cpu")
    assert hint in (caught.value.hint or "")


def test_gradients_that_can_be_differentiated() -> None:
    model = nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the ring that this makes
        model(torch.ones(1, 2)).pow(2).sum().backward(create_graph=True)
    with pytest.raises(RefusedError, match=r"'weight.grad' is itself the result"):
        ckptmove.move(model, to="cpu")


def test_where_everything_is_there_is_nothing_to_do() -> None:
    model, optimizer, schedule = moving.ready("AdamW")
    before = moving.facts(holdings(model, optimizer, schedule))
    report = ckptmove.move(model, optimizer, scheduler=schedule, to="cpu")
    assert str(report) == "nothing to move"
    assert report.to_json()["moved"] == {}
    assert moving.facts(holdings(model, optimizer, schedule)) == before
