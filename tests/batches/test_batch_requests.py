"""How many requests a batch in a store takes: what a platform is billed for."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import ckptmove
from ckptmove.batches.options import VerbName
from ckptmove.sources import known_objects
from tests.making.trees import many, outcomes
from tests.servers.fronts import Fault
from tests.servers.object_store import Store

OPTIONS: dict[VerbName, dict[str, Any]] = {"convert": {}, "relocate": {"to": "cpu"}}
CONSTANT = 5  # listings, and what tells that the trees are there


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", OPTIONS)
def test_a_small_item_takes_four_requests(verb: VerbName, tmp_path: Path, store: Store) -> None:
    """One to recognize it, one look at the destination, one to read it, one to write it."""
    count = 12
    source = store.put_folder("runs", many(tmp_path / "tree", count, 20_000))
    store.front.reset()
    with ThreadPoolExecutor(2) as executor:
        work = ckptmove.batch(verb, source, store.url("out"), executor=executor, **OPTIONS[verb])
        planned = len(store.front.seen)
        assert set(outcomes(work).values()) == {"done"}
        ledger = store.front.asked("PUT", ".ckptmove-batch")
        assert planned <= count + CONSTANT
        assert 3 * count <= len(store.front.seen) - planned - len(ledger) <= 3 * count + CONSTANT
        assert not store.front.asked("HEAD", ".pt")
        assert len(store.front.asked("PUT")) == count + len(ledger)
        assert len(ledger) < count
        store.front.reset()
        again = ckptmove.batch(verb, source, store.url("out"), executor=executor, **OPTIONS[verb])
        assert set(outcomes(again).values()) == {"skipped"}
    assert len(store.front.seen) <= CONSTANT


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", OPTIONS)
def test_of_a_few_small_items_what_was_read_to_recognize_them_is_not_read_again(
    verb: VerbName, tmp_path: Path, store: Store
) -> None:
    """One request to read each, and one to write it, only where nothing is."""
    count = 8
    tree = many(tmp_path / "tree", count, 200)
    source = store.put_folder("runs", tree)
    store.front.reset()
    work = ckptmove.batch(verb, source, store.url("out"), jobs=2, digests=True, **OPTIONS[verb])
    results = list(work)
    assert {each.outcome for each in results} == {"done"}
    for each in results:
        summed = hashlib.sha256((tree / each.name).read_bytes()).hexdigest()
        assert each.source_digests == {each.name: summed}
    assert len([each for each in store.front.seen if each.range is not None]) == count
    store.front.reset()
    dry = ckptmove.batch(verb, source, store.url("x"), jobs=2, dry_run=True, **OPTIONS[verb])
    assert set(outcomes(dry).values()) == {"done"}
    assert len(store.front.seen) <= count + CONSTANT
    assert len(store.front.seen) <= 2 * count + CONSTANT


@pytest.mark.parametrize(("verb", "most"), [("inspect", 1), ("validate", 2)])
def test_what_only_reads_takes_few_requests_too(
    verb: VerbName, most: int, tmp_path: Path, store: Store
) -> None:
    count = 8
    source = store.put_folder("runs", many(tmp_path / "tree", count, 200))
    store.front.reset()
    assert set(outcomes(ckptmove.batch(verb, source, jobs=2)).values()) == {"done"}
    assert not store.front.asked("HEAD")
    assert len(store.front.seen) <= most * count + CONSTANT


def test_another_tree_to_compare_with_takes_one_request_more(tmp_path: Path, store: Store) -> None:
    count = 8
    tree = many(tmp_path / "tree", count, 200)
    source, other = store.put_folder("runs", tree), store.put_folder("other", tree)
    store.front.reset()
    batch = ckptmove.batch("validate", source, jobs=2, against=other)
    assert set(outcomes(batch).values()) == {"done"}
    assert not store.front.asked("HEAD")
    assert len(store.front.seen) <= 3 * count + CONSTANT


def test_what_was_read_is_of_one_version_and_is_read_once_and_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = known_objects.KeptObjects()
    kept.put("s3://b/a", "1", b"one")
    kept.put("s3://b/b", "1", b"two")
    assert kept.take("s3://b/a", "2") is None
    assert kept.take("s3://b/b", "1") == b"two"
    assert kept.take("s3://b/b", "1") is None
    monkeypatch.setattr(known_objects, "_FRESH", -1.0)
    kept.put("s3://b/a", "1", b"one")
    assert kept.take("s3://b/a", "1") is None
    monkeypatch.undo()
    monkeypatch.setattr(known_objects, "_KEPT", 4)
    kept = known_objects.KeptObjects()
    kept.put("s3://b/a", "1", b"one")
    kept.put("s3://b/b", "1", b"two")
    assert kept.take("s3://b/b", "1") is None
    assert kept.take("s3://b/a", "1") == b"one"


@pytest.mark.slow
def test_what_was_done_last_holds_though_the_clock_of_an_earlier_run_was_ahead(
    tmp_path: Path, store: Store
) -> None:
    tree, out = many(tmp_path / "tree", 2, 100), store.url("out")
    source = store.put_folder("runs", tree)

    def run(**options: Any) -> set[tuple[str, str]]:
        work = ckptmove.batch("convert", source, out, jobs=1, **options)
        return {(each.outcome, each.reason) for each in work}

    assert run() == {("done", "")}
    fs, root = fsspec.core.url_to_fs(out)
    (ledger,) = fs.ls(f"{root}/.ckptmove-batch")
    fs.mv(ledger, f"{root}/.ckptmove-batch/20990101T000000-00c0ffee.jsonl")
    torch.save({"w": torch.ones(7)}, tree / "run-1" / "step-001.pt")
    store.put_folder("runs", tree)
    assert ("done", "") in run(force=True)
    assert run() == {("skipped", "done before")}


def test_the_source_may_change_after_it_was_listed(tmp_path: Path, store: Store) -> None:
    tree = many(tmp_path / "tree", 2, 100)
    source, out = store.put_folder("runs", tree), store.url("out")
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch("convert", source, out, executor=executor)
        torch.save({"w": torch.ones(7)}, tree / "run-1" / "step-001.pt")
        store.put("runs/run-1/step-001.pt", tree / "run-1" / "step-001.pt")
        assert set(outcomes(work).values()) == {"done"}
        assert ckptmove.inspect(f"{out}/run-1/step-001.safetensors").tensors[0].shape == (7,)
        again = ckptmove.batch("convert", source, out, executor=executor)
        assert set(outcomes(again).values()) == {"skipped"}


def test_the_source_may_be_gone_after_it_was_listed(tmp_path: Path, store: Store) -> None:
    source = store.put_folder("runs", many(tmp_path / "tree", 2, 100))
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch("convert", source, store.url("out"), executor=executor)
        fs, root = fsspec.core.url_to_fs(source)
        fs.rm_file(f"{root}/run-1/step-001.pt")
        found = {each.name: each for each in work}
    assert found["run-0/step-000.pt"].outcome == "done"
    assert found["run-1/step-001.pt"].outcome == "failed"
    assert "was removed while it was read" in found["run-1/step-001.pt"].reason


@pytest.mark.sample(1)
@pytest.mark.parametrize("here", [False, True])
def test_what_appears_after_it_was_planned_is_kept(
    tmp_path: Path, store: Store, here: bool
) -> None:
    """`here`: in threads of this process, which trust the listing of the plan for a moment."""
    source, name = store.put_folder("runs", many(tmp_path / "tree", 3, 100)), "run-1/step-001"
    assert outcomes(ckptmove.batch("convert", source, store.url("first"), jobs=2))
    fs, root = fsspec.core.url_to_fs(store.url("out"))
    with ThreadPoolExecutor(1) as executor:
        how: dict[str, Any] = {"jobs": 2} if here else {"executor": executor}
        work = ckptmove.batch("convert", source, store.url("out"), **how)
        store.put(f"out/{name}.safetensors", b"of somebody else")
        right = "run-0/step-000.safetensors"
        store.put(f"out/{right}", fs.cat_file(store.url(f"first/{right}")))
        found = {each.name: each for each in work}
    assert found["run-0/step-000.pt"].ok
    assert found["run-2/step-002.pt"].outcome == "done"
    assert found[f"{name}.pt"].outcome == "refused"
    assert "differs from what would be written" in found[f"{name}.pt"].reason
    assert fs.cat_file(f"{root}/{name}.safetensors") == b"of somebody else"


@pytest.mark.slow
def test_a_ledger_that_can_not_be_written_is_told(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmove.sources.filesystem._PAUSES", (0.01,))
    source = store.put_folder("runs", many(tmp_path / "tree", 2, 100))
    store.front.faults.append(Fault("status", 503, method="PUT", path=".ckptmove-batch"))
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch("convert", source, store.url("out"), executor=executor)
        assert set(outcomes(work).values()) == {"done"}
        assert any("the ledger could not record" in each for each in work.report().notes)
        store.front.faults.clear()
        again = ckptmove.batch("convert", source, store.url("out"), executor=executor)
        results = {(each.outcome, each.reason) for each in again}
    assert results == {("skipped", "it was already there")}
