"""Batches on devices: types, identities, memory and history as they were, and nothing else moved.

`meta` is a second device that every machine has, though without values; those are looked at on the
second device of tests, and on a GPU where there is one.
"""

from __future__ import annotations

import queue
import threading
from collections import ChainMap, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import combinations
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import ckptmove
from ckptmove import DeviceError, UsageError, prefetch
from tests.devices.second_device import DEVICE, apart
from tests.making.nesting import (
    KINDS,
    Frozen,
    Pair,
    Plain,
    Strict,
    Tree,
    compared,
    contents,
    loud,
    ordered,
    snapshot,
    trees,
)

to_device: Callable[..., Any] = ckptmove.to_device
META = torch.device("meta")
GPU = "cuda:0"

cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_containers_come_back_as_they_are(kind: str) -> None:
    make, get = KINDS[kind]
    tensor = torch.ones(2)
    batch = make(tensor)
    moved = to_device(batch, "meta")
    assert type(moved) is type(batch)
    assert moved is not batch
    assert get(moved).device == META
    assert get(batch) is tensor
    assert to_device(batch, "cpu") is batch
    assert to_device(make(1), "meta") == make(1)


def test_what_containers_are_besides_theircontents_stays() -> None:
    made: Any = ordered(torch.ones(1))
    moved = to_device([made, defaultdict(list, x=made), deque([made], maxlen=3), loud(made)], META)
    assert list(moved[0]) == ["b", "a"]
    assert moved[0]._metadata is made._metadata
    moved[0].move_to_end("b")  # its order is that of an OrderedDict
    assert list(moved[0]) == ["a", "b"]
    assert moved[1].default_factory is list
    assert moved[2].maxlen == 3
    assert moved[3].size == 3


def test_what_is_no_tensor_is_not_touched() -> None:
    words, array, other = ["a", "b"], object(), iter([torch.ones(1)])
    batch = {"x": torch.ones(1), "words": words, "rest": (array, other), torch.ones(1): None}
    moved = to_device(batch, "meta")
    assert moved["words"] is words
    assert moved["rest"] is batch["rest"]
    assert list(moved) == list(batch)  # keys too, by identity
    assert to_device(other, "meta") is other
    assert to_device(Tensor, "meta") is Tensor
    assert to_device(None, "meta") is None


def test_packed_sequences_keep_their_sizes_on_the_cpu() -> None:
    packed: Any = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    moved, sizes = to_device([packed, packed.batch_sizes], "meta")
    assert type(moved) is PackedSequence
    assert [moved.data.device, moved.sorted_indices.device] == [META, META]  # type: ignore[union-attr]
    assert moved.batch_sizes is packed.batch_sizes
    assert sizes.device == META


class Batch:
    """As users make them."""

    def __init__(self, x: Any, **more: Any) -> None:
        self.x = x
        vars(self).update(more)


class Noisy:
    """Nothing of it may run."""

    def __init__(self, x: Any) -> None:
        object.__setattr__(self, "x", x)

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    __setattr__ = __copy__ = __reduce_ex__ = __getattribute__  # type: ignore[assignment,misc]


def test_objects_of_any_class_are_taken_apart() -> None:
    x = torch.ones(2)
    noisy: Any = Noisy(x)
    batch: Any = Batch([x], more=SimpleNamespace(inner=Batch(x, ids=["a"])), noisy=noisy)
    vars(batch)["itself"] = batch
    moved = to_device({"batch": batch}, "meta")["batch"]
    assert moved.itself is moved
    assert [type(each) for each in (moved, moved.more.inner)] == [Batch, Batch]
    assert moved.x[0] is moved.more.inner.x is object.__getattribute__(moved.noisy, "x")
    assert moved.x[0].device == META
    assert moved.more.inner.ids is batch.more.inner.ids
    assert batch.x[0] is x
    kept = to_device(batch, "meta", keep="more.inner.x")
    assert kept is batch  # it is one tensor


