"""Changes in place that are interrupted, refused by the system, or lied to.

Whatever happens, the file is byte for byte the old one or the complete new one, or its journal is
there still, and the user is told.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import ckptmove
from ckptmove.writing.in_place.journal import Journal
from tests.conftest import some
from tests.faults.breaking import Scene, calls, half_written, journal, scene, settlers
from tests.faults.injecting import Call, needs_strace, run, start, wait_for_stop
from tests.servers.fronts import HANG

__all__ = ["calls", "journal", "scene"]  # fixtures


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_at_any_call_it_is_undone_at_once(
    number: signal.Signals, scene: Scene, calls: list[Call]
) -> None:
    for call in some(calls[1:-1], 7):
        if number is signal.SIGINT and call.name in ("close", "fcntl", "pwrite64"):
            continue  # one signal is handled as another is
        scene.reset()
        what = f"{call.name}:signal={number.name[3:]}:when={call.ordinal}"
        ended = run(scene.command, inject=what)
        assert ended.code == -number, call
        assert scene.is_settled(), call


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_an_error_of_any_call_is_undone_and_said(
    error: str, scene: Scene, calls: list[Call]
) -> None:
    for call in some(calls, 8):
        if error == "EACCES" and call.name in ("pwrite64", "fsync", "close"):
            continue  # they never say so
        scene.reset()
        ended = run(scene.command, inject=f"{call.name}:error={error}:when={call.ordinal}")
        assert ended.code in (0, 3, 4, 5), (call, ended)
        assert ended.said.count("\n") == (ended.code != 0), (call, ended)
        if scene.journal.exists():  # it could not be removed
            assert "ckptmove recover" in ended.said, call
            ckptmove.recover(scene.path)
        assert scene.is_settled(), call
        is_new = scene.path.read_bytes() == scene.new
        assert is_new == (ended.code == 0 or "power failure" in ended.said), call


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("name", ["pwrite64", "fsync", "unlinkat"])
def test_where_it_can_not_be_undone_the_journal_stays(
    name: str, scene: Scene, calls: list[Call]
) -> None:
    """From some call on, all of a kind fail."""
    first = next(n for n, call in enumerate(calls) if call.name == "pwrite64")
    for call in [each for each in calls[first + 1 :] if each.name == name]:
        scene.reset()
        ended = run(scene.command, inject=f"{name}:error=EIO:when={call.ordinal}+")
        assert ended.code == 5, call
        assert ended.said.count("\n") == 1, call
        if scene.journal.exists():
            assert f"(ckptmove recover {scene.path})" in ended.said, call
        for settle in settlers(scene):
            settle()
            assert scene.is_settled(), call
        assert scene.path.read_bytes() in (scene.old, scene.new)


@pytest.mark.slow
@needs_strace
@pytest.mark.parametrize("failing", ["fsync", "pwrite64"])
def test_killed_while_it_is_undone_it_can_be_undone(
    failing: str, scene: Scene, calls: list[Call]
) -> None:
    """A write that did nothing, or a sync that failed, and then a kill."""
    syncs = [call for call in calls if call.name == "fsync"]
    assert len(syncs) == 4  # journal, folder, file, folder
    writes = [call for call in calls if call.name == "pwrite64"]
    lie = int(writes[-1].text.rpartition("= ")[2])
    what = {
        "fsync": f"fsync:error=EIO:when={syncs[2].ordinal}",
        "pwrite64": f"pwrite64:retval={lie}:when={writes[-1].ordinal}",
    }[failing]
    others = {"fsync": ("pwrite64", "unlinkat", "close"), "pwrite64": ("fsync", "unlinkat")}
    for name in others[failing]:
        first = {"pwrite64": writes[-1].ordinal + 1, "fsync": syncs[2].ordinal + 1}.get(name, 1)
        for ordinal in range(first, first + 9):
            scene.reset()
            kill = f"{name}:signal=KILL:when={ordinal}"
            with start(scene.command, what, kill) as process:
                process.communicate(timeout=HANG)
            if process.returncode == 5:
                break  # it came to its end before
            assert process.returncode == -signal.SIGKILL
            for settle in settlers(scene):
                settle()
                assert scene.is_settled()
                assert scene.path.read_bytes() == scene.old
        assert ordinal > first or name == "close"


@pytest.mark.slow
@needs_strace
def test_an_error_of_the_recovery_keeps_the_journal(
    scene: Scene, journal: bytes, tmp_path: Path
) -> None:
    half = half_written(scene, journal)
    scene.reset(half, journal)
    calls = scene.calls_of_recovery(tmp_path)
    for call in calls:
        scene.reset(half, journal)
        ended = run(scene.recover, inject=f"{call.name}:error=EIO:when={call.ordinal}")
        assert ended.code in (0, 3, 4, 5), (call, ended)
        assert ended.said.count("\n") == (ended.code != 0), (call, ended)
        ckptmove.recover(scene.path)
        assert scene.is_settled(), call
        assert scene.path.read_bytes() == scene.old, call


@needs_strace
def test_what_was_not_written_is_noticed(scene: Scene, calls: list[Call]) -> None:
    """The call says that it did all, and did nothing."""
    opened = next(call for call in calls if call.name == "openat" and "O_RDWR" in call.text)
    file = opened.text.rpartition("= ")[2]  # its number; the journal has another
    changing = [c for c in calls if c.name == "pwrite64" and c.text.startswith(f"{file}, ")]
    assert len(changing) > 2
    for call in changing:
        scene.reset()
        nbytes = int(call.text.rpartition("= ")[2])
        ended = run(scene.command, inject=f"pwrite64:retval={nbytes}:when={call.ordinal}")
        assert (ended.code, scene.is_settled()) == (5, True), call
        assert "can't be read back (the file is again as it was)" in ended.said
        assert scene.path.read_bytes() == scene.old


@pytest.mark.slow
@needs_strace
def test_what_can_not_be_read_afterwards_is_undone(
    scene: Scene, calls: list[Call], journal: bytes, tmp_path: Path
) -> None:
    """Somebody else writes to the pickle meanwhile, where nothing was to change."""
    found = Journal.from_bytes(journal)
    at = scene.old.index(b"\x80\x02") + 2
    assert not any(change.at <= at < change.at + len(change.old) for change in found.changes)
    synced = [call for call in calls if call.name == "fsync"][2]  # after journal and folder
    scene.reset()
    log = tmp_path / "stopped"
    with start(scene.command, f"fsync:signal=STOP:when={synced.ordinal}", log=log) as process:
        stopped = wait_for_stop(process, log)
        assert scene.path.read_bytes() == scene.new
        with scene.path.open("r+b") as file:
            file.seek(at)
            file.write(b"?")
        os.kill(stopped, signal.SIGCONT)
        said = process.communicate(timeout=HANG)[1]
    assert process.returncode == 5, said
    assert "what was written can't be read: " in said
    assert "(the file is again as it was)" in said
    content = scene.path.read_bytes()
    assert content == scene.old[:at] + b"?" + scene.old[at + 1 :]  # that is theirs
    assert not scene.journal.exists()


@needs_strace
def test_what_was_not_undone_is_noticed(scene: Scene, journal: bytes, tmp_path: Path) -> None:
    half = half_written(scene, journal)
    scene.reset(half, journal)
    writes = [call for call in scene.calls_of_recovery(tmp_path) if call.name == "pwrite64"]
    assert len(writes) > 2
    for call in writes:
        scene.reset(half, journal)
        nbytes = int(call.text.rpartition("= ")[2])
        ended = run(scene.recover, inject=f"pwrite64:retval={nbytes}:when={call.ordinal}")
        assert ended.code == 5, call
        assert "can't be read back" in ended.said
        assert scene.journal.read_bytes() == journal


@needs_strace
@pytest.mark.parametrize("error", ["EINVAL", "ENOLCK", "EACCES", "EPERM"])
def test_without_leases_it_goes_on(error: str, scene: Scene, calls: list[Call]) -> None:
    asking = next(call for call in calls if "F_RDLCK" in call.text)
    scene.reset()
    assert run(scene.command, inject=f"fcntl:error={error}:when={asking.ordinal}") == (0, "")
    assert scene.path.read_bytes() == scene.new


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_without_locks_it_is_refused_but_recovered(
    error: str, scene: Scene, journal: bytes
) -> None:
    scene.reset()
    ended = run(scene.command, inject=f"flock:error={error}:when=1+")
    assert ended.code == 4
    assert "does not support locks (--force changes it anyway)" in ended.said
    assert scene.is_settled()
    assert run([*scene.command, "--force"], inject=f"flock:error={error}:when=1+") == (0, "")
    assert scene.path.read_bytes() == scene.new
    scene.reset(half_written(scene, journal), journal)
    assert run(scene.recover, inject=f"flock:error={error}:when=1+") == (0, "")
    assert scene.path.read_bytes() == scene.old
