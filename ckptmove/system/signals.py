"""Signals, and processes of our own, also where the system has few signals."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from . import WINDOWS

#: Signals that end a process from outside: Ctrl-C, a supervisor, a closed terminal.
ENDING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)
#: Signals that end a process whose code in C goes wrong.
CRASHES: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV")
    if hasattr(signal, name)
)
KILL = 9  # SIGKILL, which Windows lacks; subprocess returns the negative as exit code
PIPE = 13  # SIGPIPE
#: Whether a call can be interrupted after a time.
HAS_TIMER: bool = hasattr(signal, "setitimer") and hasattr(signal, "SIGALRM")


class SignalReceived(BaseException):
    """A signal asked the process to end, or the reader of stdout has closed it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def end_by(number: int) -> int:
    """End this process as the signal would have; return the exit code if it can't."""
    if not WINDOWS:  # there, a signal ends a process with the signal's number as its exit code
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return 128 + number


def ask_to_end() -> None:
    """Make this process handle SIGTERM; callable from any thread."""
    if WINDOWS:  # there, a sent signal ends the process at once
        _thread.interrupt_main(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def own_group() -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` for a process that Ctrl-C does not reach."""
    if WINDOWS:
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP of subprocess
    return {"start_new_session": True}


def timer(seconds: float, again: float, fire: Callable[..., object]) -> Callable[[], None]:
    """Call `fire` in the main thread after `seconds`, then every `again`; return its stop."""
    alarm: Any = signal  # not all of it is on every system
    before = signal.signal(alarm.SIGALRM, fire)
    alarm.setitimer(alarm.ITIMER_REAL, seconds, again)

    def stop() -> None:
        alarm.setitimer(alarm.ITIMER_REAL, 0)
        signal.signal(alarm.SIGALRM, before)

    return stop


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def exits_raised() -> Iterator[None]:
    """A context in which `os._exit` in this process raises SystemExit, like `sys.exit`."""
    before, own = os._exit, os.getpid()

    def leave(status: Any = 0) -> NoReturn:
        if os.getpid() != own:  # a fork, which has nothing to report
            before(status)
        raise SystemExit(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = before
