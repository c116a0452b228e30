"""Small items of a batch, which one call does: each with its own outcome, and all on disk."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.batches.executors import bundle, worker
from ckptmove.batches.source_removal import remove_source
from ckptmove.reports.batch.items import Result, Task
from ckptmove.system import files
from ckptmove.writing.staged_file import LocalFile, sync_together
from tests.faults.breaking_folder import FolderScene
from tests.faults.power import disk_of
from tests.making.checkpoints import save
from tests.making.trees import children, contents, entered, kill, left_over, many, start, until
from tests.servers.fronts import Fault
from tests.servers.object_store import Store

COUNT = 16  # enough for bundles of several by one worker


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = many(tmp_path_factory.mktemp("bundles") / "tree", COUNT, 50)
    whole = (folder / "run-0" / "step-000.pt").read_bytes()
    (folder / "run-1" / "cut.pt").write_bytes(whole[:-90])
    return folder


@pytest.fixture(scope="module")
def alone(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What becomes of each item without bundles: an item with a time limit is in none."""
    out = tmp_path_factory.mktemp("alone") / "out"
    for _ in ckptmove.batch("relocate", tree, out, to="cpu", jobs=1, timeout=600):
        pass
    return dict(contents(out))


def relocated(tree: Path, out: Path) -> dict[str, Result]:
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch("relocate", tree, out, to="cpu", jobs=1, executor=executor)
        return {each.name: each for each in work}


