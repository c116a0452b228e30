"""Read many small ranges that lie close together: what follows each is read with it."""

from __future__ import annotations

from .source import Readable, Source, Window

_BLOCK = 1 << 17  # bytes that are read at once
_NEAR = 1 << 13  # how far apart two reads are that are close together
_MOST_FILES = 16  # of which a block is held
_MANY = 4  # reads in a row that are, after which more is read
_AT_LEAST = 1 << 9  # bytes that are read at once: what ends a record, and the next one's header


class NearbyReads:
    """Reads what is asked for, and with it what follows where the last reads were close together.

    Large tensors lie between the headers of their records, small ones do not: then one read serves
    a hundred headers. Of a file that is far away, nothing is read but what was announced.
    """

    def __init__(self, source: Readable) -> None:
        self._source = source
        file = source.source if isinstance(source, Window) else source
        self._far = isinstance(file, Source) and file.fetch_stats is not None
        #: what was read last of what follows each other, and where it starts
        self.block, self.start = b"", 0
        self._last = self._near = 0  # where the last read was; how many in a row were close

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Readable.read`."""
        at = start - self.start
        if at >= 0 and at + nbytes <= len(self.block):
            self._last = start
            return self.block[at : at + nbytes]
        self._near = self._near + 1 if 0 <= start - self._last < _NEAR else 0
        self._last = start
        if self._far or nbytes > _BLOCK:
            return self._source.read(start, nbytes)
        self.start, most = start, _AT_LEAST if self._near < _MANY else _BLOCK
        self.block = self._source.read(start, max(nbytes, min(most, self._source.nbytes - start)))
        return self.block[:nbytes]


class NearbyFiles:
    """Reads small ranges of several files; of those read last with what follows."""

    def __init__(self) -> None:
        self._readers: dict[int, NearbyReads] = {}  # by the `id()` of a file

    def read(self, file: Source, start: int, nbytes: int) -> bytes:
        """As `Source.read`."""
        reader = self._readers.pop(id(file), None) or NearbyReads(file)
        self._readers[id(file)] = reader  # now the last
        if len(self._readers) > _MOST_FILES:
            del self._readers[next(iter(self._readers))]
        return reader.read(start, nbytes)
