"""Real faults at a chosen system call, by strace: a signal, or an error instead of the call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.servers.warm_python import WarmCommand


def _can_trace() -> bool:
    """Whether strace is installed and permitted."""
    if shutil.which("strace") is None:
        return False
    done = subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], capture_output=True)
    return done.returncode == 0


needs_strace = pytest.mark.skipif(not _can_trace(), reason="needs strace, and leave to trace")

# Whatever can change a file system, and `close`, after which errors may still come.
WRITING = (
    *("openat", "ftruncate", "copy_file_range", "pwrite64", "fsync", "fdatasync", "ioctl"),
    *("linkat", "renameat", "renameat2", "rename", "unlinkat", "unlink", "fchmod", "close"),
)
READING = ("pread64", "lseek", "sync_file_range")
LOCKING = ("flock", "fcntl")  # and what else a change in place does besides
_STARTED = re.compile(r"^(\d+) +(\w+)\((.*)")
#: Waits until strace is there, then runs the module that the arguments name.
_WHEN_TRACED = """
import ctypes, os, runpy, sys
ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER: anybody
nowhere = os.open(os.devnull, os.O_RDWR)
os.write(1, b".")
os.dup2(nowhere, 1)
os.read(0, 1)
os.dup2(nowhere, 0)
os.close(nowhere)
runpy._run_module_as_main(sys.argv.pop(1))
"""


class Call(NamedTuple):
    """One system call of a run: the `ordinal`-th of its name, in the main thread."""

    name: str
    ordinal: int
    text: str

    def __str__(self) -> str:
        return f"{self.name} {self.ordinal}"


class Ended(NamedTuple):
    """The end of a run; a signal is a negative code, as in `subprocess`."""

    code: int
    said: str


def command(*arguments: str | os.PathLike[str]) -> list[str]:
    """`ckptmove ARGUMENTS`, in a process that starts the same way each time."""
    return [sys.executable, "-B", "-m", "ckptmove", *[os.fspath(each) for each in arguments]]


@contextmanager
def start(
    ckptmove: list[str],
    *inject: str,
    log: Path | None = None,
    names: tuple[str, ...] = WRITING + READING,
    cold: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """A command under strace; it is killed at the end of the block.

    `inject` is `SYSCALL:WHAT:when=N`, as strace has it. If nothing is injected, the calls in
    `names` are written to `log`. The command is a fork of a process that has imported it, or a new
    Python if `cold`; strace joins it before it begins.
    """
    names = tuple(each.partition(":")[0] for each in inject) or names
    options = ["-e", f"trace={','.join(names)}", "-o", os.fspath(log or os.devnull)]
    for each in inject:
        options += ["-e", f"inject={each}"]
    assert ckptmove[1:3] == ["-B", "-m"]
    with (subprocess.Popen if cold else WarmCommand)(
        [*ckptmove[:2], "-c", _WHEN_TRACED, *ckptmove[3:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "."
        with subprocess.Popen(
            ["strace", "-f", "--quiet=exit", *options, "-p", str(process.pid)],
            stderr=subprocess.PIPE,
            text=True,
        ) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            assert said.endswith(" attached\n"), said
            assert process.stdin is not None
            process.stdin.write(".")
            process.stdin.flush()
            try:
                yield process
            finally:
                process.kill()
                strace.communicate()


def run(
    ckptmove: list[str],
    inject: str | None = None,
    log: Path | None = None,
    names: tuple[str, ...] = WRITING + READING,
    cold: bool = False,
) -> Ended:
    """Run a command under strace; the arguments are those of `start`."""
    faults = [] if inject is None else [inject]
    with start(ckptmove, *faults, log=log, names=names, cold=cold) as process:
        said = process.communicate(timeout=120)[1]
    return Ended(process.returncode, said)


def wait_for_stop(process: subprocess.Popen[str], log: Path) -> int:
    """Wait until a command stops at `SYSCALL:signal=STOP:when=N`; gives its process id."""
    line = ""
    while "stopped by SIGSTOP" not in line:
        assert process.poll() is None
        found = log.read_text(errors="replace").splitlines() if log.exists() else []
        line = next((each for each in found if "stopped by SIGSTOP" in each), "")
    return int(line.split()[0])


def calls_of(
    ckptmove: list[str], source: Path, log: Path, names: tuple[str, ...] = WRITING + READING
) -> list[Call]:
    """The calls with these names that a run makes from opening the source on."""
    assert run(ckptmove, log=log, names=names) == (0, "")
    counts, calls = dict.fromkeys(names, 0), list[Call]()
    main = None
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        found = _STARTED.match(line)
        if found is None:
            continue
        process, name, text = found.groups()
        main = main or process
        if process == main and name in counts:
            counts[name] += 1
            if calls or (name == "openat" and f'"{source}"' in text):
                calls.append(Call(name, counts[name], text))
    return calls


def few(calls: list[Call], most: int = 3) -> list[Call]:
    """The first calls of each name, and the last."""
    chosen = []
    for call in calls:
        same = [each for each in calls if each.name == call.name]
        if call in (*same[: most - 1], same[-1]):
            chosen.append(call)
    return chosen
