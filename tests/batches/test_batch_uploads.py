"""Uploads that killed processes have left in a bucket are aborted, and no others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch

import ckptmove
from ckptmove.batches.trees import OBJECT_LEDGER
from ckptmove.errors import RefusedError
from ckptmove.writing.upload import unfinished
from tests.conftest import RunCli
from tests.making.trees import kill, start
from tests.servers.fronts import Fault
from tests.servers.object_store import Store


def uploads(store: Store) -> int:
    return store.say("GET", f"/{store.bucket}?uploads").count(b"<UploadId>")


def records(store: Store) -> list[str]:
    fs, root = fsspec.core.url_to_fs(store.url(f"out/{OBJECT_LEDGER}/uploads"))
    fs.invalidate_cache()
    return list(fs.find(root))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    torch.save({"w": torch.rand(6_000_000)}, tmp_path / "tree" / "large.pt")
    return tmp_path / "tree"


@pytest.fixture
def killed(tree: Path, store: Store) -> Path:
    """The tree of a batch that was killed while it uploaded."""
    kill_at(Fault("held", method="PUT", path="partNumber"), tree, store)
    assert uploads(store) == len(records(store)) == 1
    return tree


def kill_at(fault: Fault, tree: Path, store: Store) -> None:
    """Kill a batch at a request of an upload."""
    store.front.faults.append(fault)
    process = start("convert", tree, store.url("out"), "--jobs", "1")
    store.front.wait_for_held()
    (path,) = records(store)
    worker = json.loads(fsspec.filesystem("s3").cat_file(path))["pid"]
    os.kill(worker, signal.SIGSTOP)  # else it would abort it when it is left alone
    kill(process.pid)
    os.kill(worker, signal.SIGKILL)
    process.communicate()
    store.front.faults.clear()
    store.front.free()


@pytest.mark.slow
def test_the_next_run_aborts_what_a_killed_one_left(
    killed: Path, store: Store, run_cli: RunCli
) -> None:
    run_cli("batch", "convert", killed, store.url("out"), "--jobs", "1", exit=0)
    assert uploads(store) == len(records(store)) == 0
    assert ckptmove.inspect(store.url("out/large.safetensors")).tensors[0].shape == (6_000_000,)


@pytest.mark.slow
def test_recover_aborts_it(killed: Path, store: Store, run_cli: RunCli) -> None:
    done = run_cli("recover", store.url("out"), exit=0)
    assert "large.safetensors: removed invisible parts" in done.stdout
    assert uploads(store) == len(records(store)) == 0
    assert "nothing to recover" in run_cli("recover", store.url("out"), exit=0).stdout


@pytest.mark.slow
def test_an_upload_whose_number_nobody_has_learned_is_aborted(tree: Path, store: Store) -> None:
    begun = 0

    def begin() -> None:  # the store does, and the one who asked is killed before it hears of that
        nonlocal begun
        store.say("POST", f"/{store.bucket}/out/large.safetensors?uploads")
        begun = uploads(store)

    kill_at(Fault("held", method="POST", path="?uploads", act=begin), tree, store)
    assert begun == 1
    store.say("POST", f"/{store.bucket}/out/large.safetensors.more?uploads")
    assert uploads(store) >= 2
    (found,) = {each.outcome for each in ckptmove.recover(store.url("out")).files}
    assert found == "aborted"
    assert uploads(store) == 1, "that of another object is not ours"
    assert not records(store)


def test_uploads_that_may_be_of_others_are_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.say("POST", f"/{store.bucket}/out/a?uploads")
    dead = {"key": "out/a", "machine": unfinished._machine(), "pid": 1, "started": "gone"}
    alive = {**dead, "pid": os.getpid(), "started": unfinished._start_of(os.getpid())}
    store.put(f"out/{OBJECT_LEDGER}/uploads/a.json", json.dumps(dead).encode())
    alive_one = store.put(f"out/{OBJECT_LEDGER}/uploads/b.json", json.dumps(alive).encode())
    files = ckptmove.recover(store.url("out")).files
    assert [each.outcome for each in files] == ["uploading", "uploading"]
    assert (uploads(store), len(records(store))) == (1, 2)
    fsspec.filesystem("s3").rm_file(alive_one)
    store.front.upload_age = 60.0  # it was begun before the record was written
    assert not ckptmove.recover(store.url("out")).files
    assert (uploads(store), len(records(store))) == (1, 0)


def record(store: Store, key: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Record an upload without a number, by a process of this machine or a dead one."""
    said = {"key": key, "machine": unfinished._machine(), "pid": 1, "started": "gone"}
    if process is not None:
        said |= {"pid": process.pid, "started": unfinished._start_of(process.pid)}
    name = key.replace("/", "-")
    store.put(f"out/{OBJECT_LEDGER}/uploads/{name}.json", json.dumps(said).encode())


