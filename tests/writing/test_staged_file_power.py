"""A power cut while a new file or folder is written: it is there as a whole, or not at all."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptmove
from tests.conftest import ROOT, some
from tests.faults.injecting import Call, calls_of, command, few, needs_strace, run
from tests.faults.power import Disk, disk_of
from tests.making.checkpoints import MAKERS, save

#: What gives names to files, or puts them on disk; in between a disk holds more or fewer bytes.
_TURNING_POINTS = ("fsync", "fdatasync", "linkat", "rename", "renameat", "renameat2", "unlinkat")
_RANDOM_CUTS = int(os.environ.get("CKPTMOVE_ROUNDS", "6"))

Record = Callable[[str, object], None]
Content = dict[str, bytes]  # name of a file, relative to where it is looked for → its bytes


def content_of(path: Path) -> Content | None:
    """What is at a path: a file, every file of a folder, or nothing."""
    if path.is_dir():
        files = [each for each in path.rglob("*") if each.is_file()]
        return {os.fspath(each.relative_to(path)): each.read_bytes() for each in files}
    return {"": path.read_bytes()} if path.exists() else None


class Job:
    """A command that writes something new on a disk.

    Attributes:
        line: the command.
        old: what is at the destination before.
        new: what is there afterwards.
    """

    def __init__(self, disk: Disk, kind: str) -> None:
        self.disk = disk
        self.source = save(disk.path / "in.pt", MAKERS["adamw_training"](), "cuda:1")
        is_folder, replaces = kind.endswith("folder"), kind.startswith("replaced")
        self.out = disk.path / ("out" if is_folder else "out.pt")
        options = ["--force"] if replaces else []
        if is_folder:
            options += ["--max-shard-size", "1KB"]
            self.line = command("convert", "-q", self.source, f"{self.out}/", *options)
        else:
            self.line = command("relocate", "-q", self.source, self.out, "--to", "cpu", *options)
        subprocess.run(self.line, check=True, cwd=ROOT)
        new = content_of(self.out)
        assert new
        self.new = new
        self.clear()
        self.old: Content | None = None
        if replaces:
            other = save(disk.path.parent / "other.pt", MAKERS["adamw_training"](), "cpu")
            if is_folder:
                ckptmove.convert(other, f"{self.out}/", select="model")
            else:
                shutil.copyfile(other, self.out)
            self.old = content_of(self.out)
            assert self.old not in (None, self.new)
        self.before = disk.path.parent / "before"
        if self.before.exists():
            shutil.rmtree(self.before)
        shutil.copytree(disk.path, self.before, ignore=shutil.ignore_patterns("lost+found"))
        disk.sync()

    def clear(self) -> None:
        """Remove everything but the source."""
        for path in self.disk.path.iterdir():
            if path.is_dir() and path.name != "lost+found":
                shutil.rmtree(path)
            elif path.is_file() and path != self.source:
                path.unlink()

    def reset(self) -> None:
        """Have the disk as it was before the command."""
        self.clear()
        if self.old is not None:
            name = self.out.name
            copy = shutil.copytree if (self.before / name).is_dir() else shutil.copyfile
            copy(self.before / name, self.out)
        self.disk.sync()

    def check(self, *, done: bool) -> bool:
        """After a cut now the destination is what it was, or all that it is to be.

        Args:
            done: whether the command has ended, so that it can be only the latter.

        Returns:
            Whether it is the new one.
        """
        with self.disk.after_the_cut() as found:
            assert (found / "in.pt").read_bytes() == self.source.read_bytes()
            now = content_of(found / self.out.name)
            if now == self.new:
                return True
            assert not done
            if (
                now is None and self.old is not None
            ):  # a folder is moved aside before it is replaced
                assert self.out.suffix == ""
                assert self.old in [content_of(each) for each in found.glob(".out.*")]
            else:
                assert now == self.old
            return False


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """One whose writes wait for a sync."""
    with disk_of(tmp_path_factory.mktemp("power")) as there:
        yield there


@pytest.fixture(scope="module", params=["file", "replaced file", "folder", "replaced folder"])
def job(request: pytest.FixtureRequest, disk: Disk) -> Job:
    """Something to be written, once where nothing is, and once in the place of something."""
    return Job(disk, request.param)


def cuts(job: Job, log: Path) -> list[Call]:
    """The calls at which the power is cut: all turning points, and some of the others."""
    names = ("openat", "mkdirat", "ftruncate", "copy_file_range", "pwrite64", *_TURNING_POINTS)
    calls = calls_of(job.line, job.source, log, names)
    others = [
        call for call in calls if call.name not in _TURNING_POINTS and "/lib" not in call.text
    ]
    turning = [call for call in calls if call.name in _TURNING_POINTS]
    return [*few(turning), *few(others)[:4]]


@pytest.mark.sample(1)
@needs_strace
def test_after_a_power_cut_it_is_whole_or_not_there(
    job: Job, tmp_path: Path, record_property: Record
) -> None:
    job.reset()
    calls = some(cuts(job, tmp_path / "log"), 10)
    assert job.check(done=True)  # what was done stays done
    seen = set()
    for call in calls:
        job.reset()
        ended = run(job.line, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        seen.add(job.check(done=False))
    assert False in seen
    record_property("cuts", len(calls))


@pytest.mark.slow
def test_after_a_power_cut_at_any_moment_it_is_whole_or_not_there(
    job: Job, record_property: Record
) -> None:
    chance = random.Random(job.out.name)
    started = time.monotonic()
    job.reset()
    subprocess.run(job.line, check=True, cwd=ROOT)
    usual = time.monotonic() - started
    for _ in range(_RANDOM_CUTS):
        job.reset()
        with subprocess.Popen(job.line, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            time.sleep(chance.uniform(0.2, 1.0) * usual)
            process.kill()
        job.check(done=process.returncode == 0)
    record_property("cuts", _RANDOM_CUTS)
