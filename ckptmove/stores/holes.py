"""A file without a name, in which parts of an object lie where they do there; the rest is holes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from ..errors import InputError


class Holed:
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
        for since, until in self._there:
            if until <= at:
                continue
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
        apart = [each for each in self._there if each[1] < start or each[0] > at]
        touching = [(start, at), *(each for each in self._there if each not in apart)]
        whole = min(low for low, _ in touching), max(high for _, high in touching)
        self._there = sorted([*apart, whole])

    def close(self) -> None:
        """Let go of it."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
