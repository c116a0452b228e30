"""A sparse temporary copy of an object: only the parts that are needed, at their offsets."""

from __future__ import annotations

import contextlib
import os
import tempfile
from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Any

from ..errors import InputError

_START, _END = itemgetter(0), itemgetter(1)


class SparseCopy:
    """Such a file.

    Attributes:
        fd: its descriptor.
    """

    def __init__(self, nbytes: int, path: str) -> None:
        """Raises InputError, which names `path`, if it can't be made."""
        try:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
            os.truncate(self.fd, nbytes)
        except OSError as error:
            raise InputError(f"can't be copied here: {error.strerror}", path=path) from error
        self._path = path
        self._there: list[tuple[int, int]] = []  # in order, no two touch

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that are not there yet."""
        gaps, at = list[tuple[int, int]](), start
        for n in range(bisect_right(self._there, start, key=_END), len(self._there)):
            since, until = self._there[n]
            if since >= end:
                break
            if since > at:
                gaps.append((at, since))
            at = until
        if at < end:
            gaps.append((at, end))
        return gaps

    def put(self, at: int, data: bytes) -> None:
        """Take what was fetched.

        Raises:
            InputError: there is no room for it.
        """
        view: Any = memoryview(data)
        start = at
        try:
            while view:
                done = os.pwrite(self.fd, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise InputError(f"can't be copied here: {error.strerror}", path=self._path) from error
        first = bisect_left(self._there, start, key=_END)  # of those that it touches
        after = bisect_right(self._there, at, key=_START)
        if first < after:
            start, at = min(start, self._there[first][0]), max(at, self._there[after - 1][1])
        self._there[first:after] = [(start, at)]

    def close(self) -> None:
        """Let go of it."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
