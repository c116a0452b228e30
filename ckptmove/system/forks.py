"""Forks of this process, with the interface of `subprocess.Popen`; only on Linux.

A new Python imports everything again, which takes longer than many calls. A fork has it already.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from .signals import ENDING, KILL

_unix: Any = os  # not all of it is on every system
_signal: Any = signal
_FAILED = 70  # the exit code of a fork whose function returned or raised
_parents_streams = list[object]()  # stdout and stderr of the parent: they must not be flushed twice


def can_fork() -> bool:
    """Whether a fork of this process works: no other thread may hold a lock of torch or CUDA."""
    try:
        return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


class Fork:
    """A fork in its own session, with a pipe to its stdin and a pipe from its stdout."""

    def __init__(self, serve: Callable[[], object]) -> None:
        """Fork; the child calls a function that ends it. Raises OSError if the fork fails."""
        self.returncode: int | None = None  #: as in `subprocess`, set after waiting for the fork
        self._lock = threading.Lock()
        with contextlib.ExitStack() as opened:
            child_stdin, to_child = _open_pipe(opened)
            from_child, child_stdout = _open_pipe(opened)
            before = _signal.pthread_sigmask(_signal.SIG_BLOCK, ENDING)
            try:
                self.pid = _unix.fork()
                if not self.pid:
                    _begin(serve, child_stdin, child_stdout)
            finally:
                _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
            opened.pop_all()
        os.close(child_stdin)
        os.close(child_stdout)
        self.stdin, self.stdout = os.fdopen(to_child, "wb"), os.fdopen(from_child, "rb")

    def wait(self) -> int:
        """Wait for the fork to end; return its exit code."""
        with contextlib.suppress(ChildProcessError):
            _unix.waitid(_unix.P_PID, self.pid, _unix.WEXITED | _unix.WNOWAIT)
        with self._lock:  # no signal may go to a later process with the same number
            if self.returncode is None:
                try:
                    self.returncode = _unix.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # SIGCHLD is ignored: the exit code is unknown
                    self.returncode = 0
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, if it has not been waited for."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it has not been waited for."""
        self._send(KILL)

    def _send(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)


def _open_pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    """Return the read end and the write end of a new pipe; `opened` closes them."""
    ends = os.pipe()
    for each in ends:
        opened.callback(os.close, each)
    return ends


def _begin(serve: Callable[[], object], child_stdin: int, child_stdout: int) -> NoReturn:
    """In the fork: close everything that is open, and call the function."""
    try:
        _unix.setsid()
        os.dup2(child_stdin, 0)
        os.dup2(child_stdout, 1)
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):  # objects may still close these numbers
            if int(name) > 2:
                os.dup2(nothing, int(name))
        _parents_streams.extend((sys.stdin, sys.stdout))
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 it is open until the process ends
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        gc.freeze()
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, ENDING)
        serve()
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        os._exit(_FAILED)
