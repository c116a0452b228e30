"""Batches of a loader on a device: the same ones in the same order, and nothing left running."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ckptmove import DeviceError, UsageError, prefetch
from ckptmove.live.transfer import prefetch as prefetching
from tests.devices.second_device import DEVICE, apart

META = torch.device("meta")
GPU = "cuda:0"

cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Numbers(Dataset[dict[str, Tensor]]):
    """Ten items, of which one may be broken."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.broken:
            raise ValueError("item is broken")
        return {"x": torch.full((3,), float(index)), "n": torch.tensor(index)}


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.ones(1)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


def until_raised(batches: Iterable[Any]) -> tuple[int, Exception]:
    """How many batches come before an exception, and that."""
    seen = 0
    try:
        for _ in batches:
            seen += 1
    except Exception as error:
        return seen, error
    pytest.fail("nothing was raised")


# -- a loader like any other -----------------------------------------------------------------------


@apart
def test_batches_are_the_loaders_and_on_the_device() -> None:
    loader = DataLoader(Numbers(), batch_size=3)
    batches = list(prefetch(loader, DEVICE))
    assert [str(batch["x"].device) for batch in batches] == [DEVICE] * 4
    assert numbers(batches) == numbers(loader)
    assert torch.equal(batches[3]["x"].cpu(), torch.full((1, 3), 9.0))


def test_it_is_iterated_as_often_as_the_loader() -> None:
    batches = prefetch(DataLoader(Numbers(), batch_size=4), "cpu")
    assert numbers(batches) == numbers(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    once = prefetch(iter([torch.ones(1)]), "meta")
    assert [len(list(once)) for _ in range(2)] == [1, 0]
    both = prefetch([1, 2], "cpu")
    assert list(zip(both, both, strict=True)) == [(1, 1), (2, 2)]


def test_its_length_is_the_loaders() -> None:
    assert len(prefetch(DataLoader(Numbers(), batch_size=3), "meta")) == 4
    with pytest.raises(TypeError):
        len(prefetch(DataLoader(Endless()), "meta"))
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch(iter(()), "meta"))
    assert not prefetch([], "meta")
    assert prefetch(iter(()), "meta")
    assert list(prefetch(iter((1, 2)), "meta")) == [1, 2]


def test_its_attributes_are_the_loaders() -> None:
    data = Numbers()
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    batches = prefetch(loader, "meta")
    assert batches.dataset is data
    assert batches.batch_size == 2
    batches.batch_sampler.sampler.set_epoch(3)
    batches.sampler.set_epoch(5)
    assert sampler.epoch == 5
    batches.note = "mine"
    assert loader.note == "mine"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = batches.nothing_such
    assert repr(batches) == f"<{loader!r} on meta>"


def test_what_is_kept_stays() -> None:
    batch = {"x": torch.ones(1), "lengths": torch.ones(1)}
    (moved,) = prefetch([batch], "meta", keep="lengths")
    assert moved["x"].device == META
    assert moved["lengths"] is batch["lengths"]


def test_batches_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")

    def collated(items: list[Any]) -> Any:
        return transformers.BatchEncoding({"input_ids": torch.ones(len(items), 2)})

    (moved,) = prefetch(DataLoader(Numbers(), batch_size=10, collate_fn=collated), "meta")
    assert type(moved) is transformers.BatchEncoding
    assert moved.input_ids.device == META


def test_a_device_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(DeviceError, match="'lazy:0' can't be used here"):
        prefetch([], "lazy:0")


@pytest.mark.parametrize("loader", [5, None, "batches", b"x", DataLoader, nn.Sequential(), 1.5])
def test_what_is_no_loader_is_refused_at_once(loader: Any) -> None:
    with pytest.raises(UsageError, match="is not a loader of batches") as caught:
        prefetch(loader, "meta")
    is_model = isinstance(loader, nn.Module)
    assert ("ckptmove.move" in str(caught.value.hint)) == is_model


