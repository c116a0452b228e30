"""Report progress and errors from a worker process to the process that started it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable


class ProgressReporter:
    """Reports progress, at most once per interval."""

    def __init__(self, tell: Callable[[int], object], seconds: float) -> None:
        """Args:
        tell: called with the bytes that were done since it was called before.
        seconds: at least as long apart.
        """
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
    """The same error, or one that says the same where it can't be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
