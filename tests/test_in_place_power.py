"""A power cut at every step of a change in place, and of its recovery.

What a disk holds at that moment is what is in the image of a mounted file system: bytes that were
written but not synced are not there yet. A copy of the image, mounted, is the disk after the cut.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptmove
from tests.checkpoints import MAKERS, save
from tests.injecting import LOCKING, WRITING, Call, calls_of, command, needs_strace, run
from tests.staging import interrupted, journal_of, journals, mounted, or_skip, unfinished_of

CHANGING = (*WRITING, *LOCKING)


class Disk:
    """A file system in an image, with a checkpoint in it."""

    def __init__(self, folder: Path, image: Path, disk: Path) -> None:
        self.folder, self.image, self.path = folder, image, disk / "in.pt"
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

    def after_the_cut(self) -> tuple[bytes, bool]:
        """The file as it is recovered after a power cut now, and whether there was a journal."""
        copy, there = self.folder / "copy", self.folder / "after"
        shutil.copyfile(self.image, copy)
        try:
            with mounted(there, "-o", "loop", os.fspath(copy)) as disk:
                had = bool(journals(disk))
                ckptmove.inspect(disk / "in.pt")
                assert journals(disk) == []
                return (disk / "in.pt").read_bytes(), had
        finally:
            there.rmdir()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """One whose writes wait for a sync."""
    folder = tmp_path_factory.mktemp("power")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    or_skip("mkfs.ext4", "-q", image)
    with mounted(folder / "disk", "-o", "loop,noatime,commit=300", os.fspath(image)) as there:
        yield Disk(folder, image, there)


def some(calls: list[Call]) -> list[Call]:
    """Those that change something; the others leave the disk as it is."""
    names = ("openat", "pwrite64", "fsync", "rename", "renameat", "renameat2", "unlinkat")
    return [call for call in calls if call.name in names and "/lib" not in call.text]


@needs_strace
def test_after_a_power_cut_it_is_the_old_or_the_new_file(disk: Disk, tmp_path: Path) -> None:
    line = command("relocate", "-q", disk.path, "--to", "cpu", "--in-place")
    calls = some(calls_of(line, disk.path, tmp_path / "log", CHANGING))
    assert disk.after_the_cut() == (disk.new, False)  # what was done stays done
    found = set()
    for call in calls:
        disk.reset(disk.old)
        ended = run(line, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        content, had_journal = disk.after_the_cut()
        assert content in ((disk.old,) if had_journal else (disk.old, disk.new)), call
        found.add(had_journal)
    assert found == {False, True}


@needs_strace
def test_after_a_power_cut_of_the_recovery_it_is_the_old_file(disk: Disk, tmp_path: Path) -> None:
    disk.reset(disk.old)
    interrupted(disk.path)
    half, journal = disk.path.read_bytes(), journal_of(disk.path).read_bytes()
    line = command("recover", "-q", disk.path)
    calls = some(calls_of(line, disk.path.parent, tmp_path / "log", CHANGING))
    assert disk.after_the_cut() == (disk.old, False)
    for call in calls:
        disk.reset(half, journal)
        ended = run(line, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        assert disk.after_the_cut()[0] == disk.old, call
