"""Sources to be relocated, and what happens meanwhile."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.plans.plan import Write
from ckptmove.writing.in_place.journal import Journal
from ckptmove.writing.in_place.journal_name import SUFFIX, UNFINISHED, journal_name
from tests.making.checkpoints import MAKERS, kept_on_cpu, save, sparse_zip64
from tests.servers.warm_python import start_commands

LONG_AGO = (1_000_000_000, 1_000_000_000)


def small_source(folder: Path) -> Path:
    """A checkpoint on the CPU with an old time of change."""
    saved = {"a": torch.arange(70_000.0), "b": [torch.ones(3), torch.ones(0)], "device": "cpu"}
    path = save(folder / "in.pt", saved, "cpu")
    os.utime(path, LONG_AGO)
    return path


def sparse_source(folder: Path, gib: float = 0.07) -> Path:
    """Three parts with holes between, copied in several steps; without checksums."""
    path = sparse_zip64(folder / "sparse.pt", gib, "cuda:1")
    os.utime(path, LONG_AGO)
    return path


def moved(source: Path, out: str | os.PathLike[str], **options: Any) -> ckptmove.RelocateReport:
    """Relocated to cuda:0; a small source must stay as it was."""
    before = source.read_bytes() if source.stat().st_size < 1 << 24 else b""
    try:
        return ckptmove.relocate(source, out, to="cuda:0", all=True, **options)
    finally:
        assert not before or source.read_bytes() == before


def overwritten(path: Path) -> None:
    """Overwrite some bytes in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"changed")


class Once:
    """A progress callback that acts on its first call only."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.called = act, False

    def __call__(self, nbytes: int) -> None:
        if not self.called:
            self.called = True
            self.act()


def _open_files() -> set[tuple[Path, Path]]:
    """The descriptors of this process and what they are of; threads may close some meanwhile."""
    found = set()
    for path in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # as for the folder that was just listed
            found.add((path, path.readlink()))
    return found


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """Check that no file stays open and no temporary file stays in the folder."""
    start_commands()
    if "s3fs" in sys.modules:  # what tests before have let go of is closed now, not meanwhile
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # theirs, not of the test that begins
            gc.collect()
    before = _open_files()
    yield
    assert not _open_files() - before
    assert list(folder.rglob("*.ckptmove-tmp")) == []


def journal_of(path: Path) -> Path:
    """The path of the journal of a file."""
    return path.with_name(journal_name(path.name))


def unfinished_of(path: Path) -> Path:
    """The path of the journal of a file while it is being written."""
    return path.with_name(journal_name(path.name) + UNFINISHED)


def interrupted(path: Path, to: str = "cpu") -> bytes:
    """Leave a change in place half done, as a crash does; gives the old bytes of the file."""
    out = path.with_name("other.tmp")
    ckptmove.relocate(path, out, to=to)
    old, new = path.read_bytes(), out.read_bytes()
    out.unlink()
    inode = path.stat().st_ino
    writes = [Write(0, new)]
    journal = Journal.of(len(old), inode, writes, lambda at, nbytes: old[at : at + nbytes])
    journal_of(path).write_bytes(journal.to_bytes())
    with path.open("r+b") as file:
        for change in journal.changes:
            file.seek(change.at)
            file.write(change.new[: len(change.new) // 2 + 1])
    assert path.read_bytes() != old
    return old


def journals(folder: Path) -> list[str]:
    """The journals in a folder and below, with unfinished ones."""
    return [path.name for path in folder.rglob(f".*{SUFFIX}*")]


def or_skip(*command: str | Path) -> None:
    """Run a command of the system; skip the test if it is missing or not permitted."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't {command[0]}: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A newly mounted file system; skips the test if that is not permitted."""
    folder.mkdir()
    or_skip("mount", *options, folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", os.fspath(folder)], check=True)


def training_source(folder: Path) -> Path:
    """A training checkpoint from cuda:1 with an old time of change."""
    saved = MAKERS["adamw_training"]()
    path = save(folder / "run.pt", saved, "cuda:1", keep_cpu=kept_on_cpu(saved))
    os.utime(path, LONG_AGO)
    return path


def in_place(path: Path, **options: Any) -> ckptmove.RelocateReport:
    """Relocate in place, by default to the CPU."""
    return ckptmove.relocate(path, in_place=True, **{"to": "cpu", **options})


def untouched(path: Path, run: Callable[[], object], error: type[Exception], match: str) -> str:
    """Check that an error is raised and that the file is unchanged; gives the hint."""
    before = path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ctime_ns
    beside = sorted(path.parent.rglob("*"))
    with pytest.raises(error, match=match) as raised:
        run()
    assert before == (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ctime_ns)
    assert beside == sorted(path.parent.rglob("*"))
    hint = getattr(raised.value, "hint", None)
    return hint or ""