def test_what_is_known_to_be_on_a_device_is_known_so_there() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 3)
    moved = to_device(Batch(torch.ones(1), device=cpu, _device=gpu, offload_device=cpu), "meta")
    assert (moved.device, moved._device, moved.offload_device) == (META, gpu, cpu)
    nothing = Batch(1, device=cpu)
    assert to_device(nothing, "meta") is nothing


def test_distributions_are_taken_apart() -> None:
    prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    moved = to_device([prior], "meta")[0]
    assert (moved.loc.device, moved.scale.device, prior.loc.device.type) == (META, META, "cpu")


class Named(Enum):
    ONE = torch.ones(1)


class Reads:
    """It reads something, one after the other."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __iter__(self) -> Reads:
        return self

    def __next__(self) -> Any:
        return self.x


class Opened:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Freed:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __del__(self) -> None:
        pass


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Any) -> None:
        self.x = x


def queued(x: Any) -> Any:
    made: queue.Queue[Any] = queue.Queue()
    made.put(x)
    return made


ALONE: dict[str, Callable[[Tensor], Any]] = {
    "an optimizer": lambda x: torch.optim.SGD([x], lr=0.1),
    "a data set": Items,
    "a loader": lambda x: torch.utils.data.DataLoader([x]),  # type: ignore[arg-type]
    "an iterator of the user's": Reads,
    "a generator": lambda x: (each for each in [x]),
    "what is opened": Opened,
    "what frees something": Freed,
    "a queue": queued,
    "a thread": lambda x: threading.Thread(args=(x,)),
    "a function": lambda x: lambda: x,
    "a partial": lambda x: partial(print, x),
    "a type": lambda x: type("Made", (), {"x": x}),
    "a member of an enum": lambda x: Named.ONE,
    "what has a lock": lambda x: Batch(x, lock=threading.Lock()),
    "what has a model": lambda x: Batch(x, model=nn.Linear(1, 1)),
    "what has models": lambda x: Batch(1, models={"a": nn.Linear(1, 1)}),
    "what has no end": lambda x: Batch([list(range(300_000)), [x]]),
}


@pytest.mark.parametrize("kind", ALONE)
def test_what_is_more_than_data_is_left_alone(kind: str) -> None:
    alone, x = ALONE[kind](torch.ones(1)), torch.ones(1)
    moved = to_device({"x": x, "alone": alone}, "meta")
    assert moved["x"].device == META
    assert moved["alone"] is alone
    assert to_device(alone, "meta") is alone


def test_much_beside_a_tensor_is_no_limit() -> None:
    words = [str(n) for n in range(250_000)]
    moved = to_device(Batch(words, y=[torch.ones(1)], z=torch.ones(1)), "meta")
    assert (moved.y[0].device, moved.z.device) == (META, META)


def test_a_shown_dict_shows_the_new_one() -> None:
    shown: dict[str, Any] = {"x": torch.ones(1)}
    moved = to_device((MappingProxyType(shown), shown), "meta")
    moved[1]["y"] = 1
    assert list(moved[0]) == ["x", "y"]
    assert shown["x"].device.type == "cpu"
    ring: dict[str, Any] = {"x": torch.ones(1)}
    ring["itself"] = MappingProxyType(ring)
    around = to_device(ring["itself"], "meta")
    assert around["itself"] is around
    chained = ChainMap({"x": torch.ones(1)}, shown)
    assert to_device(chained, "meta", keep="x") is chained


# -- identity --------------------------------------------------------------------------------------


def test_one_object_stays_one() -> None:
    tensor = torch.ones(2)
    inner = [tensor]
    moved = to_device({"a": inner, "b": (inner, tensor), "c": {"x": tensor}}, "meta")
    assert moved["a"] is moved["b"][0]
    assert moved["a"][0] is moved["b"][1] is moved["c"]["x"]


def test_what_holds_itself_can_be_moved() -> None:
    ring: list[Any] = [torch.ones(1)]
    ring.append((ring, {"ring": ring}))
    moved = to_device(ring, "meta")
    assert moved[1][0] is moved
    assert moved[1][1]["ring"] is moved
    assert ring[1][0] is ring
    around = to_device((ring[1],), "meta")  # from within the ring
    assert around[0][0][1] is around[0]
    frozen = Frozen(torch.ones(1))
    object.__setattr__(frozen, "y", (frozen,))
    again = to_device(frozen, "meta")
    assert again.y[0] is again
    assert again.x.device == META
    noted = Strict(torch.ones(1))
    noted.note = (noted,)
    twin = to_device(noted, "meta")
    assert twin.note[0] is twin


@pytest.mark.parametrize(
    "make",
    [list, tuple, lambda x: {"x": x[0]}, lambda x: Plain(*x)],
    ids=["list", "tuple", "dict", "dataclass"],
)
def test_depth_is_no_limit(make: Callable[[list[Any]], Any]) -> None:
    deep = make([torch.ones(1)])
    for _ in range(5_000):
        deep = make([deep])
    moved = to_device(deep, "meta", keep="nothing.*")
    while not isinstance(moved, Tensor):
        moved = moved.x if isinstance(moved, Plain) else next(iter(contents(moved)))[1]
    assert moved.device == META


@given(trees())
def test_any_nesting(tree: Tree) -> None:
    before = snapshot(tree.root)
    for one, other in compared(tree.root, to_device(tree.root, "meta"), META):
        assert (other.shape, other.dtype) == (one.shape, one.dtype)
    compared(tree.root, to_device(tree.root, "cpu"), torch.device("cpu"))
    assert snapshot(tree.root) == before


@apart
@given(trees())
def test_any_nesting_keeps_its_values(tree: Tree) -> None:
    moved = to_device(tree.root, DEVICE)
    there = compared(tree.root, moved, torch.device(DEVICE))
    back = compared(moved, to_device(moved, "cpu", non_blocking=True), torch.device("cpu"))
    for one, other in [*there, *back]:
        assert torch.equal(one.cpu(), other.cpu())
    for (one, there_one), (two, there_two) in combinations(there, 2):
        if one.numel() and two.numel():
            between = one.data_ptr() - two.data_ptr()
            is_shared = one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
            if is_shared and _overlap(one, two):
                assert there_one.data_ptr() - there_two.data_ptr() == between


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Whether contiguous tensors show bytes in common."""
    if not (one.is_contiguous() and two.is_contiguous()):
        return False
    first, second = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (one, two))
    return second[0] < first[1]


