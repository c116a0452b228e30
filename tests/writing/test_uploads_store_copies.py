"""Within one store, what a relocation does not change is copied by the store, not through here."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

import ckptmove
from ckptmove.errors import CorruptError
from ckptmove.plans.plan import Copy, Plan, Write
from ckptmove.sources.known_objects import remembering
from ckptmove.sources.remote_object import RemoteObject
from ckptmove.writing.upload import server_copy
from ckptmove.writing.upload.server_copy import divide
from tests.conftest import examples
from tests.making.checkpoints import save
from tests.servers.uploading import Asked, Server, Store, bucket

pytest.importorskip("moto")
pytest.importorskip("s3fs")

LEAST, STEP, SENT = 20_000, 100_000, 1 << 16
BIG = 400_000  # elements


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", LEAST)
        with Server().running() as server:
            yield server


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A bucket with small parts, as large as they have to be; nothing is left unfinished."""
    monkeypatch.setattr(server_copy, "_LEAST", LEAST)
    monkeypatch.setattr(server_copy, "_STEP", STEP)
    monkeypatch.setattr("ckptmove.batches.executors.worker._WHOLE", LEAST)
    for module in ("parts", "staged_object", "staged_prefix"):
        monkeypatch.setattr(f"ckptmove.writing.upload.{module}.PART_NBYTES", SENT)
    with bucket(server, monkeypatch) as store:
        yield store
        server.reset()
        assert store.uploads() == []


