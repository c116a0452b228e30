"""Objects in stores, read by ranges: only what is wanted is fetched, and counted."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..errors import CorruptError, InputError, StrPath, UnsupportedError
from ..source import Source, check_range
from .filesystem import asked, info_of, place_of, stamp_of
from .urls import is_url

_LEAST = 1 << 15  # bytes fetched at once: an answer takes longer than they do
_MOST = 8 << 20  # … and at most
_APART = 1 << 14  # ranges that are no farther apart are fetched as one
_AT_ONCE = 8  # requests
_KEPT = 64 << 20  # bytes that were fetched and may be wanted again


class Object(Source):
    """An object in a store, whose size and stamp were taken once.

    Attributes:
        place: where it lies.
        requests, fetched_nbytes: what was fetched of it so far.
    """

    __slots__ = (
        "_copy",
        "_end",
        "_guard",
        "_pool",
        "_spans",
        "_stamp",
        "_step",
        "fetched_nbytes",
        "place",
        "requests",
    )

    def __init__(self, url: str) -> None:
        """Raises InputError if there is no such object, or it can't be read by ranges."""
        self.path = url
        self.place = place_of(url)
        about = info_of(self.place)
        if about.get("type") == "directory":
            raise UnsupportedError(
                "is a folder: only single files can be read",
                path=url,
                hint="name one file inside it",
            )
        size = about.get("size")
        if type(size) is not int or size < 0:
            raise UnsupportedError("its size is not known: it can't be read by ranges", path=url)
        self.nbytes = size
        self._stamp = stamp_of(about)
        self.requests = self.fetched_nbytes = 0
        self._spans = _Spans()
        self._end, self._step = 0, _LEAST  # where the last read ended; what to fetch if it goes on
        self._guard = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._copy: _Copy | None = None

    def close(self) -> None:
        """As `Source.close`."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._copy is not None:
            self._copy.close()

    # -- reading -------------------------------------------------------------------------------

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Source.read`. What is read in a row is fetched in larger and larger pieces."""
        check_range(self, start, nbytes)
        if nbytes >= _MOST:
            return b"".join(data for _, data in self.chunks(start, nbytes))
        with self._guard:
            found = self._spans.find(start, nbytes)
            if found is None:
                self._step = min(_MOST, 2 * self._step) if start == self._end else _LEAST
                wanted = min(max(nbytes, self._step), self.nbytes - start)
                found = self._spans.add(start, self._fetch(start, wanted))[:nbytes]
            self._end = start + nbytes
            return found

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        """As `Source.read_into`."""
        view = memoryview(buffer).cast("B")
        at = 0
        while at < len(view):
            step = min(_MOST // 2, len(view) - at)
            view[at : at + step] = self.read(start + at, step)
            at += step

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`: what lies side by side in one request, several at a time."""
        wanted = [
            (max(0, start), min(self.nbytes, start + nbytes))
            for start, nbytes in ranges
            if start < self.nbytes and self._spans.find(start, nbytes) is None
        ]
        runs = list[list[int]]()
        total = 0
        for start, end in sorted(wanted):
            if runs and start - runs[-1][1] <= _APART and end - runs[-1][0] <= _MOST:
                total += max(0, end - runs[-1][1])
                runs[-1][1] = max(runs[-1][1], end)
            else:
                total += end - start
                runs.append([start, end])
            if total > _KEPT // 2:  # the rest is fetched when it is read
                break
        if len(runs) < 2:
            return
        pool = self._threads()
        fetched = [pool.submit(self._fetch, start, end - start) for start, end in runs]
        for (start, _), future in zip(runs, fetched, strict=True):
            data = future.result()
            with self._guard:
                self._spans.add(start, data)

    def chunks(self, start: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of a range piece by piece, with their offsets; some are fetched ahead."""
        check_range(self, start, nbytes)
        pool, end = self._threads(), start + nbytes
        coming = deque[tuple[int, Future[bytes]]]()
        at = start
        try:
            while at < end or coming:
                while at < end and len(coming) < _AT_ONCE:
                    step = min(_MOST, end - at)
                    coming.append((at, pool.submit(self._fetch, at, step)))
                    at += step
                where, future = coming.popleft()
                yield where, future.result()
        finally:
            for _, future in coming:
                future.cancel()

    def _fetch(self, start: int, nbytes: int) -> bytes:
        """Ask the store for a range."""
        fs, path = self.place.fs, self.place.path
        if not nbytes:
            return b""
        data: bytes = asked(
            lambda: _whole(fs.cat_file(path, start=start, end=start + nbytes), nbytes), self.path
        )
        if len(data) > nbytes:
            raise UnsupportedError("its server can't send parts of it", path=self.path)
        self.requests += 1
        self.fetched_nbytes += len(data)
        return data

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, "ckptmove-fetch")
        return self._pool

    # -- the rest of what a source is ----------------------------------------------------------

    def check_unchanged(self) -> None:
        """As `Source.check_unchanged`, by what the store says of it now."""
        try:
            now = stamp_of(info_of(self.place))
        except InputError as error:
            raise CorruptError(f"can't be found any more: {error}", path=self.path) from error
        if now != self._stamp:
            raise CorruptError("the object was changed while it was read", path=self.path)

    def same_file(self, path: StrPath) -> bool:
        """As `Source.same_file`, by where its URL leads."""
        if not is_url(path):
            return False
        other = place_of(os.fspath(path))
        return bool(other.fs == self.place.fs and other.path == self.place.path)

    def mappable(self, start: int, nbytes: int) -> int:
        """As `Source.mappable`: a copy that takes room for no more than what was asked for."""
        check_range(self, start, nbytes)
        with self._guard:
            if self._copy is None:
                self._copy = _Copy(self.nbytes, self.path)
            copy = self._copy
        low = start // _MOST * _MOST
        high = min(self.nbytes, -(-(start + nbytes) // _MOST) * _MOST)
        for at, end in copy.missing(low, high):
            for where, data in self.chunks(at, end - at):
                copy.put(where, data)
        return copy.fd


def _whole(data: bytes, nbytes: int) -> bytes:
    """An answer, unless it was cut off, which is worth another try."""
    if len(data) < nbytes:
        raise ConnectionError(f"{len(data):,} bytes came of {nbytes:,}")
    return data


class _Spans:
    """Parts of an object that were fetched; the oldest go when there are too many."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._held: dict[int, bytes] = {}
        self._nbytes = 0

    def find(self, start: int, nbytes: int) -> bytes | None:
        """The bytes of a range, if one span has them all."""
        n = bisect_right(self._starts, start) - 1
        if n < 0:
            return None
        at = self._starts[n]
        held = self._held[at]
        if start + nbytes > at + len(held):
            return None
        return held[start - at : start - at + nbytes]

    def add(self, start: int, data: bytes) -> bytes:
        """Keep a span; gives it back."""
        known = self._held.pop(start, None)
        if known is None:
            insort(self._starts, start)
        else:
            self._nbytes -= len(known)
        self._held[start] = data
        self._nbytes += len(data)
        while self._nbytes > _KEPT and len(self._held) > 1:
            oldest = next(iter(self._held))
            self._nbytes -= len(self._held.pop(oldest))
            self._starts.remove(oldest)
        return data


class _Copy:
    """A file without a name, with holes for what was not fetched."""

    def __init__(self, nbytes: int, path: str) -> None:
        try:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
            os.truncate(self.fd, nbytes)
        except OSError as error:
            raise InputError(f"can't be copied here: {error.strerror}", path=path) from error
        self._path = path
        self._there: list[tuple[int, int]] = []  # in order, no two touch

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that are not there yet; they count as there from now on."""
        gaps, kept, at = list[tuple[int, int]](), list[tuple[int, int]](), start
        low, high = start, end
        for since, until in self._there:
            if until < start or since > end:
                kept.append((since, until))
                continue
            if since > at:
                gaps.append((at, since))
            at = max(at, until)
            low, high = min(low, since), max(high, until)
        if at < end:
            gaps.append((at, end))
        kept.append((low, high))
        self._there = sorted(kept)
        return gaps

    def put(self, at: int, data: bytes) -> None:
        """Take what was fetched."""
        view: Any = memoryview(data)
        try:
            while view:
                done = os.pwrite(self.fd, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise InputError(f"can't be copied here: {error.strerror}", path=self._path) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
