"""Batches that move themselves in place, as those of torch_geometric do, and what is plain."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import ckptmove
from ckptmove import UsageError
from tests.devices.second_device import DEVICE, apart


class Store:
    """Holds the tensors of a graph, in an object of its own."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.mapping = tensors

    def __copy__(self) -> Store:
        return Store(**self.mapping)


class Graph:
    """As `torch_geometric.data.Data`: `to` changes the store and returns the graph."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.store = Store(**tensors)

    def __copy__(self) -> Graph:
        made = Graph()
        made.store = copy.copy(self.store)
        return made

    def to(self, device: Any) -> Graph:
        for name, each in self.store.mapping.items():
            self.store.mapping[name] = each.to(device)
        return self


@pytest.mark.slow
@apart
def test_what_moves_in_place_is_moved_and_the_original_stays() -> None:
    graph = Graph(x=torch.ones(3), edges=torch.zeros(2, 4))
    for batch in (graph, [graph, torch.ones(2)]):
        moved: Any = ckptmove.to_device(batch, DEVICE)
        there = moved[0] if isinstance(moved, list) else moved
        assert {str(each.device) for each in there.store.mapping.values()} == {DEVICE}
        assert {str(each.device) for each in graph.store.mapping.values()} == {"cpu"}


def test_what_moves_in_place_and_is_there_is_itself() -> None:
    graph = Graph(x=torch.ones(3), edges=torch.zeros(2, 4))
    assert ckptmove.to_device(graph, "cpu") is graph
    batch = [graph, {"y": torch.ones(2)}]
    assert ckptmove.to_device(batch, "cpu") is batch


@pytest.mark.slow
@apart
def test_graphs_of_torch_geometric() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graph: Any = data.Data(x=torch.ones(4, 3), edge_index=torch.tensor([[0, 1], [1, 2]]))
    for each in (graph, data.Batch.from_data_list([graph, graph])):
        moved = ckptmove.to_device(each, DEVICE)
        assert type(moved) is type(each)
        assert (str(moved.x.device), str(moved.edge_index.device)) == (DEVICE, DEVICE)
        assert each.x.device.type == "cpu"
        assert ckptmove.to_device(each, "cpu") is each


@pytest.mark.slow
@apart
def test_dictionaries_of_tensordict() -> None:
    library = pytest.importorskip("tensordict")
    inner = {"x": torch.ones(3, 2), "more": {"y": torch.zeros(3)}}
    batch: Any = library.TensorDict(inner, batch_size=[3])
    stacked = library.lazy_stack([batch, batch.clone()])
    declared = library.tensorclass(type("Pair", (), {"__annotations__": dict.fromkeys(inner, Any)}))
    pair = declared(**batch, batch_size=[3]).lock_()
    for each in (batch, batch.clone().lock_(), stacked, pair):
        moved = ckptmove.to_device(each, DEVICE)
        (fetched,) = ckptmove.prefetch([{"batch": each}], DEVICE)
        for there in (moved, fetched["batch"]):
            assert type(there) is type(each)
            assert (there.batch_size, there.is_locked) == (each.batch_size, each.is_locked)
            found = (there.get("x"), there.get(("more", "y")))
            assert {str(part.device) for part in found} == {DEVICE}
            assert str(there.device) == DEVICE
        assert ckptmove.to_device(moved, DEVICE) is moved
        assert each.get(("more", "y")).device.type == "cpu"
        assert each.device is None


@pytest.mark.slow
@apart
def test_plain_batches_are_told_from_those_that_share() -> None:
    x = torch.arange(6.0)
    plain: dict[str, Any] = {
        "x": x,
        "more": [torch.ones(2), ("name", 3, None)],
        "y": (torch.zeros(1),),
    }
    moved = ckptmove.to_device(plain, DEVICE)
    assert [*moved] == [*plain]
    assert moved["more"][1] is plain["more"][1]
    assert str(moved["y"][0].device) == str(moved["x"].device) == DEVICE
    assert torch.equal(moved["x"].cpu(), x)
    assert ckptmove.to_device(moved, DEVICE) is moved
    shared = ckptmove.to_device([x, x, x[2:4]], DEVICE)
    assert shared[0] is shared[1]
    assert shared[2].untyped_storage()._cdata == shared[0].untyped_storage()._cdata
    around: list[Any] = [x]
    around.append(around)
    there = ckptmove.to_device(around, DEVICE)
    assert there[1] is there
    with pytest.raises(ckptmove.UsageError, match="no values"):
        ckptmove.to_device([torch.ones(2, device="meta")], "cpu")


def test_a_batch_that_is_there_is_itself() -> None:
    batch = {"x": torch.ones(2), "n": [1, (torch.ones(1),)]}
    assert ckptmove.to_device(batch, "cpu") is batch
    assert ckptmove.to_device(batch, torch.device("cpu")) is batch
    with pytest.raises(ckptmove.DeviceError):
        ckptmove.to_device(batch, "cuda:99")


class Pair(NamedTuple):
    """As a collate function gives it."""

    x: torch.Tensor
    y: torch.Tensor


class Titled(Pair):
    """A named tuple with something of its own."""

    title = ""


@apart
def test_named_tuples_and_batches_of_transformers() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    titled = Titled(x, y)
    titled.title = "first"
    encoding = transformers.BatchEncoding({"input_ids": x, "labels": y}, tensor_type="pt")
    encoding.kept = "own"
    batch = {"pair": Pair(x, y.clone()), "text": "a"}
    for there in (DEVICE, "cpu"):
        pair = ckptmove.to_device(batch, there)["pair"]
        assert type(pair) is Pair
        assert {str(each.device) for each in pair} == {there}
        moved: Any = ckptmove.to_device(encoding, there)
        assert type(moved) is transformers.BatchEncoding
        assert {str(each.device) for each in moved.values()} == {there}
        assert moved.kept == "own"
        with_title: Any = ckptmove.to_device(titled, there)
        assert (type(with_title), with_title.title) == (Titled, "first")
    assert {str(each.device) for each in (*encoding.values(), *batch["pair"])} == {"cpu"}
    assert ckptmove.to_device(batch, "cpu") is batch
    assert ckptmove.to_device(encoding, "cpu") is encoding


@pytest.mark.parametrize("keep", ["graph.x", "graph.store.mapping.x", "*.edges", ["y", "graph.x*"]])
def test_what_is_kept_is_not_moved_with_the_whole_that_it_is_in(keep: Any) -> None:
    batch = {"graph": Graph(x=torch.ones(3), edges=torch.zeros(2, 4)), "y": torch.ones(2)}
    with pytest.raises(UsageError, match="is in a Graph that moves itself") as caught:
        ckptmove.to_device(batch, "meta", keep=keep)
    assert "keep='graph'" in str(caught.value.hint)
    with pytest.raises(UsageError, match="is in a Graph"):
        ckptmove.to_device(batch["graph"], "meta", keep="x")
    kept: Any = ckptmove.to_device(batch, "meta", keep="graph")
    assert kept["graph"] is batch["graph"]
    assert kept["y"].is_meta
    moved: Any = ckptmove.to_device(batch, "meta", keep="lengths")
    assert moved["y"].is_meta


def test_what_is_kept_of_a_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, batch_size=[2])
    for keep in ("a", "n.b", "*"):
        if keep == "*":
            assert ckptmove.to_device(batch, "meta", keep=keep) is batch
            continue
        with pytest.raises(UsageError, match="is in a TensorDict that moves itself"):
            ckptmove.to_device(batch, "meta", keep=keep)