class Indexed:
    """It can be iterated as lists once were."""

    def __getitem__(self, index: int) -> Tensor:
        if index > 1:
            raise IndexError
        return torch.ones(1)


def test_what_is_merely_indexed_is_a_loader() -> None:
    loader: Any = Indexed()
    assert len(list(prefetch(loader, "meta"))) == 2


# -- streams ---------------------------------------------------------------------------------------


class Stream:
    """A stream that writes down what it is told to do."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class Streams:
    """What torch.cuda is to a GPU, for a device without streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = self.current = Stream("main", self.log)
        self.Stream = lambda device: Stream("side", self.log)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Have `meta` be a device with streams."""
    made = Streams()

    def record(self: Tensor, stream: Stream) -> None:
        made.log.append(f"{stream.name} uses {self.numel()}")

    monkeypatch.setattr(Tensor, "record_stream", record)
    monkeypatch.setattr(prefetching, "streams_of", lambda device: made)
    return made


def giving(log: list[str], count: int, make: Callable[[int], Any]) -> Iterator[Any]:
    try:
        for each in range(1, count + 1):
            log.append(f"loader gives {each}")
            yield make(each)
        log.append("loader ends")
    finally:
        log.append("loader is closed")


def test_the_next_batch_is_copied_while_one_is_used(streams: Streams) -> None:
    log = streams.log
    batches = iter(prefetch(giving(log, 2, torch.ones), "meta"))
    assert log == []
    for batch in batches:
        assert batch.device == META
        log.append(f"user takes {batch.numel()}")
    assert log == [
        "loader gives 1",
        "side waits for main",
        "main waits for side",
        "main uses 1",
        "host waits for side",
        "loader gives 2",
        "side waits for main",
        "user takes 1",
        "main waits for side",
        "main uses 2",
        "host waits for side",
        "loader ends",
        "loader is closed",
        "user takes 2",
        "host waits for side",
    ]


def test_nothing_is_taken_ahead_that_need_not_move(streams: Streams) -> None:
    shared = torch.empty(1, device="meta")
    batches = iter(prefetch(giving(streams.log, 2, lambda n: [shared]), "meta"))
    next(batches)
    assert "loader gives 2" not in streams.log
    assert [len(batch) for batch in batches] == [1]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_exception_comes_where_its_batch_would(
    ahead: bool, request: pytest.FixtureRequest
) -> None:
    if ahead:
        request.getfixturevalue("streams")
    for count in (0, 1):
        loader = DataLoader(Numbers(broken=4), batch_size=2, num_workers=count)
        seen, error = until_raised(prefetch(loader, "meta"))
        assert (seen, type(error)) == (2, ValueError)
        assert "item is broken" in str(error)
    seen, error = until_raised(prefetch([torch.ones(1), Refusing(), torch.ones(1)], "meta"))
    assert (seen, str(error)) == (1, "the device is gone")
    iterator = iter(prefetch([Refusing(), torch.ones(1)], "meta"))
    with pytest.raises(DeviceError):
        next(iterator)
    assert list(iterator) == []


class Refusing:
    def to(self, device: torch.device) -> Refusing:
        raise DeviceError("the device is gone")


# -- endings ---------------------------------------------------------------------------------------


class Loader:
    """It can be iterated again and again."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __iter__(self) -> Iterator[Tensor]:
        return giving(self.log, 5, torch.ones)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", ["break", "exception", "close", "end"])
def test_the_loader_is_closed_early(how: str, ahead: bool, request: pytest.FixtureRequest) -> None:
    log = request.getfixturevalue("streams").log if ahead else []
    batches = prefetch(Loader(log), "meta")
    assert log == []
    if how == "break":
        for _ in batches:
            break
    elif how == "exception":
        try:
            for _ in batches:
                raise KeyError
        except KeyError as error:
            kept = error
        assert kept.__traceback__
    elif how == "close":
        iterator = iter(batches)
        next(iterator)
        assert "loader is closed" not in log
        iterator.close()  # type: ignore[attr-defined]
    else:
        assert len(list(batches)) == 5
    assert log.count("loader is closed") == 1


