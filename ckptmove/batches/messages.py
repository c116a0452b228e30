"""Messages from a process that does items: progress, and errors."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextvars import ContextVar

#: Called with the number of bytes of an item done since the last call.
LISTENER: ContextVar[Callable[[int], object] | None] = ContextVar("LISTENER", default=None)


class ProgressReporter:
    """Reports progress, at most once per interval."""

    def __init__(self, tell: Callable[[int], object], seconds: float) -> None:
        """Call `tell` with the bytes done since its last call, at most once per interval."""
        self._tell = tell
        self._seconds = seconds
        self._nbytes = 0
        self._next = time.monotonic() + seconds

    def __call__(self, nbytes: int) -> None:
        """Add bytes that are done."""
        self._nbytes += nbytes
        if time.monotonic() >= self._next:
            self._tell(self._nbytes)
            self._nbytes = 0
            self._next = time.monotonic() + self._seconds


def as_picklable(error: Exception) -> Exception:
    """Return the error, or one with the same message if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
