"""A range of a file followed by zeros, as if nothing were missing at its end."""

from __future__ import annotations

import os
import tempfile

from ...errors import StrPath
from ...sources.source import FetchStats, Source, check_range


class ZeroFilledSource(Source):
    """Bytes of another source, and zeros up to a size."""

    __slots__ = ("_at", "_copy", "_inner", "_there")

    def __init__(self, inner: Source, start: int, there: int, nbytes: int) -> None:
        """`there` bytes from offset `start` of `inner`, followed by zeros up to `nbytes`."""
        self.path, self.nbytes = inner.path, nbytes
        self._inner, self._at, self._there = inner, start, there
        self._copy = -1  # a file with the same bytes, created at the first use

    def close(self) -> None:
        """Close the copy; `inner` stays open."""
        copy, self._copy = self._copy, -1
        if copy >= 0:
            os.close(copy)

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Source.read`."""
        check_range(self, start, nbytes)
        there = max(0, min(nbytes, self._there - start))
        content = self._inner.read(self._at + start, there) if there else b""
        return content + bytes(nbytes - there)

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        """As `Source.read_into`."""
        memoryview(buffer)[:] = self.read(start, len(buffer))

    def check_unchanged(self) -> None:
        """As `Source.check_unchanged`."""
        self._inner.check_unchanged()

    def same_file(self, path: StrPath) -> bool:
        """As `Source.same_file`."""
        return self._inner.same_file(path)

    def mappable(self, start: int, nbytes: int) -> int:
        """Like `Source.mappable`; a sparse copy that takes disk space only for present bytes."""
        if self._copy < 0:
            with tempfile.TemporaryFile() as made:
                made.truncate(self.nbytes)
                for at, data in self.chunks(0, self._there):
                    made.seek(at)
                    made.write(data)
                made.flush()
                self._copy = os.dup(made.fileno())
        return self._copy

    @property
    def fetch_stats(self) -> FetchStats | None:
        """As `Source.fetched`."""
        return self._inner.fetch_stats

    @property
    def mode(self) -> int:
        """As `Source.mode`."""
        return self._inner.mode
