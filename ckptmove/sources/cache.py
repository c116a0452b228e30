"""Keep fetched bytes of objects: in a small common cache, and in sparse files."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from bisect import bisect_left, bisect_right, insort
from operator import itemgetter
from typing import Any

from ..errors import InputError
from ..system.files import write_some

_MOST = 16 << 20  # bytes
_START, _END = itemgetter(0), itemgetter(1)


class Spans:
    """Parts of one object that were fetched."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._held: dict[int, bytes] = {}

    def find(self, start: int, nbytes: int) -> bytes | None:
        """Return the bytes of a range, if one span has them all."""
        with _KEPT.guard:
            n = bisect_right(self._starts, start) - 1
            if n < 0:
                return None
            at = self._starts[n]
            held = self._held[at]
            if start + nbytes > at + len(held):
                return None
            return held[start - at : start - at + nbytes]

    def add(self, start: int, data: bytes) -> bytes:
        """Keep a span and return it; the oldest spans of any object are dropped."""
        with _KEPT.guard:
            if start in self._held:
                self._drop(start)
            insort(self._starts, start)
            self._held[start] = data
            _KEPT.order[self, start] = None
            _KEPT.nbytes += len(data)
            while _KEPT.nbytes > _MOST and len(_KEPT.order) > 1:
                spans, oldest = next(iter(_KEPT.order))
                spans._drop(oldest)
        return data

    def clear(self) -> None:
        """Drop all spans of this object."""
        with _KEPT.guard:
            for start in self._starts[::-1]:
                self._drop(start)

    def _drop(self, start: int) -> None:
        _KEPT.nbytes -= len(self._held.pop(start))
        del _KEPT.order[self, start]
        del self._starts[bisect_left(self._starts, start)]


class _SpanOrder:
    """The spans of all objects, the oldest first."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.order: dict[tuple[Spans, int], None] = {}
        self.nbytes = 0


_KEPT = _SpanOrder()


class SparseCopy:
    """A sparse temporary copy of an object: only the parts that are needed, at their offsets."""

    def __init__(self, nbytes: int, path: str) -> None:
        """Raises InputError, which names `path`, if it can't be made."""
        try:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
            os.truncate(self.fd, nbytes)
        except OSError as error:
            raise InputError(f"can't be copied here: {error.strerror}", path=path) from error
        self._path = path
        self._there: list[tuple[int, int]] = []  # in order; no two are adjacent

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are not there yet."""
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
        """Write a part that was fetched. Raises InputError if the disk is full."""
        view: Any = memoryview(data)
        start = at
        try:
            while view:
                done = write_some(self.fd, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise InputError(f"can't be copied here: {error.strerror}", path=self._path) from error
        first = bisect_left(self._there, start, key=_END)  # of the adjacent ranges
        after = bisect_right(self._there, at, key=_START)
        if first < after:
            start, at = min(start, self._there[first][0]), max(at, self._there[after - 1][1])
        self._there[first:after] = [(start, at)]

    def close(self) -> None:
        """Close and remove the copy."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
