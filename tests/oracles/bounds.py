"""Bounds on what work on a file may use: processor time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

_STACKS = 256 << 20  # bytes of address space that a fresh process has before it does anything

#: Inspect a file, show it in every form, and relocate it; says the exit code of a refusal.
_EVERYTHING = """
import sys, ckptmove
from ckptmove.reports.inspect import summary, tensors
from ckptmove.reports.tree import tree
from ckptmove.display.blocks import text_of
try:
    manifest = ckptmove.inspect(sys.argv[1])
    manifest.to_json()
    for show in (summary, tree, tensors):
        assert all("\\n" not in line for line in text_of(show(manifest)))
    del manifest
    for n, values in enumerate((False, True)):
        out = f"{sys.argv[1]}.{n}"
        ckptmove.relocate(sys.argv[1], out, to="cuda:0", all=True, values=values)
except ckptmove.CkptmoveError as error:
    print(error.exit_code)
else:
    print(0)
"""


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Inside, only so much address space can be allocated in addition (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def do_everything(source: Path, *, seconds: int, nbytes: int) -> int:
    """Run every verb on a file in its own process; 0, or the exit code of the refusal.

    Outputs lie beside the source. The process has `seconds` of processor time and `nbytes` of
    memory.
    """

    def limit() -> None:
        room = nbytes + _STACKS
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _EVERYTHING, os.fspath(source)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        preexec_fn=limit,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    code: int = json.loads(done.stdout)
    return code
