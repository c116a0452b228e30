"""What is left of an upload when its process is told to end, or killed: nothing to be seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptmove.writing.upload.errors import uninterruptible
from tests.conftest import ROOT
from tests.making.checkpoints import save
from tests.making.trees import until
from tests.servers.fronts import HANG, PATIENT
from tests.servers.uploading import BUCKET, Asked, Server, Store, bucket

pytest.importorskip("moto")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server().running() as server:
        yield server


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with bucket(server, monkeypatch) as store:
        yield store


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three parts."""
    path = tmp_path_factory.mktemp("source") / "in.pt"
    return save(path, {"a": torch.zeros(10_000_000)}, "cpu")


def command(source: Path, url: str) -> list[str]:
    """The command line that writes there."""
    return [sys.executable, "-m", "ckptmove", "relocate", str(source), url, "--to", "cuda:0"]


def is_pending(pid: int, number: int) -> bool:
    """Whether a signal has been sent to a process that has not yet taken it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def struck(store: Store, source: Path, kind: str, number: int) -> tuple[int, str]:
    """Send a signal once a request of some kind is there.

    What makes or completes an upload is answered once the signal has arrived, since that is waited
    for; a part is not answered before the process has ended.

    Returns:
        The exit code, and what was said, but for the line that Ctrl-C ends.
    """
    met, go_on, hung = threading.Event(), threading.Event(), threading.Event()

    def wait(asked: Asked) -> None:
        if asked.kind == kind:
            met.set()
            if not go_on.wait(HANG):
                hung.set()

    store.server.fault = wait
    process = subprocess.Popen(
        command(source, store.url("x.pt")),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **PATIENT, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert met.wait(HANG)
        process.send_signal(number)
        if kind != "part":
            until(lambda: not is_pending(process.pid, number))
            go_on.set()
        said = process.communicate(timeout=2 * HANG)[1]
        assert not hung.is_set()
    finally:
        process.kill()
        go_on.set()
        process.wait()
    store.server.reset()
    return process.returncode, said.strip()


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["begin", "part"])
def test_who_is_told_to_end_leaves_no_parts(
    kind: str, number: int, store: Store, source: Path
) -> None:
    code, said = struck(store, source, kind, number)
    assert (code, said) == (-number, "")
    assert (store.there(), store.uploads()) == ([], [])


@pytest.mark.slow
def test_what_is_being_completed_is_complete(store: Store, source: Path) -> None:
    code, said = struck(store, source, "complete", signal.SIGINT)
    assert (code, said) == (-signal.SIGINT, "")
    assert (store.there(), store.uploads()) == (["x.pt"], [])
    assert len(store.get("x.pt")) > 40_000_000


@pytest.mark.slow
def test_who_is_killed_leaves_parts_that_nobody_sees(store: Store, source: Path) -> None:
    assert struck(store, source, "part", signal.SIGKILL)[0] == -signal.SIGKILL
    assert (store.there(), store.uploads()) == ([], ["x.pt"])
    (upload,) = store.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    store.client.abort_multipart_upload(Bucket=BUCKET, Key="x.pt", UploadId=upload["UploadId"])


@pytest.mark.slow
def test_errors_are_one_line(store: Store, source: Path) -> None:
    store.server.fault = lambda asked: 403 if asked.kind == "part" else None
    done = subprocess.run(
        command(source, store.url("x.pt")),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ckptmove: {store.url('x.pt')}: can't be written: access is denied")
    store.server.reset()
    assert (store.there(), store.uploads()) == ([], [])


def test_a_signal_waits_until_it_is_known_what_there_is_to_undo() -> None:
    done = list[int]()

    def call() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        uninterruptible(call)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        uninterruptible(lambda: 1 // 0)
    assert uninterruptible(lambda: 3) == 3
