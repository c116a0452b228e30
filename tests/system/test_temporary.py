"""Temporary folders: removed by who made them, or by the next one when that was killed."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptmove.system.temporary import temporary_folder
from tests.conftest import ROOT

#: Makes a folder with a deep one in it, says where it is, and keeps it.
_KEEPS = """
import os, sys
from ckptmove.system.temporary import temporary_folder
with temporary_folder() as folder:
    os.makedirs(os.path.join(folder, "a", "b"))
    open(os.path.join(folder, "a", "b", "file"), "w").close()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def keeper() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _KEEPS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def long_ago(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_the_folder_of_a_killed_process_is_removed_by_the_next(above: Path) -> None:
    process, folder = keeper()
    long_ago(folder)
    with temporary_folder() as mine:
        assert folder.is_dir()  # whoever has it still lives
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert folder.is_dir()
    with temporary_folder() as mine:
        assert sorted(above.iterdir()) == [Path(mine)]
    assert list(above.iterdir()) == []


def test_it_goes_with_its_process(above: Path) -> None:
    process, _ = keeper()
    process.communicate("")
    assert list(above.iterdir()) == []


def test_nothing_else_is_removed(above: Path) -> None:
    precious = above / "precious"
    precious.mkdir()
    (precious / "file").touch()
    with temporary_folder() as usual:
        name = Path(usual).name
    start, tail = name[:-4], itertools.count(1000)
    (above / f"{start}{next(tail)}").symlink_to(precious)
    (above / f"{start}{next(tail)}").touch()
    for chosen in ("ckptmove-run-1", "ckptmove-run-yogaxeu0", f"{name}-kept", f"old-{name}"):
        (above / chosen).mkdir()  # by the user, who may call folders so
        (above / chosen / "file").touch()
    new = above / f"{start}{next(tail)}"  # which will be locked in a moment
    new.mkdir()
    elsewhere = above / re.sub("run-[0-9a-f]{8}", "run-00000000", name)
    elsewhere.mkdir()  # of another machine, whose locks may not be known here
    before = sorted(above.rglob("*"))
    for each in above.iterdir():
        if each != new:
            os.utime(each, (0, 0), follow_symlinks=False)
    with temporary_folder():
        pass
    assert sorted(above.rglob("*")) == before
