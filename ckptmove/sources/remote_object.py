"""An object in a store, read by ranges; counts what is fetched."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial

from ..errors import CorruptError, InputError, StrPath, UnsupportedError
from .cache import Spans, SparseCopy
from .fetch_pool import FetchPool, result_of
from .filesystem import Missing, info_of, is_s3, open_store, stamp_of, with_retries
from .known_objects import known_about, known_objects
from .passing_digests import wanted_digests
from .range_request import CHANGED, fetch_range
from .source import FetchStats, Source, check_range

_LEAST = 1 << 15  # bytes fetched at once: an answer takes longer than they do
_MOST = 2 << 20  # … and at most
_STREAMED = 1 << 20  # bytes of each request for a long range; `_AT_ONCE` of them are in memory
_LARGE = 1 << 20  # bytes that are read once: they are not kept for another time
_APART = 1 << 17  # ranges that are no farther apart are fetched as one
_AT_ONCE = 8  # requests
_EXPECTED = 12 << 20  # bytes that are fetched before they are read
_WHOLE = 1 << 18  # an object of so many bytes is fetched whole, by one request


class RemoteObject(Source):
    """An object in a store, whose size and stamp were taken once."""

    def __init__(self, url: str) -> None:
        """Raises InputError if there is no such object, or it can't be read by ranges."""
        self.path = url
        self.place = open_store(url)  #: where it lies
        known, about = known_objects(), known_about(url)
        if not about:
            about = info_of(self.place)
            if known is not None:  # each answer shows whether it is still this version
                known.put(url, about)
        if about.get("type") == "directory":
            raise UnsupportedError(
                "is a folder; a single file is needed", path=url, hint="give one file in it"
            )
        size = about.get("size")
        if type(size) is not int or size < 0:
            raise UnsupportedError("its size is not known, so parts of it can't be read", path=url)
        self.nbytes = size
        self._stamp = stamp_of(about)
        self.etag = str(about.get("ETag") or "")  #: what its store knows this version by, if told
        self._fetched = FetchStats(0, 0)
        most = _WHOLE if known is None else max(_WHOLE, known.whole_nbytes)
        self._is_small = size <= most  # so that it is fetched whole
        self._coming = None if known is None else known.coming.pop(url, None)
        self._spans = Spans()
        self._end, self._step = -1, _LEAST  # where the last read ended; what to fetch if it goes on
        self._expected = range(0)  # where reads are known to go on
        self._ahead = deque[tuple[int, Future[bytes]]]()  # what is on its way, in a row
        self._guard, self._tally = threading.RLock(), threading.Lock()
        self._stopped = threading.Event()
        digests = wanted_digests()
        self._digest = None if digests is None else digests.reading(url)
        self._fetchers: FetchPool[bytes] | None = None
        self._copy: SparseCopy | None = None

    def close(self) -> None:
        """As `Source.close`. It waits for no answer that is still on its way."""
        self._stopped.set()
        if self._fetchers is not None:
            self._fetchers.close()
        if self._copy is not None:
            self._copy.close()
        self._spans.clear()

    # -- reading -------------------------------------------------------------------------------

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Source.read`. What is read in a row is fetched in larger and larger pieces."""
        check_range(self, start, nbytes)
        if nbytes >= _MOST and not self._is_small:
            return b"".join(data for _, data in self.chunks(start, nbytes))
        if self._is_small:
            return self._whole()[start : start + nbytes]
        with self._guard:
            found = self._spans.find(start, nbytes)
            if found is None:
                self._step = min(_MOST, 2 * self._step) if start == self._end else _LEAST
                wanted = min(max(nbytes, self._step), self.nbytes - start)
                found = self._next(start, wanted, nbytes)
                if len(found) > nbytes or nbytes < _LARGE:
                    found = self._spans.add(start, found)[:nbytes]
            self._end = start + nbytes
            return found

    def _whole(self) -> bytes:
        """All of a small object."""
        with self._guard:
            found = self._spans.find(0, self.nbytes)
            if found is None:
                coming, self._coming = self._coming, None
                if coming is None:
                    data = self._fetch(0, self.nbytes)
                    self._keep(data)
                else:
                    data, self._fetched = coming.result(), FetchStats(self.nbytes, 1)
                found = self._spans.add(0, data)
                if self._digest is not None:
                    self._digest.add(0, found)
            return found

    def _keep(self, data: bytes) -> None:
        """Keep what came by one answer with its ETag, so of one version, for who reads it next."""
        known = known_objects()
        if known is not None and self.nbytes <= _WHOLE and self.etag and is_s3(self.place.fs):
            known.kept.put(self.path, self._stamp, data)

    def fetch_ahead(self) -> Future[bytes] | None:
        """Begin to fetch a small object, for another one of the same URL; None if it is large."""
        if not self._is_small or not self.nbytes:
            return None
        future: Future[bytes] = Future()
        known = known_objects()
        kept = None if known is None else known.kept.take(self.path, self._stamp)
        if kept is not None:
            future.set_result(kept)
            return future

        def run() -> None:
            try:
                future.set_result(self._fetch(0, self.nbytes))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="ckptmove-fetch", daemon=True).start()
        return future

    def _next(self, start: int, wanted: int, nbytes: int) -> bytes:
        """A piece from an offset on, of `nbytes` at least; those after it are on their way then."""
        if not self._ahead or self._ahead[0][0] != start:
            for _, future in self._ahead:
                future.cancel()
            self._ahead.clear()
        at = self._ahead[-1][0] + _MOST if self._ahead else start
        if start in self._expected:
            while at < self._expected.stop and len(self._ahead) < _AT_ONCE // 2:
                step = min(_MOST, self._expected.stop - at)
                self._ahead.append((at, self._submit(at, step)))
                at += step
        if self._ahead:
            first = self._ahead.popleft()[1]
            data = result_of(first, [future for _, future in self._ahead])
            if len(data) >= nbytes:
                return data
        return self._fetch(start, wanted)

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        check_range(self, start, len(view))
        is_kept = self._is_small or self._spans.find(start, min(len(view), _LARGE)) is not None
        if len(view) >= _STREAMED and start not in self._expected and not is_kept:
            for at, data in self._stream(start, start + len(view), _STREAMED // 2):
                view[at - start : at - start + len(data)] = data
            return
        for at in range(0, len(view), _LARGE):
            size = min(_LARGE, len(view) - at)
            view[at : at + size] = self.read(start + at, size)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`: what lies side by side in one request, several at a time."""
        if self._is_small:
            return
        wanted = [
            (max(0, start), min(self.nbytes, start + nbytes))
            for start, nbytes in ranges
            if start < self.nbytes and self._spans.find(start, nbytes) is None
        ]
        if len(wanted) == 1 and wanted[0][1] - wanted[0][0] > _MOST:
            self._expected = range(*wanted[0])  # it is fetched as it is read
            return
        runs = list[list[int]]()
        total = 0
        for start, end in sorted(wanted):
            if runs and start - runs[-1][1] <= _APART and end - runs[-1][0] <= _MOST:
                total += max(0, end - runs[-1][1])
                runs[-1][1] = max(runs[-1][1], end)
            else:
                total += end - start
                runs.append([start, end])
            if total > _EXPECTED:  # the rest is fetched when it is read
                break
        if total <= _LEAST and len(runs) < 2:  # whoever reads it first fetches all
            return
        coming = deque(self._submit(start, end - start) for start, end in runs)
        try:
            for start, _ in runs:
                self._spans.add(start, result_of(coming.popleft(), coming))
        finally:
            for future in coming:
                future.cancel()

    def chunks(self, start: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of a range piece by piece, with their offsets; some are fetched ahead."""
        check_range(self, start, nbytes)
        end = start + nbytes
        if self._is_small:
            for at in range(start, end, _MOST):
                yield at, self.read(at, min(_MOST, end - at))
            return
        yield from self._stream(start, end, _STREAMED)

    def _stream(self, start: int, end: int, most: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of a range by requests for `most` of them, several at a time."""
        coming = deque[Future[bytes]]()
        at = start
        try:
            for where in range(start, end, most):
                while at < end and len(coming) < _AT_ONCE:
                    step = min(most, end - at)
                    coming.append(self._submit(at, step))
                    at += step
                data = result_of(coming.popleft(), coming)
                if self._digest is not None:
                    self._digest.add(where, data)
                yield where, data
                del data  # it may go while the next is waited for
        finally:
            for future in coming:
                future.cancel()

    def _submit(self, start: int, nbytes: int) -> Future[bytes]:
        with self._tally:
            if self._fetchers is None:
                self._fetchers = FetchPool(_AT_ONCE)
        return self._fetchers.submit(partial(self._fetch, start, nbytes))

    def _fetch(self, start: int, nbytes: int) -> bytes:
        """Ask the store for a range."""
        if not nbytes:
            return b""
        try:
            data = with_retries(
                lambda: fetch_range(self.place, start, nbytes, self.nbytes, self.etag),
                self.path,
                stopped=self._stopped,
            )
        except (CorruptError, UnsupportedError):
            raise
        except InputError as error:
            if self._is_another():
                raise CorruptError(CHANGED, path=self.path) from error
            raise
        with self._tally:
            self._fetched = FetchStats(self._fetched.nbytes + nbytes, self._fetched.requests + 1)
        return data

    def _is_another(self) -> bool:
        """Whether the object was replaced, as far as the store tells at once."""
        try:
            return stamp_of(self.place.fs.info(self.place.path)) != self._stamp
        except Exception:  # why it can't be read is known already
            return False

    # -- the rest of what a source is ----------------------------------------------------------

    @property
    def fetch_stats(self) -> FetchStats:
        return self._fetched

    def check_unchanged(self) -> None:
        """As `Source.check_unchanged`, by what the store says of it now.

        What came by one answer, with its ETag, is of one version.
        """
        if self._is_small and self.etag and is_s3(self.place.fs) and self._fetched.requests == 1:
            return
        try:
            now = stamp_of(info_of(self.place))
        except Missing as error:
            what = "the object was removed while it was read"
            raise CorruptError(what, path=self.path) from error
        if now != self._stamp:
            raise CorruptError(CHANGED, path=self.path)

    def same_file(self, path: StrPath) -> bool:
        """As `Source.same_file`, by its URL."""
        return os.fspath(path) == self.path

    def mappable(self, start: int, nbytes: int) -> int:
        """As `Source.mappable`: a copy that takes room for no more than what was asked for."""
        check_range(self, start, nbytes)
        with self._guard:
            if self._copy is None:
                self._copy = SparseCopy(self.nbytes, self.path)
            if nbytes:
                low = start // _LEAST * _LEAST
                high = min(self.nbytes, -(-(start + nbytes) // _LEAST) * _LEAST)
                for at, end in self._copy.missing(low, high):
                    for where, data in self.chunks(at, end - at):
                        self._copy.put(where, data)
            return self._copy.fd