def workers() -> int:
    """How many processes this one has started that still run."""
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("ahead", [False, True])
def test_workers_end_with_the_loop(ahead: bool, request: pytest.FixtureRequest) -> None:
    if ahead:
        request.getfixturevalue("streams")
    before = workers()
    batches = prefetch(DataLoader(Numbers(), num_workers=2), "meta")
    assert workers() == before
    for _ in batches:
        assert workers() == before + 2
        break
    assert workers() == before
    broken = DataLoader(Numbers(broken=1), num_workers=1)
    seen, error = until_raised(prefetch(broken, "meta"))
    assert workers() == before
    assert (seen, bool(error.__traceback__)) == (1, True)  # through which they could be reached


def test_workers_that_are_to_persist_do() -> None:
    before = workers()
    loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True)
    batches = prefetch(loader, "meta")
    for _ in batches:
        break
    assert workers() == before + 1
    assert len(list(batches)) == 10
    del batches, loader
    gc.collect()
    assert workers() == before


def test_an_iterator_of_the_users_stays_theirs() -> None:
    log: list[str] = []
    own = giving(log, 3, torch.ones)
    for _ in prefetch(own, "meta"):
        break
    assert "loader is closed" not in log
    assert next(own).numel() == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_gone_when_its_user_lets_go(ahead: bool, request: pytest.FixtureRequest) -> None:
    if ahead:
        request.getfixturevalue("streams")
    sources: list[weakref.ref[Tensor]] = []

    def load(_: int) -> Tensor:
        batch = torch.ones(1)
        sources.append(weakref.ref(batch))
        return batch

    gc.disable()
    try:
        batches = iter(prefetch(map(load, range(3)), "meta"))
        for index in range(3):
            batch = next(batches)
            moved = weakref.ref(batch)
            assert sources[index]() is None
            del batch
            assert moved() is None
    finally:
        gc.enable()


# -- on a GPU --------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Notes of each copy: whether from pinned memory, not waited for, on a side stream."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[tuple[bool, bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::_to_copy":
            aside = torch.cuda.current_stream() != torch.cuda.default_stream()
            self.noted.append((args[0].is_pinned(), bool(kwargs.get("non_blocking")), aside))
        return func(*args, **kwargs)


class TestOnAGpu:
    pytestmark = cuda

    @pytest.mark.parametrize("pinned", [False, True])
    def test_values_are_right_while_the_gpu_is_busy(self, pinned: bool) -> None:
        expected = [torch.full((1 << 18,), float(n)) for n in range(30)]
        loader = [each.pin_memory() if pinned else each for each in expected]
        work = torch.randn(2048, 2048, device=GPU)
        found = []
        for batch in prefetch(loader, GPU):
            for _ in range(5):
                work = torch.nn.functional.normalize(work @ work)
            found.append((batch + work[0, 0] * 0).sum())
            del batch  # while it is still in use
        assert [float(each) for each in found] == [float(each.sum()) for each in expected]

    def test_a_loader_may_use_its_buffer_again(self) -> None:
        buffer = torch.empty(1 << 22).pin_memory()

        def load() -> Iterator[Tensor]:
            for n in range(10):
                yield buffer.fill_(float(n))

        means = [batch.mean() for batch in prefetch(load(), GPU)]
        assert [float(mean) for mean in means] == list(range(10))

    def test_copies_are_made_from_pinned_memory_on_a_stream_of_their_own(self) -> None:
        pinned = torch.ones(3).pin_memory()
        with Copies() as copies:
            for batch in prefetch([[torch.ones(3), pinned] for _ in range(3)], GPU):
                batch[0].add_(batch[1])
        assert copies.noted == [(True, True, True)] * 6

    def test_batches_of_workers_end_up_there(self) -> None:
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, pin_memory=True)
        batches = list(prefetch(loader, "cuda"))
        assert numbers(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert {str(batch["x"].device) for batch in batches} == {GPU}
        before = workers()
        for _ in prefetch(loader, GPU):
            break
        assert workers() == before
