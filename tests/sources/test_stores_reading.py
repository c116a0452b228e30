"""Objects as sources: any range, from several threads, in bounded memory, a byte fetched once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptmove
from ckptmove import CorruptError, InputError
from ckptmove.sources import cache, open_source
from ckptmove.sources.cache import Spans, SparseCopy
from ckptmove.sources.fetch_pool import FetchPool
from ckptmove.sources.source import Source
from tests.making.checkpoints import sparse_zip64
from tests.oracles.steps import steps
from tests.servers.fronts import HANG
from tests.servers.object_store import Fault, Files, Store
from tests.whole.test_memory import peak, told

CONTENT = random.Random(7).randbytes(40 << 20)


def anonymous() -> int:
    """RssAnon of this process, in bytes."""
    told = Path("/proc/self/status").read_text().partition("RssAnon:")[2]
    return 1024 * int(told.split()[0])


@pytest.fixture
def source(web: Files, tmp_path: Path) -> Iterator[Source]:
    (tmp_path / "content").write_bytes(CONTENT)
    with open_source(web.put("content")) as opened:
        yield opened


def test_any_range_is_what_it_is(source: Source) -> None:
    chance = random.Random(3)
    for _ in range(200):
        nbytes = chance.choice((0, 1, 100, 40_000, 3 << 20))
        start = chance.randrange(len(CONTENT) - nbytes)
        assert source.read(start, nbytes) == CONTENT[start : start + nbytes]
    assert b"".join(part for _, part in source.chunks(5, 30 << 20)) == CONTENT[5 : 5 + (30 << 20)]
    buffer = bytearray(20 << 20)
    source.read_into(77, buffer)
    assert buffer == CONTENT[77 : 77 + len(buffer)]
    for start, nbytes in ((-1, 2), (0, -1), (len(CONTENT), 1), (5, len(CONTENT))):
        with pytest.raises(CorruptError, match="outside the file"):
            source.read(start, nbytes)
    with pytest.raises(CorruptError, match="outside the file"):
        source.read_into(len(CONTENT) - (1 << 20), bytearray(2 << 20))


def test_what_is_read_in_a_row_is_fetched_once(source: Source, web: Files) -> None:
    for start in range(0, 32 << 20, 10_000):
        source.read(start, 10_000)
    assert web.nbytes() < (32 << 20) * 1.3
    assert len(web.asked()) < 24


def test_what_is_expected_comes_ahead_and_once(source: Source, web: Files) -> None:
    two = threading.Barrier(2, timeout=HANG)  # which are asked for at the same time
    web.faults.append(Fault("none", act=two.wait, times=2))
    source.expect([(1000, 30 << 20)])
    assert not web.asked(), "it is fetched as it is read"
    buffer = bytearray(30 << 20)
    source.read_into(1000, buffer)
    assert buffer == CONTENT[1000 : 1000 + len(buffer)]
    assert web.nbytes() == 30 << 20
    assert len(web.asked()) == 15
    assert 2 <= web.connections <= 5
    source.read(0, 10)
    assert len(web.asked()) == 16, "nothing else comes ahead"


def test_what_is_expected_in_places_comes_together(source: Source, web: Files) -> None:
    places = [(n << 20, 100) for n in range(20)] + [(20 << 20, 10), ((20 << 20) + 60_000, 10)]
    source.expect(places)
    assert len(web.asked()) == 21
    for start, nbytes in places:
        assert source.read(start, nbytes) == CONTENT[start : start + nbytes]
    assert len(web.asked()) == 21


def test_threads_may_read_at_once(source: Source) -> None:
    wrong = list[int]()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            start = chance.randrange(len(CONTENT) - 50_000)
            if chance.random() < 0.1:
                source.expect([(start, 10), (start // 2, 10)])
            if source.read(start, 50_000) != CONTENT[start : start + 50_000]:
                wrong.append(start)
        for at, data in source.chunks(seed, 12 << 20):
            if CONTENT[at : at + len(data)] != data:
                wrong.append(at)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_mapped_is_fetched_once(source: Source, web: Files) -> None:
    import mmap

    with mmap.mmap(source.mappable(0, 0), source.nbytes, mmap.MAP_PRIVATE) as pages:
        assert not web.asked()
        for start, nbytes in ((5, 10), (100, 20 << 20), (7, 1000), (len(CONTENT) - 1, 1)):
            source.mappable(start, nbytes)
            assert pages[start : start + nbytes] == CONTENT[start : start + nbytes]
        assert pages[30 << 20 : 31 << 20] == bytes(1 << 20), "a hole"
    assert web.nbytes() < (20 << 20) + 200_000


def test_what_failed_is_not_there(source: Source, web: Files) -> None:
    web.faults.append(Fault("status", 403, skip=1))
    with pytest.raises(InputError):
        source.mappable(0, 20 << 20)
    web.faults.clear()
    import mmap

    with mmap.mmap(source.mappable(0, 20 << 20), source.nbytes, mmap.MAP_PRIVATE) as pages:
        assert pages[: 20 << 20] == CONTENT[: 20 << 20]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_a_copy_knows_what_it_has(ranges: list[tuple[int, int]]) -> None:
    content = bytes(range(120))
    copy = SparseCopy(120, "x")
    there = set[int]()
    try:
        for start, nbytes in ranges:
            gaps = copy.missing(start, start + nbytes)
            missing = {at for low, high in gaps for at in range(low, high)}
            assert missing == set(range(start, start + nbytes)) - there
            assert all(low < high for low, high in gaps)
            for low, high in gaps:
                copy.put(low, content[low:high])
            there |= missing
    finally:
        copy.close()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_a_copy_may_be_given_what_it_has(ranges: list[tuple[int, int]]) -> None:
    copy = SparseCopy(120, "x")
    there = set[int]()
    try:
        for start, nbytes in ranges:
            copy.put(start, bytes(nbytes))
            there |= set(range(start, start + nbytes))
            gaps = copy.missing(0, 120)
            assert {at for low, high in gaps for at in range(low, high)} == {*range(120)} - there
            assert all(one < other for (_, one), (other, _) in pairwise(gaps))
    finally:
        copy.close()


def test_what_lies_apart_costs_as_much_however_much_there_is() -> None:
    def taken(count: int) -> int:
        copy = SparseCopy(100 * count, "x")

        def put() -> None:
            for n in range(count):
                assert copy.missing(100 * n, 100 * n + 10) == [(100 * n, 100 * n + 10)]
                copy.put(100 * n, b"x" * 10)

        try:
            return steps(put)
        finally:
            copy.close()

    assert taken(400) < 3 * taken(200)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 50), st.integers(1, 30)), max_size=40))
def test_spans_of_all_objects_are_bounded(given_: list[tuple[int, int, int]]) -> None:
    content = bytes(range(100))
    both = Spans(), Spans()
    most, cache._MOST = cache._MOST, 60
    try:
        for which, start, nbytes in given_:
            found = both[which].find(start, nbytes)
            assert found in (None, content[start : start + nbytes])
            if found is None:
                both[which].add(start, content[start : start + nbytes])
                assert both[which].find(start, nbytes) is not None
            assert sum(map(len, (d for s in both for d in s._held.values()))) <= 60
    finally:
        cache._MOST = most
        for each in both:
            each.clear()
    assert cache._KEPT.nbytes == 0
    assert not cache._KEPT.order


def test_fetchers_wait_for_nothing_at_the_end() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> bytes:
        begun.set()
        go.wait(HANG)
        return b"x"

    fetchers = FetchPool[bytes](1)
    running, waiting = fetchers.submit(slow), fetchers.submit(slow)
    assert begun.wait(HANG)
    fetchers.close()
    assert waiting.cancelled()
    assert not running.done()
    go.set()
    assert running.result(HANG) == b"x"
    failing = FetchPool[bytes](1)
    future = failing.submit(lambda: b""[1:2] + bytes(0 // 0))
    assert isinstance(future.exception(HANG), ZeroDivisionError)
    failing.close()


@pytest.mark.slow
@told
@pytest.mark.parametrize("verb", ["relocate", "convert"])
def test_memory_is_bounded(verb: str, web: Files, tmp_path: Path) -> None:
    sparse_zip64(tmp_path / "big.pt", 1)
    out = tmp_path / "out.safetensors"
    options = ["--to", "cpu", "-o", out] if verb == "relocate" else [out]
    assert peak(verb, web.put("big.pt"), *options) < 150_000_000
    assert out.stat().st_size > 1 << 30


@pytest.mark.slow
@told
def test_many_open_objects_take_little_memory(store: Store) -> None:
    urls = [store.put(f"{n}", CONTENT[n : n + (16 << 20)]) for n in range(12)]
    sources = [open_source(url) for url in urls]
    before = anonymous()
    for source in sources:
        for start in range(0, 15 << 20, 1 << 20):
            source.read(start, 1 << 20)
    held = anonymous() - before
    for source in sources:
        source.close()
    assert held < 130 << 20, "192 MB were read"


def test_loaded_tensors_outlive_the_object(store: Store, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "run.pt")
    loaded = ckptmove.load(store.put("run.pt", tmp_path / "run.pt"))
    store.front.faults.append(Fault("status", 403))
    assert torch.equal(loaded["w"], torch.arange(1000.0))
