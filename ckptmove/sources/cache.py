"""A small cache of fetched bytes, shared by all remote objects."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort

_MOST = 64 << 20  # bytes


class Spans:
    """Parts of one object that were fetched."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._held: dict[int, bytes] = {}

    def find(self, start: int, nbytes: int) -> bytes | None:
        """The bytes of a range, if one span has them all."""
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
        """Keep a span; gives it back. The oldest go, whosever they are."""
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
        """Keep nothing."""
        with _KEPT.guard:
            for start in self._starts[::-1]:
                self._drop(start)

    def _drop(self, start: int) -> None:
        _KEPT.nbytes -= len(self._held.pop(start))
        del _KEPT.order[self, start]
        del self._starts[bisect_left(self._starts, start)]


class _Kept:
    """The spans of all objects, the oldest first."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.order: dict[tuple[Spans, int], None] = {}
        self.nbytes = 0


_KEPT = _Kept()
