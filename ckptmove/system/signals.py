"""Signals, and processes of our own, also where the system has few signals."""

from __future__ import annotations

import _thread
import os
import signal
from collections.abc import Callable
from typing import Any

from . import WINDOWS

#: What may end a process from outside: Ctrl-C, a supervisor, a terminal that is gone.
ENDING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)
KILL = 9  # SIGKILL, which Windows lacks: subprocess has its negative as the exit code
PIPE = 13  # SIGPIPE
#: Whether a call can be broken off after a time.
HAS_TIMER: bool = hasattr(signal, "setitimer") and hasattr(signal, "SIGALRM")


def end_by(number: int) -> int:
    """End this process as the signal would have; gives the exit code where it can't."""
    if not WINDOWS:  # there, any signal ends a process as if that was its exit code
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return 128 + number


def ask_to_end() -> None:
    """Have this process handle SIGTERM, from whatever thread."""
    if WINDOWS:  # where a signal that is sent ends the process at once
        _thread.interrupt_main(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def own_group() -> dict[str, Any]:
    """Arguments of `subprocess.Popen`, for a process that Ctrl-C in a terminal does not reach."""
    if WINDOWS:
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP of subprocess
    return {"start_new_session": True}


def timer(seconds: float, again: float, fire: Callable[..., object]) -> Callable[[], None]:
    """Have the main thread call `fire` after so many seconds, and again; gives what stops that."""
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
