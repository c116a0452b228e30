"""Read many small ranges that lie close together: each read includes the bytes that follow."""

from __future__ import annotations

from .source import Readable, Source, Window

LONGEST_BLOCK = 1 << 17  # bytes that are read at once
_NEAR = 1 << 13  # largest distance of two reads that count as close
_MOST_FILES = 16  # files with a block in memory
_MANY = 4  # close reads in a row before larger reads begin
_AT_LEAST = 1 << 9  # bytes read at once: the end of a record, and the next header


class NearbyReads:
    """Reads a range, and also the bytes after it if the last reads were close together.

    Headers of small records lie close together, so one read serves a hundred headers; with large
    tensors they do not. From a remote file, only announced ranges are read.
    """

    def __init__(self, source: Readable) -> None:
        self._source = source
        file = source.source if isinstance(source, Window) else source
        self.is_far = isinstance(file, Source) and file.fetch_stats is not None
        #: the last block, and its start
        self.block, self.start = b"", 0
        self._near = 0  # number of blocks in a row that begin near the end of the one before

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Readable.read`."""
        at = start - self.start
        if at >= 0 and at + nbytes <= len(self.block):
            return self.block[at : at + nbytes]
        is_near = abs(at - len(self.block)) < _NEAR
        self._near = self._near + 1 if is_near else 0
        if self.is_far or nbytes > LONGEST_BLOCK:
            return self._source.read(start, nbytes)
        most = _AT_LEAST if self._near < _MANY else LONGEST_BLOCK
        block = self._source.read(start, max(nbytes, min(most, self._source.nbytes - start)))
        self.block, self.start = block, start  # both, or neither if it can't be read
        return block[:nbytes]


class NearbyFiles:
    """Reads small ranges of several files; for the last files, with the bytes after them."""

    def __init__(self) -> None:
        self._readers: dict[int, NearbyReads] = {}  # by the `id()` of a file
        self._file: Source | None = None  # the latest, and its reader
        self._reader: NearbyReads | None = None

    def read(self, file: Source, start: int, nbytes: int) -> bytes:
        """As `Source.read`."""
        if file is not self._file or self._reader is None:
            self._file, self._reader = file, self._readers.pop(id(file), None) or NearbyReads(file)
            self._readers[id(file)] = self._reader
            if len(self._readers) > _MOST_FILES:
                del self._readers[next(iter(self._readers))]
        return self._reader.read(start, nbytes)
