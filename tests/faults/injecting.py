"""Real faults at a chosen system call, by strace: a signal, or an error instead of the call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT


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


def start(
    ckptmove: list[str],
    *inject: str,
    log: Path | None = None,
    names: tuple[str, ...] = WRITING + READING,
) -> subprocess.Popen[str]:
    """Start a command under strace.

    `inject` is `SYSCALL:WHAT:when=N`, as strace has it. If nothing is injected, the calls in
    `names` are written to `log`.
    """
    names = tuple(each.partition(":")[0] for each in inject) or names
    options = ["-e", f"trace={','.join(names)}", "-o", os.fspath(log or os.devnull)]
    for each in inject:
        options += ["-e", f"inject={each}"]
    return subprocess.Popen(
        ["strace", "-f", "-qq", *options, *ckptmove],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), "PYTHONHASHSEED": "0"},
    )


def run(
    ckptmove: list[str],
    inject: str | None = None,
    log: Path | None = None,
    names: tuple[str, ...] = WRITING + READING,
) -> Ended:
    """Run a command under strace; the arguments are those of `start`."""
    with start(ckptmove, *([] if inject is None else [inject]), log=log, names=names) as process:
        try:
            said = process.communicate(timeout=120)[1]
        finally:
            process.kill()
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