@pytest.mark.slow
def test_an_upload_whose_process_dies_meanwhile_is_left_to_the_next_time(store: Store) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record(store, "out/a", process)
        record(store, "out/b")
        store.say("POST", f"/{store.bucket}/out/a?uploads")

        def end() -> None:
            process.kill()
            process.wait()

        store.front.faults.append(Fault("none", path="?uploads", act=end))
        (found,) = ckptmove.recover(store.url("out")).files
    assert (found.path, found.outcome) == (store.url("out/a"), "uploading")
    assert (uploads(store), len(records(store))) == (1, 1)
    (found,) = ckptmove.recover(store.url("out")).files
    assert found.outcome == "aborted"
    assert (uploads(store), len(records(store))) == (0, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "path", "status", "hint"),
    [
        ("GET", "?uploads", 403, "allow s3:ListBucketMultipartUploads"),
        ("GET", "?uploads", 501, None),
        ("DELETE", "uploadId=", 403, "allow s3:AbortMultipartUpload"),
    ],
)
def test_what_may_not_be_aborted_stops_no_batch(
    method: str, path: str, status: int, hint: str | None, store: Store, tmp_path: Path
) -> None:
    torch.save({"w": torch.rand(3)}, tmp_path / "a.pt")
    record(store, "out/a.safetensors")
    store.say("POST", f"/{store.bucket}/out/a.safetensors?uploads")
    store.front.faults.append(Fault("status", status, method, path))
    with ckptmove.batch("convert", tmp_path, store.url("out"), jobs=1) as batch:
        assert [each.outcome for each in batch] == ["done"]
    (note,) = batch.report().notes
    assert "out/a.safetensors: what a killed process had uploaded of it" in note
    assert hint is None or hint in note
    with pytest.raises(RefusedError, match=r"can't be (found|aborted): ") as refused:
        ckptmove.recover(store.url("out"))
    assert (refused.value.path, refused.value.hint) == (store.url("out/a.safetensors"), hint)
    assert (uploads(store), len(records(store))) == (1, 1)


@pytest.mark.slow
def test_what_somebody_may_be_at_is_kept(killed: Path, store: Store) -> None:
    (path,) = records(store)
    fs = fsspec.filesystem("s3")
    number = re.search(b"<UploadId>(.+?)<", store.say("GET", f"/{store.bucket}?uploads"))
    assert number is not None
    said = {**json.loads(fs.cat_file(path)), "upload": number[1].decode()}
    fs.pipe_file(path, json.dumps({**said, "machine": "another"}).encode())
    (found,) = ckptmove.recover(store.url("out")).files
    assert found.outcome == "uploading"
    assert uploads(store) == 1
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    alive = {**said, "pid": os.getpid(), "started": started}
    fs.pipe_file(path, json.dumps(alive).encode())
    (found,) = ckptmove.recover(store.url("out")).files
    assert found.outcome == "uploading", "a process of this machine is at it"
    assert uploads(store) == 1
    fs.pipe_file(path, json.dumps({**said, "key": "elsewhere/large.safetensors"}).encode())
    assert not ckptmove.recover(store.url("out")).files, "it is not below that destination"
    fs.pipe_file(path, b"[1]")
    assert not ckptmove.recover(store.url("out")).files
    assert uploads(store) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("pid", ["Infinity", "[]", "9" * 5000])
def test_what_is_no_record_is_left_alone(pid: str, store: Store) -> None:
    said = f'{{"key": "out/a", "upload": "x", "machine": "m", "started": "1", "pid": {pid}}}'
    store.put(f"out/{OBJECT_LEDGER}/uploads/a.json", said.encode())
    assert not ckptmove.recover(store.url("out")).files
    assert len(records(store)) == 1


def test_what_another_machine_uploads_is_kept_though_the_clock_here_is_ahead(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"key": "out/a", "upload": "x", "machine": "another", "pid": 1, "started": "1"}
    store.put(f"out/{OBJECT_LEDGER}/uploads/a.json", json.dumps(said).encode())
    clock = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    monkeypatch.setattr(unfinished, "time", clock)  # ours, not that of the store
    (found,) = ckptmove.recover(store.url("out")).files
    assert found.outcome == "uploading"
    assert len(records(store)) == 1
    monkeypatch.setattr(unfinished, "_SILENT", -60.0)  # as if it had been silent for so long
    (found,) = ckptmove.recover(store.url("out")).files
    assert found.outcome != "uploading"
    assert not records(store)


def test_a_single_object_has_nothing_to_recover(store: Store) -> None:
    with pytest.raises(RefusedError, match="never changed in place"):
        ckptmove.recover(store.put("run.pt", b"x"))
