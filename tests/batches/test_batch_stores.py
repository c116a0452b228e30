"""Batches of trees in stores: found, done, taken up and told as those on disk are."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import ckptmove
from ckptmove.batches.options import VerbName
from ckptmove.batches.trees import OBJECT_LEDGER
from ckptmove.errors import InputError, RefusedError, UsageError
from tests.conftest import RunCli
from tests.making.checkpoints import save
from tests.making.trees import contents, kill, left_over, many, outcomes, small_tree, start
from tests.servers.fronts import HANG, Fault
from tests.servers.object_store import Store


def objects(url: str) -> Mapping[str, bytes]:
    """Every object below a prefix, but for the ledger."""
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    found = fs.find(root)
    names = [path[len(root) :].lstrip("/") for path in found]
    return {
        name: fs.cat_file(path)
        for name, path in zip(names, found, strict=True)
        if not name.startswith(OBJECT_LEDGER)
    }


def stamps(url: str) -> Mapping[str, str]:
    """When each object below a prefix was made."""
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return {
        path[len(root) :].lstrip("/"): f"{about['ETag']} {about['LastModified']}"
        for path, about in fs.find(root, detail=True).items()
        if OBJECT_LEDGER not in path and about["type"] == "file"
    }


def uploads_left(store: Store) -> bool:
    """Whether parts of an upload are left."""
    return b"<UploadId>" in store.say("GET", f"/{store.bucket}?uploads")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return small_tree(tmp_path / "tree")


@pytest.mark.slow
def test_from_a_store_to_a_store(tree: Path, tmp_path: Path, store: Store) -> None:
    source, out = store.put_folder("runs", tree), store.url("out")
    with ThreadPoolExecutor(2) as executor:
        here = outcomes(ckptmove.batch("convert", tree, tmp_path / "out", executor=executor))
        there = outcomes(ckptmove.batch("convert", source, out, executor=executor))
        assert there == here
        assert set(there.values()) == {"done", "failed", "refused"} & set(there.values())
        made = {name: data for name, data in contents(tmp_path / "out").items()}
        assert objects(out) == made
        before = stamps(out)
        again = ckptmove.batch("convert", source, out, executor=executor)
        assert {each.name for each in again.plan.done} == {
            name for name, outcome in here.items() if outcome == "done"
        }
        outcomes(again)
    assert stamps(out) == before
    assert not uploads_left(store)


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["relocate", "convert"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_between_a_store_and_a_disk(
    verb: VerbName, way: str, tree: Path, tmp_path: Path, store: Store
) -> None:
    options: dict[str, Any] = {"to": "cpu"} if verb == "relocate" else {}
    source = str(tree) if way == "up" else store.put_folder("runs", tree)
    out = store.url("out") if way == "up" else str(tmp_path / "out")
    with ThreadPoolExecutor(2) as executor:
        here = ckptmove.batch(verb, tree, tmp_path / "here", executor=executor, **options)
        told = outcomes(here)
        assert outcomes(ckptmove.batch(verb, source, out, executor=executor, **options)) == told
    expected = contents(tmp_path / "here")
    assert (objects(out) if way == "up" else contents(tmp_path / "out")) == expected
    assert "done" in told.values()
    if way == "down":
        assert left_over(tmp_path) == []


@pytest.mark.slow
def test_without_a_ledger_what_is_there_is_compared(
    tree: Path, tmp_path: Path, store: Store
) -> None:
    source, out = store.put_folder("runs", tree), store.url("out")
    with ThreadPoolExecutor(2) as executor:
        first = outcomes(ckptmove.batch("convert", source, out, executor=executor))
        before = stamps(out)
        fs, root = fsspec.core.url_to_fs(out)
        fs.rm(f"{root}/{OBJECT_LEDGER}", recursive=True)
        fs.pipe_file(f"{root}/a/run.safetensors", b"something else")
        results = {
            each.name: (each.outcome, each.reason)
            for each in ckptmove.batch("convert", source, out, executor=executor)
        }
    assert results["a/run.pt"][0] == "refused"
    assert "differs from what would be written" in results["a/run.pt"][1]
    for name, outcome in first.items():
        if outcome == "done" and name != "a/run.pt":
            assert results[name] == ("skipped", "it was already there")
    assert fs.cat_file(f"{root}/a/run.safetensors") == b"something else"
    changed = {name for name, stamp in stamps(out).items() if before.get(name) != stamp}
    assert changed == {"a/run.safetensors"}


@pytest.mark.slow
def test_a_source_that_changed_is_done_anew(tmp_path: Path, store: Store) -> None:
    tree = many(tmp_path / "tree", 3, 100)
    source, out = store.put_folder("runs", tree), store.url("out")
    with ThreadPoolExecutor(2) as executor:
        outcomes(ckptmove.batch("convert", source, out, executor=executor))
        name = "run-1/step-001.pt"
        torch.save({"w": torch.ones(7)}, tree / name)
        store.put(f"runs/{name}", tree / name)
        found = dict(
            outcomes(ckptmove.batch("convert", source, out, executor=executor, force=True))
        )
    assert found.pop(name) == "done"
    assert set(found.values()) == {"skipped"}
    assert ckptmove.inspect(f"{out}/run-1/step-001.safetensors").tensors[0].shape == (7,)


@pytest.mark.slow
def test_validated_against_another_tree_in_a_store(tmp_path: Path, store: Store) -> None:
    tree = many(tmp_path / "tree", 3, 100)
    source, out = store.put_folder("runs", tree), store.url("out")
    with ThreadPoolExecutor(2) as executor:
        outcomes(ckptmove.batch("convert", source, out, executor=executor))
        reports = store.url("reports")
        found = dict(
            outcomes(ckptmove.batch("validate", out, reports, against=source, executor=executor))
        )
        assert set(found.values()) == {"done"}
        store.put("out/run-1/step-001.safetensors", tree / "run-0" / "step-000.pt")
        found = dict(
            outcomes(ckptmove.batch("validate", out, reports, against=source, executor=executor))
        )
    assert found.pop("run-1/step-001.safetensors") == "failed"
    assert set(found.values()) == {"skipped"}
    said = json.loads(objects(reports)["run-1/step-001.safetensors.validation.json"])
    assert said["source"] == f"{out}/run-1/step-001.safetensors"
    assert not said["ok"]


def test_one_that_can_not_be_fetched_fails_alone(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmove.sources.filesystem._PAUSES", (0.01, 0.01))
    tree = many(tmp_path / "tree", 4, 100)
    source, out = store.put_folder("runs", tree), store.url("out")
    store.front.faults.append(Fault("status", 403, path="runs/run-1/step-001.pt"))
    with ThreadPoolExecutor(2) as executor:
        found = {
            each.name: each for each in ckptmove.batch("convert", source, out, executor=executor)
        }
    failed = found.pop("run-1/step-001.pt")
    assert failed.outcome == "failed"
    assert "access is denied" in failed.reason
    assert {each.outcome for each in found.values()} == {"done"}
    assert not uploads_left(store)


def test_nothing_in_a_store_is_changed_in_place(tmp_path: Path, store: Store) -> None:
    source = store.put_folder("runs", many(tmp_path / "tree", 1, 100))
    with pytest.raises(RefusedError, match="in place"):
        ckptmove.batch("relocate", source, to="cpu", in_place=True)


def test_a_tree_that_is_not_there(store: Store) -> None:
    with pytest.raises(RefusedError, match="there is nothing below it"):
        ckptmove.batch("convert", store.url("nothing"), store.url("out"))
    with pytest.raises(InputError, match="no such bucket"):
        ckptmove.batch("convert", "s3://no-such-bucket/x", store.url("out"), allow_empty=True)


def test_planned_by_few_requests(tmp_path: Path, store: Store) -> None:
    source = store.put_folder("runs", many(tmp_path / "tree", 30, 100))
    store.front.reset()
    plan = ckptmove.batch("convert", source, store.url("out"), dry_run=True).plan
    assert len(plan.tasks) == 30
    assert all(each.item.stamp for each in plan.tasks)
    assert not store.front.asked("PUT")
    assert not store.front.asked("POST")
    assert len(store.front.seen) < 30 * 8


@pytest.mark.slow
def test_by_its_command_and_killed_it_goes_on(
    tmp_path: Path, store: Store, run_cli: RunCli
) -> None:
    """What was done before it was killed is not written again; then all is there, byte for byte."""
    tree = many(tmp_path / "tree", 12, 20_000)
    source, out, chance = store.put_folder("runs", tree), store.url("out"), random.Random(5)
    whole = tmp_path / "whole"
    with ThreadPoolExecutor(2) as executor:
        outcomes(ckptmove.batch("convert", tree, whole, executor=executor))
    for _ in range(2):
        process = start("convert", source, out, "--jobs", "2", "-q")
        aim = len(stamps(out)) + chance.randrange(1, 4)
        while len(stamps(out)) < aim and process.poll() is None:
            time.sleep(0.05)
        kill(process.pid)
        process.communicate()
    before = stamps(out)
    assert before
    done = run_cli("batch", "convert", source, out, "--jobs", "2", exit=0)
    assert done.stderr == ""
    assert objects(out) == contents(whole)
    after = stamps(out)
    assert {name: after[name] for name in before} == before


@pytest.mark.slow  # of one file, and all other ways to end: tests/writing/test_uploads_signals.py
def test_a_signal_leaves_no_upload(tmp_path: Path, store: Store) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for n in range(3):
        torch.save({"w": torch.rand(12_000_000)}, tree / f"{n}.pt")
    store.front.faults.append(Fault("held", method="PUT", path="partNumber"))
    process = start("convert", tree, store.url("out"), "--jobs", "2")
    store.front.wait_for_held()
    assert uploads_left(store)
    os.kill(process.pid, signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert store.front.still_holds
    assert process.returncode == -signal.SIGINT, errors
    assert "Traceback" not in errors
    assert not uploads_left(store)


@pytest.mark.slow
def test_two_runs_at_once_in_a_store(tmp_path: Path, store: Store) -> None:
    tree, out = many(tmp_path / "tree", 8, 20_000), store.url("out")
    runs = [start("convert", tree, out, "--jobs", "2") for _ in range(2)]
    said = [(run.communicate(), run.returncode) for run in runs]
    assert [code for _, code in said] == [0, 0], said
    with ThreadPoolExecutor(2) as executor:
        outcomes(ckptmove.batch("convert", tree, tmp_path / "here", executor=executor))
    assert objects(out) == contents(tmp_path / "here")
    assert not uploads_left(store)


@pytest.mark.parametrize(
    "name", ["../../evil.pt", "a/../../evil.pt", "a//x.pt", "./x.pt", "a/..", "/etc/x.pt"]
)
def test_names_of_objects_lead_nowhere_else(name: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    source = f"/{tmp_path.name}/runs"
    save(tmp_path / "x.pt", {"w": torch.ones(3)}, "cuda:1")
    fs.pipe_file(f"{source}/good.pt", (tmp_path / "x.pt").read_bytes())
    fs.store[f"{source}/{name}"] = fs.store[f"{source}/good.pt"]
    inside = tmp_path / "a" / "b" / "out"
    inside.parent.mkdir(parents=True)
    with ThreadPoolExecutor(2) as executor:
        work = ckptmove.batch(
            "relocate",
            f"memory:/{source}",
            inside,
            to="cpu",
            copy_rest=True,
            force=True,
            executor=executor,
        )
        assert outcomes(work) == {"good.pt": "done"}
    assert any("a name that is not valid for a file" in note for note in work.plan.notes)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt"))
    assert files == ["a/b/out/good.pt", "x.pt"]


def test_what_other_processes_do_not_see_is_refused(tmp_path: Path) -> None:
    class OfScript(LocalFileSystem):
        protocol = "ofscript"
        __module__ = "__main__"

    (tmp_path / "tree").mkdir()
    fsspec.register_implementation("ofscript", OfScript, clobber=True)
    for url in ("memory://out", "ofscript://out"):
        with pytest.raises(UsageError, match=r"other processes cannot .*(memory|OfScript)"):
            ckptmove.batch("convert", tmp_path / "tree", url)


def test_filesystems_that_are_registered_here_reach_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from fsspec.implementations.dirfs import DirFileSystem\n"
        "from fsspec.implementations.local import LocalFileSystem\n"
        "class Mine(DirFileSystem):\n"
        "    protocol = 'mine'\n"
        "    def __init__(self, **more):\n"
        f"        super().__init__({str(tmp_path)!r}, LocalFileSystem(), **more)\n"
        "    @classmethod\n"
        "    def _strip_protocol(cls, path):\n"
        "        return path.removeprefix('mine://')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fsspec.register_implementation("mine", "of_mine.Mine", clobber=True)
    many(tmp_path / "tree", 2, 10)
    found = outcomes(ckptmove.batch("convert", "mine://tree", tmp_path / "out", jobs=1))
    assert set(found.values()) == {"done"}


@pytest.mark.slow
def test_a_destination_within_its_source_however_it_is_named(store: Store) -> None:
    store.put("runs/x.pt", b"x")
    other = store.url("runs/out").replace("s3://", "s3a://")
    with pytest.raises(RefusedError, match="is inside the source"):
        ckptmove.batch("convert", store.url("runs"), other)
