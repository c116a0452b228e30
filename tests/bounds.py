"""Bounds on what a piece of code may use: processor time, memory."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Inside, only so much address space can be asked for on top of what there is (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Fail where the code inside uses more processor time, however busy the machine is."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"still at it after {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
