"""Limit the time of an item."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import FrameType

from ...system.signals import timer
from ...writing.final_name import before_commit

_AGAIN = 10.0  # seconds


class TimedOut(BaseException):
    """Raised inside an item that takes too long, to unwind everything."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimedOut in the block after this time; it can only limit the main thread.

    Other code may swallow it: a finalizer, or an import that catches errors. So it is raised again
    after a while, before a commit, and at the end of the block. A commit is not interrupted,
    because the output would then exist but be reported as failed.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    fired, committed = list[int](), threading.Event()

    def fire(number: int, frame: FrameType | None) -> None:
        if not committed.is_set():
            fired.append(number)
            raise TimedOut

    def commit() -> None:
        if fired:
            raise TimedOut
        committed.set()

    stop = timer(seconds, _AGAIN, fire)
    try:
        with before_commit(commit):
            yield
        if fired:
            raise TimedOut
    except Exception as error:  # Python replaces errors raised while a class is made
        if fired:
            raise TimedOut from error
        raise
    finally:
        stop()
