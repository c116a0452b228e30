"""Bytes that are copied and written, by a kernel that takes less than it was given."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from ckptmove.plans.plan import Copy, Write
from ckptmove.sources.file import File
from ckptmove.sources.joined import JoinedFiles, Strip
from ckptmove.writing.copy import WriteRun
from tests.conftest import ROOT

LIMIT = 1 << 20  # bytes; what crosses it is written in part, and the next call fails

#: Ends with the errno of what failed; the signal that comes with it is ignored, as Python does.
PROGRAM = """
import os, sys
from pathlib import Path
from ckptmove.plans.plan import Copy
from ckptmove.sources.file import File
from ckptmove.writing.copy import Copier, write_at

way, source, out = sys.argv[1:]
fd = os.open(out, os.O_RDWR | os.O_CREAT)
try:
    if way == "write":
        write_at(fd, 0, Path(source).read_bytes())
    else:
        file = File.open(source)
        copier = Copier([file], fd)
        copier.method = way
        for _ in copier.copy(Copy(0, file.nbytes, 0)):
            pass
except OSError as error:
    sys.exit(error.errno)
"""


@pytest.mark.parametrize("way", ["write", "kernel", "read"])
def test_what_was_taken_in_part_is_offered_again(way: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(LIMIT + LIMIT // 2 + 1))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, os.fspath(source), os.fspath(out)],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT + 7, LIMIT + 7)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (os.strerror(done.returncode), done.stderr) == ("File too large", "")
    assert out.read_bytes() == source.read_bytes()[: LIMIT + 7]


def test_small_pieces_of_joined_files_are_written_together(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(bytes(range(200)))
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    with File.open(tmp_path / "in") as file:
        joined = JoinedFiles("joined")
        for n in range(3):
            joined.add(8, lambda n=n: [Strip(file, 50 * n + 4 * k, 4 * k, 4) for k in (0, 1)])  # type: ignore[misc]
        run = WriteRun([joined], fd)
        assert all(run.add(Copy(64 * n, 8, 10 * n)) for n in range(3))
        assert run.put(deque([Write(8, b"!!")]))
    expected = [*range(8), 33, 33, *range(50, 58), 0, 0, *range(100, 108)]
    assert (tmp_path / "out").read_bytes() == bytes(expected)
    os.close(fd)