# -- names that stay -------------------------------------------------------------------------------


def test_what_is_kept_stays() -> None:
    one, two = torch.ones(1), torch.ones(2)
    batch: dict[str, Any] = {
        "x": one,
        "lengths": [two],
        "inner": Pair({"lengths": two}, Plain(one, two)),
    }
    moved = to_device(batch, "meta", keep="lengths")
    assert moved["x"].device == META
    assert moved["lengths"] is batch["lengths"]
    assert moved["inner"].x["lengths"] is two  # for one of its names is kept
    below = to_device(batch, "meta", keep=["*.lengths", "inner.y.x"])
    assert below["x"] is one
    assert below is batch
    assert to_device(batch, "meta", keep="inner.y.y")["lengths"] is batch["lengths"]
    assert to_device(batch, "meta", keep="*") is batch
    wrapped = UserDict(lengths=two, x=one)
    assert to_device(wrapped, "meta", keep="lengths")["lengths"] is two
    assert to_device((wrapped,), "meta", keep="0.lengths")[0]["x"].device == META


def test_keep_spares_what_would_be_refused() -> None:
    batch = {"model": nn.Linear(1, 1), "empty": torch.empty(1, device="meta"), "x": 1}
    assert to_device(batch, "cpu", keep=["model", "empty"]) is batch


