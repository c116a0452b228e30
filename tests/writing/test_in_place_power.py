"""A power cut at every step of a change in place, and of its recovery."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptmove
from tests.faults.injecting import LOCKING, WRITING, Call, calls_of, command, needs_strace, run
from tests.faults.power import Disk, disk_of
from tests.making.checkpoints import MAKERS, save
from tests.making.staging import interrupted, journal_of, journals, unfinished_of

CHANGING = (*WRITING, *LOCKING)


class Scene:
    """A disk with a checkpoint on it."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.disk, self.path = disk, disk.path / "in.pt"
        save(self.path, MAKERS["adamw_training"](), "cuda:1")
        self.old = self.path.read_bytes()
        ckptmove.relocate(self.path, folder / "out.pt", to="cpu")
        self.new = (folder / "out.pt").read_bytes()
        self.reset(self.old)

    def reset(self, content: bytes, journal: bytes | None = None) -> None:
        """Have this on the disk, and nothing else."""
        self.path.write_bytes(content)
        journal_of(self.path).unlink(missing_ok=True)
        unfinished_of(self.path).unlink(missing_ok=True)
        if journal is not None:
            journal_of(self.path).write_bytes(journal)
        for path in (self.path, self.path.parent, *([journal_of(self.path)] if journal else [])):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def after_the_cut(self, *, written_back: bool = True) -> tuple[bytes, bool]:
        """The file as it is recovered after a power cut now, and whether there was a journal.

        Its bytes are on the disk, the worst that can be while it changes: of a name only what was
        synced is. Without `written_back`, of its bytes too.
        """
        if written_back:
            self.disk.write_back(self.path)
        with self.disk.after_the_cut() as found:
            had = bool(journals(found))
            ckptmove.inspect(found / "in.pt")
            assert journals(found) == []
            return (found / "in.pt").read_bytes(), had


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """On a disk whose writes wait for a sync."""
    folder = tmp_path_factory.mktemp("power")
    with disk_of(folder) as disk:
        yield Scene(folder, disk)


def some(calls: list[Call]) -> list[Call]:
    """Those that change something; the others leave the disk as it is."""
    names = ("openat", "pwrite64", "fsync", "rename", "renameat", "renameat2", "unlinkat")
    return [call for call in calls if call.name in names and "/lib" not in call.text]


@pytest.mark.slow
@needs_strace
def test_after_a_power_cut_it_is_the_old_or_the_new_file(
    scene: Scene, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    line = command("relocate", "-q", scene.path, "--to", "cpu", "--in-place")
    calls = some(calls_of(line, scene.path, tmp_path / "log", CHANGING))
    assert scene.after_the_cut(written_back=False) == (scene.new, False)  # done stays done
    found = set()
    for call in calls:
        scene.reset(scene.old)
        ended = run(line, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        content, had_journal = scene.after_the_cut()
        assert content in ((scene.old,) if had_journal else (scene.old, scene.new)), call
        found.add(had_journal)
    assert found == {False, True}
    record_property("cuts", len(calls))


@needs_strace
def test_after_a_power_cut_of_the_recovery_it_is_the_old_file(
    scene: Scene, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    scene.reset(scene.old)
    interrupted(scene.path)
    half, journal = scene.path.read_bytes(), journal_of(scene.path).read_bytes()
    line = command("recover", "-q", scene.path)
    calls = some(calls_of(line, scene.path.parent, tmp_path / "log", CHANGING))
    assert scene.after_the_cut(written_back=False) == (scene.old, False)
    for call in calls:
        scene.reset(half, journal)
        ended = run(line, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        assert scene.after_the_cut()[0] == scene.old, call
    record_property("cuts", len(calls))
