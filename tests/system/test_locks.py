"""Locks of files."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import pytest

from ckptmove.system import locks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what it takes")


def test_a_handler_of_a_signal_may_fork_and_look(tmp_path: Path) -> None:
    """It runs while its own thread looks whether a file is locked."""
    done = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal done
        locks.is_locked(other)
        child = os.fork()
        if not child:
            os._exit(int(locks.is_locked(other)))
        done += os.waitpid(child, 0)[1] == 0
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    (tmp_path / "file").touch()
    (tmp_path / "other").touch()
    fd, other = (os.open(tmp_path / name, os.O_RDWR) for name in ("file", "other"))
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while done < 20:
            assert not locks.is_locked(fd)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(fd)
        os.close(other)