def large(folder: Path, *, legacy: bool = False) -> Path:
    state = {"a": torch.arange(float(BIG)), "b": torch.ones(BIG // 2), "n": torch.tensor(3)}
    return save(folder / "in.pt", state, "cuda:1", _use_new_zipfile_serialization=not legacy)


def copies(store: Store) -> int:
    return len([kind for kind, _ in store.server.asked if kind == "copy"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("to", ["cpu", "cuda:1", "cuda:0"])
def test_only_what_changes_comes_here(to: str, legacy: bool, store: Store, tmp_path: Path) -> None:
    source = large(tmp_path, legacy=legacy)
    store.put("in.pt", source.read_bytes())
    store.server.reset()
    told = list[int]()
    report = ckptmove.relocate(store.url("in.pt"), store.url("out.pt"), to=to, progress=told.append)
    assert report.copied == "store"
    assert "the store itself copied what does not change" in str(report)
    assert sum(told) == report.destination_nbytes
    assert copies(store) > 5
    assert store.server.nbytes < 400_000 < report.nbytes // 5
    ckptmove.relocate(source, tmp_path / "out.pt", to=to)
    assert store.get("out.pt") == (tmp_path / "out.pt").read_bytes()
    if to == "cpu":
        loaded = torch.load(io.BytesIO(store.get("out.pt")), weights_only=True)
        assert torch.equal(loaded["a"], torch.arange(float(BIG)))


@pytest.mark.slow
def test_a_batch_brings_little_here_unless_digests_are_wanted(store: Store, tmp_path: Path) -> None:
    data = large(tmp_path).read_bytes()
    tensors = save_safetensors({"w": torch.arange(float(BIG))})
    for name, content in (("runs/a.pt", data), ("runs/b.safetensors", tensors)):
        store.put(name, content)
    total = len(data) + len(tensors)
    for digests in (False, True):
        out = f"out-{digests}"
        store.server.reset()
        with ThreadPoolExecutor(1) as executor:
            work = ckptmove.batch(
                "relocate",
                *(store.url("runs"), store.url(out)),
                to="cpu",
                executor=executor,
                digests=digests,
            )
            found = {each.name: each for each in work}
        passed = store.server.nbytes
        assert {each.outcome for each in found.values()} == {"done"}
        assert store.get(f"{out}/b.safetensors") == tensors
        assert (copies(store) > 0) is not digests
        assert (passed < total // 3) is not digests
        if digests:
            wanted = hashlib.sha256(store.get(f"{out}/a.pt")).hexdigest()
            assert found["a.pt"].digests == {"a.pt": wanted}


@pytest.mark.slow
@pytest.mark.parametrize("status", [501, 403])
def test_where_the_store_can_not_copy_it_is_sent(status: int, store: Store, tmp_path: Path) -> None:
    source = large(tmp_path)
    store.put("in.pt", source.read_bytes())
    refused = lambda asked: status if asked.kind == "copy" else None  # noqa: E731
    store.server.fault = refused
    report = ckptmove.relocate(store.url("in.pt"), store.url("out.pt"), to="cpu")
    assert report.copied == "upload"
    ckptmove.relocate(source, tmp_path / "out.pt", to="cpu")
    assert store.get("out.pt") == (tmp_path / "out.pt").read_bytes()


@pytest.mark.slow
def test_a_copy_that_fails_once_is_tried_again(store: Store, tmp_path: Path) -> None:
    source = large(tmp_path)
    store.put("in.pt", source.read_bytes())
    failed = list[str]()

    def fail(asked: Asked) -> int | None:
        if asked.kind == "copy" and len(failed) < 2:
            failed.append(asked.key)
            return 503
        return None

    store.server.fault = fail
    report = ckptmove.relocate(store.url("in.pt"), store.url("out.pt"), to="cpu")
    assert (report.copied, len(failed)) == ("store", 2)


def test_a_source_that_is_replaced_meanwhile_is_noticed(store: Store, tmp_path: Path) -> None:
    data = large(tmp_path).read_bytes()
    store.put("in.pt", data)

    def replace(asked: Asked) -> None:
        if asked.kind == "begin":
            store.put("in.pt", data[:-1] + b"!")

    store.server.fault = replace
    with pytest.raises(CorruptError, match="changed while it was read"):
        ckptmove.relocate(store.url("in.pt"), store.url("out.pt"), to="cpu")
    assert store.there() == ["in.pt"]


def test_a_conversion_sums_every_byte(store: Store, tmp_path: Path) -> None:
    data = bytearray(large(tmp_path).read_bytes())
    data[len(data) // 2] ^= 1
    store.put("in.pt", bytes(data))
    with pytest.raises(CorruptError, match="checksum"):
        ckptmove.convert(store.url("in.pt"), store.url("out.safetensors"))
    assert copies(store) == 0
    assert store.there() == ["in.pt"]


@settings(max_examples=examples(150))
@given(st.data())
def test_parts_are_as_large_as_they_must_be_and_hold_all(draw: st.DataObject) -> None:
    """Any patch: parts in a row, none too small but the last, no change in one that is copied."""
    nbytes = draw.draw(st.integers(1, 60 << 20))
    places = draw.draw(st.lists(st.integers(0, nbytes - 1), max_size=6, unique=True))
    writes = tuple(
        Write(at, b"x" * min(3, end - at)) for at, end in pairwise([*sorted(places), nbytes])
    )
    plan = Plan("patch", nbytes, (Copy(0, nbytes, 0),), writes)
    with remembering() as known:
        known.put_stamp("s3://bucket/in", f"size={nbytes} ETag=x")
        source = RemoteObject("s3://bucket/in")  # nobody is asked
    parts = divide(plan, [source], source.place, 16 << 20)
    if parts is None:
        gaps = [0, *sorted(places), nbytes]
        assert all(high - low < 10 << 20 for low, high in pairwise(gaps))
        return
    assert [each.start for each in parts] == [0, *(each.end for each in parts[:-1])]
    assert parts[-1].end == nbytes
    assert all(each.end - each.start >= 5 << 20 for each in parts[:-1])
    for part in parts:
        if part.copy is not None:
            assert (part.copy.source_at, part.copy.nbytes) == (part.start, part.end - part.start)
            assert not any(part.start < at + len(new) and at < part.end for at, new in writes)
        else:
            assert part.end - part.start <= 16 << 20
