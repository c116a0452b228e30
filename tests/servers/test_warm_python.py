"""A fork of a Python that has imported something ends and says what a new Python does."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers.warm_python import WarmCommand, WarmPopen

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.path[0], __name__)",
    "environment": "import os; print(os.environ['MINE'], os.getcwd())",
    "input": "print(input() * 2)",
    "exit code": "import sys; sys.exit(3)",
    "last words": "import sys; sys.exit('no more')",
    "exception": "import json; json.loads('{')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "broken pipe": "import os, signal; signal.raise_signal(signal.SIGTERM)",
    "interrupted": "import signal; signal.raise_signal(signal.SIGINT)",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "thread": "import threading; threading.Timer(0.1, print, ('late',)).start(); print('early')",
    "session": "import os; print(os.getsid(0) == os.getpid())",
}


def said(start: type[subprocess.Popen[Any]], program: str, folder: Path) -> tuple[int, str, str]:
    with start(
        [sys.executable, "-c", program, "a", "--b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "MINE": "é"},
        start_new_session=True,
    ) as process:
        out, err = process.communicate("typed\n")
    return process.returncode, out, err.splitlines()[-1] if err else ""


@pytest.mark.sample(8)
@pytest.mark.parametrize("start", [WarmPopen, WarmCommand])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_as_a_new_python_does(
    name: str, start: type[subprocess.Popen[Any]], tmp_path: Path
) -> None:
    assert said(start, PROGRAMS[name], tmp_path) == said(subprocess.Popen, PROGRAMS[name], tmp_path)


def test_it_is_our_child_and_has_what_it_is_for(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getppid(), *({'torch', 'ckptmove'} & sys.modules.keys()))"
    assert said(WarmPopen, program, tmp_path)[1].split() == [str(os.getpid()), "torch"]
    assert said(WarmCommand, program, tmp_path)[1].split() == [str(os.getpid()), "ckptmove"]


@pytest.mark.parametrize("start", [WarmPopen, WarmCommand])
def test_limits_and_mask_are_those_of_who_asks(
    start: type[subprocess.Popen[Any]], tmp_path: Path
) -> None:
    program = (
        "import os, resource; print(resource.getrlimit(resource.RLIMIT_FSIZE), os.umask(0o22), "
        "resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert said(start, program, tmp_path) == said(subprocess.Popen, program, tmp_path)
    limits, mask = resource.getrlimit(resource.RLIMIT_FSIZE), os.umask(0o27)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert said(start, program, tmp_path) == said(subprocess.Popen, program, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.umask(mask)
    assert said(start, program, tmp_path) == said(subprocess.Popen, program, tmp_path)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LC_ALL"])
def test_what_is_read_when_python_starts_takes_a_new_one(name: str) -> None:
    program = "import sys; print('ckptmove' in sys.modules)"
    env = {**os.environ, name: "3"}
    with WarmCommand([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE) as process:
        assert process.communicate()[0] == b"False\n"
