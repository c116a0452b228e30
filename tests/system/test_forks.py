"""Forks of a process that has imported all it takes."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmove.batches.executors.process_pool import Workers, forking
from ckptmove.system.forks import Fork, can_fork
from tests.conftest import ROOT
from tests.servers.fronts import HANG

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what it takes")


@contextlib.contextmanager
def forked(serve: Callable[[], object]) -> Iterator[Fork]:
    """A fork whose pipes are closed at the end."""
    fork = Fork(serve)
    with fork.stdin, fork.stdout:
        yield fork


def _serve() -> None:
    """Tell what this process is, and end with the number that comes in."""
    opened = dict[str, str]()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the list itself is closed by now
            opened[path.name] = os.fspath(path.readlink())
    handlers = [str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT)]
    masked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    facts = {"opened": opened, "session": os.getsid(0), "handlers": handlers, "masked": masked}
    sys.stdout.write(json.dumps(facts) + "\n")
    os._exit(int(sys.stdin.readline()))


def test_it_has_its_pipes_and_nothing_else_that_is_open(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w"), socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with forked(_serve) as fork:
            facts = json.loads(fork.stdout.readline())
            fork.stdin.write(b"7\n")
            fork.stdin.flush()
            assert fork.wait() == 7
    others = {name for number, name in facts["opened"].items() if int(number) > 2}
    assert others == {os.devnull}
    assert facts["session"] == fork.pid
    assert facts["handlers"] == [str(signal.SIG_DFL)] * 2
    assert not {signal.SIGTERM, signal.SIGINT} & set(facts["masked"])


def test_what_was_not_printed_yet_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve() -> None:
        sys.stdout.write("in the fork\n")
        gc.collect()
        os._exit(0)

    path = tmp_path / "out"
    with path.open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        stream.write("said before\n")
        with forked(serve) as fork:
            assert fork.stdout.read() == b"in the fork\n"
            assert fork.wait() == 0
    assert path.read_text() == "said before\n"


@pytest.mark.parametrize(("end", "code"), [(Fork.kill, -9), (Fork.terminate, -15)])
def test_it_can_be_ended_and_then_not_again(end: Callable[[Fork], None], code: int) -> None:
    with forked(_serve) as fork:
        assert fork.stdout.readline()
        end(fork)
        assert fork.wait() == fork.wait() == code
        fork.kill()  # its number may be that of another process now


def test_what_it_calls_may_not_return() -> None:
    with forked(list) as fork:
        assert fork.wait() == 70


def test_what_it_raises_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with forked(lambda: [].pop()) as fork:
        assert fork.wait() == 70
    assert "IndexError: pop from empty list" in capfd.readouterr().err


def _refuse(*_: object) -> int:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _open_numbers() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_fork_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _open_numbers()
    monkeypatch.setattr(os, "fork", _refuse)
    with pytest.raises(BlockingIOError):
        Fork(list)
    assert _open_numbers() == before
    pipes = iter([os.pipe])  # the second one fails
    monkeypatch.setattr(os, "pipe", lambda: next(pipes, _refuse)())
    with pytest.raises(BlockingIOError):
        Fork(list)
    assert _open_numbers() == before


def serve_with_one_fork(pipe: Path) -> None:
    """Have two workers open a FIFO, of which one can be a fork; in a process of one thread."""
    fork, pids = os.fork, list[int]()

    def fork_once() -> int:
        if pids:
            return _refuse()
        pids.append(fork())
        return pids[0]

    os.fork = fork_once
    assert can_fork()
    with forking(), Workers(2) as workers:
        read = workers.submit(Path.read_bytes, pipe)
        assert workers.submit(Path.write_bytes, pipe, b"both").result() == 4
        assert read.result() == b"both"
    assert len(pids) == 1


@pytest.mark.slow
def test_where_a_fork_fails_a_new_python_serves(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")  # which is opened by two, or not at all
    code = f"from {__name__} import *; serve_with_one_fork(Path({str(pipe)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG, cwd=ROOT)


def test_a_process_with_other_threads_is_not_forked() -> None:
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    assert not can_fork()
    ending.set()
    thread.join()