# -- tensors ---------------------------------------------------------------------------------------


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def shares(one: Tensor, two: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == two.untyped_storage()._cdata)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda base: base.t(),
    "channels last": lambda base: (
        base[:4, :48].reshape(4, 3, 4, 4).to(memory_format=torch.channels_last)
    ),
    "windows": lambda base: base[0].unfold(0, 4, 1),
    "expanded": lambda base: base[0].expand(5, 64),
    "expanded number": lambda base: base[0, 0].expand(5, 64),
    "rows": lambda base: base[1:3],
    "empty": lambda base: base[:0].t(),
    "number": lambda base: base[3, 3],
    "of size one": lambda base: base[:1, :1].as_strided((1, 1), (7, 9)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_strides_stay(look: str) -> None:
    tensor = LOOKS[look](torch.arange(256.0).reshape(4, 64))
    moved = to_device([tensor], "meta")[0]
    assert (moved.shape, moved.stride()) == (tensor.shape, tensor.stride())
    assert nbytes(moved) <= max(256, 16 + 4 * tensor.numel())


def test_what_overlaps_does_so_there() -> None:
    ids = torch.arange(20).reshape(2, 10)
    x, y = to_device((ids[:, :-1], ids[:, 1:]), "meta")
    assert shares(x, y)
    assert (x.storage_offset(), y.storage_offset()) == (0, 1)
    assert x.stride() == y.stride() == (10, 1)
    apart = to_device((ids[0], ids[1]), "meta")
    assert not shares(*apart)
    raw = torch.zeros(64, dtype=torch.uint8)
    words = to_device({"a": raw[3:], "b": raw[4:20].view(torch.float32)}, "meta")
    assert shares(words["a"], words["b"])
    assert words["b"].storage_offset() * 4 == 1 + words["a"].storage_offset()


def test_a_small_part_of_a_large_storage_goes_alone() -> None:
    big = torch.empty(1000, 1000)
    batch = (
        big[3, 100:200],
        big[:, 5],
        big[:, 10:12],
        big[:, 11:14].t(),
        big[:, 11].expand(9, 1000),
    )
    row, column, *rest = to_device(batch, "meta")
    assert (nbytes(row), nbytes(column)) == (400, 4_000)
    assert all(shares(rest[0], each) for each in rest)
    assert nbytes(rest[0]) == 4 * 4_000
    alone = to_device([big[:, 5]], "meta")[0]
    assert nbytes(alone) == 4_000
    spread = to_device([big[:, 5].expand(3, 1000)], "meta")[0]
    assert (nbytes(spread), spread.stride()) == (4_000, (0, 1))


@apart
def test_values_survive_each_way_of_copying() -> None:
    big = torch.arange(40_000.0).reshape(200, 200)
    half = big.to(torch.complex64).conj()
    batches: list[list[Tensor]] = [
        *([LOOKS[name](big.reshape(625, 64))] for name in LOOKS),
        [big[:, 5]],
        [big[:, 5].expand(3, 200)],
        [big[:, 10:12], big[:, 11:14].t(), big[:, 11].expand(9, 200)],
        [big[:, 10:12].view(torch.int32), big[:, 11:14]],
        [big[2:4].view(torch.uint8)[:, 1:], big[3:7, :5]],
        [big[3, 100:150], big[:, 5], big[:, 4:6]],
        [big[3], big[:, 5]],
        [big.flatten()[1:4], big.flatten()[::5000], big.flatten()[3::7777]],  # no strides for that
        [half, half.imag, big.bool()],
        [half[:, ::2]],
    ]
    for batch in batches:
        moved = to_device(batch, DEVICE)
        for one, other in zip(batch, moved, strict=True):
            assert other.device.type == "privateuseone"
            assert torch.equal(other.cpu(), one)
            assert other.shape == one.shape
    x, y = to_device([big[:, 10:12], big[:, 11:14].t()], DEVICE)
    assert nbytes(x) == 200 * 4 * 4
    x[0, 1] = -1.0
    assert y.cpu()[0, 0] == -1.0
    assert big[0, 11] == 11.0


def test_leaves_stay_leaves() -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    parameter, still = nn.Parameter(torch.ones(2, 2).t()), nn.Parameter(torch.ones(2), False)
    moved = to_device([leaf, leaf.detach(), parameter, still], "meta")
    assert [each.requires_grad for each in moved] == [True, False, True, False]
    assert all(each.is_leaf for each in moved)
    assert [type(each) for each in moved] == [Tensor, Tensor, nn.Parameter, nn.Parameter]
    assert shares(moved[0], moved[1])
    assert moved[0].grad is None


@pytest.mark.slow
@apart
def test_a_tensor_with_a_history_is_moved_differentiably() -> None:
    leaf = torch.ones(3, requires_grad=True)
    moved = to_device({"x": leaf * 2}, DEVICE)["x"]
    assert not moved.is_leaf
    moved.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


class Marked(Tensor):
    """A subclass."""


class Weight(nn.Parameter):
    """A subclass of what torch makes plain."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_other_tensors_are_moved_by_torch() -> None:
    batch = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "marked": torch.ones(2).as_subclass(Marked),
        "weight": Weight(torch.ones(2)),
    }
    moved = to_device(batch, "meta")
    for name, tensor in batch.items():
        assert type(moved[name]) is type(tensor)
        assert (moved[name].layout, moved[name].device) == (tensor.layout, META)
        assert moved[name].requires_grad == tensor.requires_grad
    assert moved["weight"].is_leaf


def test_tensors_of_one_device_are_left_when_others_go() -> None:
    here, there = torch.ones(1), torch.ones(1, device="meta")
    moved = to_device([here, there, (there,)], "meta:0")
    assert moved[1] is there
    assert moved[0].device == META


class Copies(TorchDispatchMode):
    """Notes of each copy between devices whether it was waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hurried: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::_to_copy":
            self.hurried.append(bool((kwargs or {}).get("non_blocking")))
        elif name == "aten::copy_":
            self.hurried.append(bool((kwargs or {}).get("non_blocking") or args[2:] == (True,)))
        return func(*args, **(kwargs or {}))


@apart
def test_only_copies_from_pinned_memory_are_not_waited_for() -> None:
    with Copies() as copies:
        moved = to_device([torch.ones(3), torch.ones(3, 3)[:, :2]], DEVICE, non_blocking=True)
        to_device(moved, "cpu", non_blocking=True)
    assert len(copies.hurried) >= 4
    assert not any(copies.hurried)


# -- what moves itself -----------------------------------------------------------------------------


class Graph:
    """It moves in place, what it has in a dict too, as those of some libraries do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.more = {"edges": [x]}
        self.told: dict[str, Any] = {}

    def to(self, device: Any, *names: str, non_blocking: bool = False) -> Graph:
        self.told["non_blocking"] = non_blocking
        self.x = self.x.to(device)
        self.more["edges"][0] = self.more["edges"][0].to(device)
        return self


class Silent:
    """It takes no more than a device, by name, and gives nothing back."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *, device: torch.device) -> None:
        self.x = self.x.to(device)


@dataclass
class Own:
    """Its own way of moving is believed, and it can't be copied."""

    x: Tensor
    moves: int = 0

    def to(self, device: torch.device) -> Own:
        return Own(self.x.to(device), self.moves + 1)

    def __copy__(self) -> Own:
        raise RuntimeError("once is enough")


def test_what_moves_itself_is_asked_and_not_changed() -> None:
    x = torch.ones(2)
    graph, silent, own = Graph(x), Silent(x), Own(x)
    moved = to_device({"graph": graph, "again": [graph], "rest": (silent, own)}, "meta")
    assert moved["graph"] is moved["again"][0]
    assert type(moved["graph"]) is Graph
    assert moved["graph"].x.device == META
    assert moved["graph"].more["edges"][0].device == META
    assert moved["rest"][0].x.device == META
    assert (moved["rest"][1].x.device, moved["rest"][1].moves) == (META, 1)
    assert graph.x is x
    assert graph.more["edges"][0] is x
    assert graph.told == {}
    assert silent.x is own.x is x
    assert to_device([silent], "cpu")[0] is silent


@pytest.mark.slow
@apart
def test_what_moves_itself_is_told_not_to_wait_where_that_is_safe() -> None:
    graph = Graph(torch.ones(2))
    there = to_device(graph, DEVICE, non_blocking=True)
    assert there.told == {"non_blocking": True}
    assert to_device(there, "cpu", non_blocking=True).told == {"non_blocking": False}
    assert to_device(graph, DEVICE).told == {"non_blocking": False}
    storage = torch.ones(1).untyped_storage()
    assert to_device(storage, "cpu") is storage
    assert to_device(storage, DEVICE).device.type == "privateuseone"
    assert to_device(Silent(torch.ones(1)), DEVICE, non_blocking=True).x.device.type == DEVICE[:-2]


def test_batches_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    ids = torch.ones(2, 3, dtype=torch.int64)
    encoding = transformers.BatchEncoding({"input_ids": ids, "words": [["a"], ["b"]]})
    features = transformers.BatchFeature({"pixel_values": ids})
    output = outputs.BaseModelOutput(last_hidden_state=ids, hidden_states=(ids, ids[1:]))
    moved = to_device([encoding, features, output], "meta")
    assert [type(each) for each in moved] == [type(each) for each in (encoding, features, output)]
    assert moved[0].input_ids.device == META
    assert moved[0]["words"] is encoding["words"]
    assert moved[1].pixel_values is moved[0]["input_ids"]
    assert moved[2].last_hidden_state is moved[2]["last_hidden_state"] is moved[2][0]
    assert shares(*moved[2].hidden_states)
    assert moved[2].keys() == output.keys()
    assert encoding["input_ids"] is features["pixel_values"] is output.last_hidden_state is ids


def test_a_cache_goes_with_the_output() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.ones(1, 1, 2, 4)
    decoder, encoder = transformers.DynamicCache(), transformers.DynamicCache()
    for cache in (decoder, encoder):
        cache.update(x, x, 0)
    for cache in (decoder, transformers.EncoderDecoderCache(decoder, encoder)):
        output = outputs.CausalLMOutputWithPast(logits=x, past_key_values=cache)
        moved = to_device(output, "meta")
        inner = getattr(moved.past_key_values, "self_attention_cache", moved.past_key_values)
        layer = inner.layers[0]
        assert type(moved.past_key_values) is type(cache)
        assert moved.past_key_values is moved["past_key_values"] is moved[1]
        assert {layer.keys.device, layer.values.device, layer.device, moved.logits.device} == {META}
        assert output.past_key_values is cache
        there = torch.empty(1, 1, 3, 4, device="meta")
        inner.update(there, there, 0)
        assert layer.keys.shape[-2] == 5
        assert cache.get_seq_length() == 2


class Quantity:
    """A number with a unit, to which another kind of `to` belongs."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def to(self, unit: Any) -> Any:
        if unit not in ("m", "km"):
            raise ValueError(f"'{unit}' is not defined\nin the registry")
        return "converted"


class Moment:
    __slots__ = ("_hours",)

    def __init__(self) -> None:
        self._hours = [1, 2]

    def to(self, zone: Any, *names: Any) -> str:
        return f"converted {zone}"


class Anything:
    def to(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


class Late:
    """It has no tensor yet, but minds where those are to be."""

    device: Any = None

    def to(self, where: Any = None, *, device: Any = None) -> Late:
        self.device = device
        return self


def test_what_is_converted_otherwise_is_left_alone() -> None:
    batch = [torch.ones(1), Quantity(1.0), Moment(), Anything(), Quantity]
    moved = to_device(batch, "meta")
    assert moved[0].device == META
    assert all(one is other for one, other in zip(moved[1:], batch[1:], strict=True))
    late = Late()
    assert to_device(late, "meta").device == META
    assert late.device is None


def test_what_fails_to_move_itself_is_named() -> None:
    batch = {"x": [Batch({"q": Quantity(torch.ones(1))})]}
    with pytest.raises(UsageError) as caught:
        to_device(batch, "meta")
    said = "x.0.x.q, a Quantity, can't move itself to meta: ValueError: 'meta' is not defined"
    assert str(caught.value) == said
    assert "keep='x.0.x.q'" in str(caught.value.hint)
    assert isinstance(caught.value.__cause__, ValueError)
    assert to_device(batch, "meta", keep="x.0.x.q") is batch
    with pytest.raises(UsageError, match="the batch, a Quantity, can't"):
        to_device(Quantity(torch.ones(1)), "meta")


# -- refusals --------------------------------------------------------------------------------------


def test_a_model_is_no_batch() -> None:
    with pytest.raises(UsageError, match=r"a model \(Linear\) is a model, not a batch") as caught:
        to_device({"x": [nn.Linear(1, 1)]}, "meta")
    assert "ckptmove.move" in str(caught.value.hint)


@pytest.mark.parametrize("keep", [5, None, [1], b"x", lambda name: True, ["x", None], {1: "x"}])
def test_what_is_no_pattern_is_refused(keep: Any) -> None:
    for verb in (to_device, prefetch):
        with pytest.raises(UsageError, match=r"^keep must be ") as caught:
            verb([], "meta", keep=keep)
        assert "keep='lengths'" in str(caught.value.hint)


def test_patterns_may_be_in_anything() -> None:
    x = torch.ones(1)
    for keep in (["x"], ("x",), {"x"}, {"x": 1}, iter(["x"]), (each for each in ["x"])):
        assert to_device({"x": x}, "meta", keep=keep)["x"] is x


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="on the meta device has no values"):
        to_device([torch.empty(2, device="meta")], "cpu")


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("gpu", "'gpu' is not a device type of torch"),
        ("npu:0", "this torch has no device 'npu:0'"),
        ("lazy:0", "'lazy:0' can't be used here: Could not run"),
        (None, "None is not a device"),
        (True, "True is not a device"),
        pytest.param(
            "cuda:99",
            "'cuda:99' can't be used here: ",
            marks=pytest.mark.skipif(torch.cuda.device_count() > 99, reason="has that many"),
        ),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: Any, says: str) -> None:
    with pytest.raises(DeviceError) as caught:
        to_device([], device)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert caught.value.hint or device in (None, True)


class Collated(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        try:
            to_device(torch.ones(1), "lazy:0")
        except DeviceError as error:
            return str(error.hint)


def test_a_worker_is_told_to_leave_devices_alone() -> None:
    loader = torch.utils.data.DataLoader(Collated(), num_workers=1)
    assert list(loader) == [
        ["this is a worker process of a DataLoader; move the batches in the training loop"]
    ]


# -- on a GPU --------------------------------------------------------------------------------------


class TestOnAGpu:
    pytestmark = cuda

    def test_values_go_there_and_come_back(self) -> None:
        base = torch.arange(400.0).reshape(20, 20)
        batch: dict[str, Any] = {
            "x": base[:, :-1],
            "y": base[:, 1:],
            "t": (base.t(), base[::2, ::3]),
        }
        there = to_device(batch, "cuda")
        assert there["x"].device == torch.device(GPU)
        assert to_device(there, GPU) is there
        assert shares(there["x"], there["y"])
        back = to_device(there, "cpu", non_blocking=True)  # is waited for, nevertheless
        assert torch.equal(back["x"], batch["x"])
        assert torch.equal(back["t"][1], batch["t"][1])
        assert back["t"][0].stride() == batch["t"][0].stride()

    def test_copies_from_pinned_memory_alone_are_not_waited_for(self) -> None:
        pinned, pageable = torch.ones(1 << 20).pin_memory(), torch.ones(1 << 20)
        with Copies() as copies:
            there = to_device([pinned, pageable], GPU, non_blocking=True)
        assert copies.hurried == [True, False]
        with Copies() as copies:
            to_device(there, "cpu", non_blocking=True)
        assert not any(copies.hurried)
        torch.cuda.synchronize()
        assert torch.equal(there[0].cpu(), pinned)

    def test_packed_sequences_run_there(self) -> None:
        packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        moved = to_device(packed, GPU)
        out, _ = nn.LSTM(2, 4).to(GPU)(moved)
        assert out.data.device == torch.device(GPU)
        assert moved.batch_sizes.device.type == "cpu"

    def test_an_index_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(DeviceError, match="'cuda:99' can't be used here"):
            to_device([torch.ones(1)], "cuda:99")
        assert to_device(torch.ones(1), 0).device == torch.device(GPU)