def test_each_item_has_its_own_outcome(
    tree: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def counted(waiting: Iterable[LocalFile]) -> None:
        waiting = list(waiting)
        synced.append(len(waiting))
        sync_together(waiting)

    monkeypatch.setattr(bundle, "sync_together", counted)
    results = relocated(tree, out := tmp_path / "out")
    assert max(synced) > 1
    assert sum(synced) == COUNT
    assert results.pop("run-1/cut.pt").outcome == "failed"
    assert {each.outcome for each in results.values()} == {"done"}
    assert dict(contents(out)) == alone
    assert sorted(entered(out)) == sorted(results)
    assert left_over(out) == []
    assert {each.outcome for each in relocated(tree, out).values()} == {"skipped", "failed"}


@pytest.mark.parametrize("force", [False, True])
def test_a_name_that_is_taken_meanwhile_is_refused_and_the_others_are_named(
    force: bool, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    taken = out / "run-0" / "step-003.pt"

    def meanwhile(waiting: Iterable[LocalFile]) -> None:
        waiting = list(waiting)
        sync_together(waiting)
        if any(Path(each.path) == taken for each in waiting):
            taken.write_bytes(b"of somebody else")

    monkeypatch.setattr(bundle, "sync_together", meanwhile)
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch(
            "relocate", tree, out, to="cpu", exclude="cut.pt", force=force, executor=executor
        )
        found = {each.name: each.outcome for each in work}
    assert found.pop("run-0/step-003.pt") == ("done" if force else "refused")
    assert set(found.values()) == {"done"}
    assert (taken.read_bytes() == b"of somebody else") is not force
    assert left_over(out) == []


def test_what_can_not_be_synced_together_is_done_alone(
    tree: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(waiting: Iterable[LocalFile]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bundle, "sync_together", fails)
    results = relocated(tree, out := tmp_path / "out")
    assert [name for name, each in results.items() if each.outcome != "done"] == ["run-1/cut.pt"]
    assert dict(contents(out)) == alone
    assert left_over(out) == []


def test_a_change_in_place_that_is_killed_meanwhile_is_undone_before_its_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are looked at for journals once; that none came is asked before files get names."""
    scene = FolderScene(tmp_path)
    journal, last = scene.journal_bytes(), scene.folder / "epochs" / "last.pt"
    scene.reset()
    for number in range(7):
        shutil.copy(last, last.with_name(f"{number}.pt"))
    begun: list[str] = []

    def meanwhile(task: Task) -> None:
        begun.append(task.item.name)
        if begun.count("last.pt") == 1 and begun[-1] == "last.pt":
            assert "6.pt" in begun  # with which it is in one bundle
            last.write_bytes(scene.new["epochs/last.pt"])
            scene.journal.write_bytes(journal)

    monkeypatch.setattr(bundle, "refuse_clash", meanwhile)
    with ThreadPoolExecutor(1) as executor:
        rules, out = {"cuda:1": "cuda:0"}, tmp_path / "out"
        work = ckptmove.batch("relocate", last.parent, out, map=rules, jobs=1, executor=executor)
        assert {each.outcome for each in work} == {"done"}
    assert last.read_bytes() == scene.old["epochs/last.pt"]
    assert (out / "last.pt").read_bytes() == (out / "0.pt").read_bytes()
    assert left_over(out) == []


@pytest.mark.parametrize("whole", [True, False], ids=["together", "each"])
def test_after_a_power_cut_all_that_is_done_is_there(
    whole: bool,
    tree: Path,
    alone: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not whole:  # as on a file system that does not promise it
        monkeypatch.setattr(files, "_SYNCED_WHOLE", set())
        monkeypatch.setattr(files, "_known_devices", {})
    with disk_of(tmp_path) as disk:
        relocated(tree, disk.path / "out")
        with disk.after_the_cut() as after:
            assert dict(contents(after / "out")) == alone


def test_the_name_of_an_output_is_on_disk_before_its_source_goes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, out = tmp_path / "tree", tmp_path / "out"
    shutil.copytree(tree, copy)
    synced, gone = set[tuple[int, int]](), list[str]()
    fsync = os.fsync

    def syncs(fd: int) -> None:
        fsync(fd)
        about = os.fstat(fd)
        synced.add((about.st_dev, about.st_ino))

    def removes(task: Task) -> None:
        for each in (Path(task.item.output).parent, out):
            assert (each.stat().st_dev, each.stat().st_ino) in synced
        gone.append(task.item.name)
        remove_source(task)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(worker, "remove_source", removes)
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch(
            "relocate", copy, out, to="cpu", jobs=1, executor=executor, delete_source=True
        )
        removed = [each.name for each in work if each.source_removed]
    assert len(removed) == len(gone) == COUNT


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_no_item_along(
    tree: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    others = set(children(os.getpid()))  # servers of other tests
    work = ckptmove.batch("relocate", tree, out, to="cpu", jobs=2, exclude="cut.pt")
    done = threading.Event()

    def kill_once() -> None:
        until(lambda: left_over(out) or done.is_set())
        for pid in set(children(os.getpid())) - others:
            kill(pid)

    killer = threading.Thread(target=kill_once)
    killer.start()
    found = {each.name: each.outcome for each in work}
    done.set()
    killer.join()
    assert len(found) == COUNT
    assert set(found.values()) <= {"done", "skipped"}
    assert dict(contents(out)) == alone
    assert left_over(out) == []


@pytest.mark.slow
def test_a_batch_that_is_killed_leaves_nothing_that_the_next_one_does_not_remove(
    tree: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    line = ("relocate", tree, out, "--to", "cpu", "-q")
    process = start(*line)
    until(lambda: left_over(out) or process.poll() is not None)
    for pid in (*children(process.pid), process.pid):
        kill(pid)
    process.communicate()
    again = start(*line)
    again.communicate()
    assert again.returncode == 1
    assert dict(contents(out)) == alone
    assert left_over(out) == []


@pytest.mark.slow
def test_items_of_a_store_are_done_at_the_same_time(
    tree: Path, tmp_path: Path, store: Store
) -> None:
    """One worker has several answers outstanding; each item still has its own outcome."""
    source = store.put_folder("runs", tree)
    with ThreadPoolExecutor(1) as executor:
        work = ckptmove.batch(
            "relocate", source, store.url("out"), to="cpu", jobs=1, executor=executor
        )
        store.front.faults.append(Fault("held", method="PUT", path="/out/run"))

        def free() -> None:
            for _ in range(COUNT // 4):  # each waits until it is let go of
                store.front.wait_for_held()
            store.front.free()

        freeing = threading.Thread(target=free)
        freeing.start()
        found = {each.name: each.outcome for each in work}
        freeing.join()
    assert found.pop("run-1/cut.pt") == "failed"
    assert set(found.values()) == {"done"}


def test_a_large_item_is_alone(tmp_path: Path) -> None:
    many(tmp_path / "tree", 9, 50)
    save(tmp_path / "tree" / "large.pt", torch.zeros(100_000), "cuda:1")
    plan = ckptmove.batch("relocate", tmp_path / "tree", tmp_path / "out", to="cpu", dry_run=True)
    sizes = [len(each) for each in bundle.bundles_of(plan.plan.tasks, 1)]
    assert sizes == [1, 2, 2, 2, 2, 1]
    plan.close()
