"""Changes in place that are killed, interrupted or lied to, at every step there is.

Whatever happens: after `recover`, or after any other command, the file is byte for byte the old one
or the complete new one.
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

import ckptmove
from ckptmove import InputError
from ckptmove.writing.in_place.journal import Journal
from tests.faults.breaking import Scene, calls, half_written, journal, scene, settlers
from tests.faults.injecting import Call, needs_strace, run

__all__ = ["calls", "journal", "scene"]  # fixtures


# The order of things


@needs_strace
def test_the_journal_is_on_disk_before_and_the_change_before_it_goes(calls: list[Call]) -> None:
    """What is synced when, by the descriptors of the calls."""
    steps = []
    journal = folder = "?"
    for call in calls:
        fd, ended = re.split(r"[,)]", call.text)[0], call.text.rpartition("= ")[2]
        if call.name == "openat" and "ckptmove-journal" in call.text:
            assert "O_EXCL" in call.text
            assert "0600" in call.text
            assert "ckptmove-journal-new" in call.text
            journal = ended
            steps.append("made")
        elif call.name == "openat" and "O_DIRECTORY" in call.text:
            folder = ended
        elif call.name.startswith("rename"):
            assert re.search(r'ckptmove-journal-new", .*ckptmove-journal"', call.text)
            steps.append("named")
        elif call.name in ("pwrite64", "fsync", "fdatasync"):
            of = "journal" if fd == journal else "folder" if fd == folder else "file"
            steps.append(f"{'wrote' if call.name == 'pwrite64' else 'synced'} {of}")
        elif call.name in ("unlink", "unlinkat"):
            steps.append("gone")
        elif call.name == "close" and fd == journal:
            journal = "?"
    order = list(dict.fromkeys(steps[:-1])) + steps[-1:]
    assert order == [
        *("made", "wrote journal", "synced journal", "named", "synced folder"),
        *("wrote file", "synced file", "gone", "synced folder"),
    ]
    assert steps.count("wrote file") > 2
    assert steps[::-1].index("wrote file") > steps[::-1].index("synced file")


@needs_strace
def test_what_is_traced_is_all_that_matters(calls: list[Call]) -> None:
    names = {re.sub("^rename.*", "rename", call.name) for call in calls}
    changing = {"openat", "pwrite64", "fsync", "rename", "unlinkat", "close"}
    assert names == {*changing, "flock", "fcntl"}


# Killed


@needs_strace
def test_killed_at_any_call_it_is_the_old_or_the_new_file(scene: Scene, calls: list[Call]) -> None:
    ends = []
    for call in calls:
        scene.reset()
        ended = run(scene.command, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        unfinished, unnamed = scene.journal.exists(), scene.unfinished.exists()
        assert not (unfinished and unnamed), call
        for settle in settlers(scene):
            settle()
            assert scene.is_settled(), call
            is_old = scene.path.read_bytes() == scene.old
            assert is_old or not unfinished, call
        ends.append((unnamed, unfinished, is_old))
    steps = list(dict.fromkeys(ends))  # untouched, before the journal is whole, undone, done
    assert steps == [
        *((False, False, True), (True, False, True)),
        *((False, True, True), (False, False, False)),
    ]


@pytest.mark.slow
@needs_strace
def test_killed_at_any_call_of_the_recovery_it_is_recovered_again(
    scene: Scene, journal: bytes, tmp_path: Path
) -> None:
    half = half_written(scene, journal)
    for state in ((half, journal), (scene.old, journal), (scene.old, None, journal[:-1])):
        scene.reset(*state)
        calls = scene.calls_of_recovery(tmp_path)
        assert scene.path.read_bytes() == scene.old
        names = [call.name for call in calls]
        assert (names.count("fsync"), names.count("unlinkat")) == (2 * (len(state) == 2), 1)
        for call in calls:
            scene.reset(*state)
            ended = run(scene.recover, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
            assert ended.code == -signal.SIGKILL, call
            ckptmove.recover(scene.path)
            assert scene.is_settled(), call
            assert scene.path.read_bytes() == scene.old, call


@needs_strace
def test_a_write_may_have_been_torn_anywhere(scene: Scene, journal: bytes) -> None:
    found = Journal.from_bytes(journal)
    content = bytearray(scene.old)
    assert any(len(change.new) > 1 for change in found.changes)
    for change in found.changes:
        for cut in {1, len(change.new) // 2, len(change.new) - 1}:
            torn = bytearray(content)
            torn[change.at : change.at + cut] = change.new[:cut]  # from its start
            scene.reset(bytes(torn), journal)
            ckptmove.recover(scene.path)
            assert scene.path.read_bytes() == scene.old
            torn = bytearray(content)
            end = change.at + len(change.new)
            torn[end - cut : end] = change.new[-cut:]  # or its end first
            scene.reset(bytes(torn), journal)
            ckptmove.recover(scene.path)
            assert scene.is_settled()
            assert scene.path.read_bytes() == scene.old
        content[change.at : change.at + len(change.new)] = change.new
    assert content == scene.new


@needs_strace
def test_a_journal_may_have_been_torn_anywhere(scene: Scene, journal: bytes) -> None:
    """Before it had its name. Afterwards it was on disk, so that it is damaged, and all we have."""
    half = half_written(scene, journal)
    cuts = {*range(0, 200, 7), *range(0, len(journal), 999), len(journal) - 1}
    for cut in cuts:
        for torn in (journal[:cut], journal[:cut].ljust(len(journal), b"\0")):
            if torn != journal:
                scene.reset(scene.old, None, torn)
                assert ckptmove.recover(scene.path).files[0].outcome == "nothing"
                assert scene.is_settled()
                assert scene.path.read_bytes() == scene.old
                scene.reset(half, torn)
                with pytest.raises(InputError, match=r"its journal (is|belongs)"):
                    ckptmove.recover(scene.path)
                assert (scene.path.read_bytes(), scene.journal.read_bytes()) == (half, torn)


@needs_strace
def test_a_copy_of_both_is_not_recovered(scene: Scene, journal: bytes, tmp_path: Path) -> None:
    """Nobody knows whether it is a copy, or a trap."""
    half = half_written(scene, journal)
    scene.reset(half, journal)
    there = Path(shutil.copytree(scene.folder, tmp_path / "copy")) / "in.pt"
    with pytest.raises(InputError, match="is not the file that its journal belongs to"):
        ckptmove.recover(there)
    assert there.read_bytes() == half
    assert there.with_name(scene.journal.name).read_bytes() == journal
    moved = Path(shutil.move(scene.folder, tmp_path / "moved")) / "in.pt"
    try:
        ckptmove.recover(moved)
        assert moved.read_bytes() == scene.old
    finally:
        moved.parent.rename(scene.folder)
