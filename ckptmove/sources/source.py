"""Read ranges of a file that is not trusted to stay the same, of a part of it, or of decoded bytes.

Remote objects have the same interface; see `remote_object`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from ..errors import CkptmoveError, CorruptError, InputError, StrPath
from .budget import NO_MEMORY

#: The most that is read into memory at once and as a whole, in bytes.
MAX_NBYTES = 512 << 20

_CHUNK = 1 << 20
_Self = TypeVar("_Self", bound="Source")


class FetchStats(NamedTuple):
    """How much of a remote file was fetched."""

    nbytes: int  #: bytes of it
    requests: int  #: how many it took, those that were answered


class Readable(Protocol):
    """What can be read by ranges. All sizes and offsets are bytes."""

    @property
    def path(self) -> str:
        """The file, for messages."""

    @property
    def nbytes(self) -> int:
        """How much there is to read."""

    @property
    def start(self) -> int | None:
        """Where it lies in the file; None if it does not lie there as it is."""

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes `[start, start + nbytes)`. Raises CorruptError if they reach past the end."""

    def window(self, start: int, nbytes: int) -> Readable:
        """A part, to be read as if it were a file of its own."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ranges (start, size) that will be read: a remote source fetches them together.

        They may reach beyond the end.
        """


class Memory:
    """Bytes that were decoded from what the file holds."""

    start = None

    def __init__(self, content: bytes, path: str) -> None:
        self.content = content
        self.path = path
        self.nbytes = len(content)

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Readable.read`."""
        check_range(self, start, nbytes)
        return self.content[start : start + nbytes]

    def window(self, start: int, nbytes: int) -> Memory:
        """As `Readable.window`."""
        return Memory(self.read(start, nbytes), self.path)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`: it is here."""


class Window:
    """A part of a file."""

    def __init__(self, source: Source, start: int, nbytes: int) -> None:
        check_range(source, start, nbytes)
        self.source = source
        self.start = start
        self.nbytes = nbytes
        self.path = source.path

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Readable.read`."""
        check_range(self, start, nbytes)
        return self.source.read(self.start + start, nbytes)

    def window(self, start: int, nbytes: int) -> Window:
        """As `Readable.window`."""
        check_range(self, start, nbytes)
        return Window(self.source, self.start + start, nbytes)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`."""
        self.source.expect((self.start + start, nbytes) for start, nbytes in ranges)


class Piece(NamedTuple):
    """A range of a source."""

    source: Source
    at: int
    nbytes: int


class Source(ABC):
    """Something to read from, whose size was taken once, wherever it lies.

    Used as a context, it closes what it holds, and is named in errors that name nothing. A file
    for which the memory does not suffice is as good as damaged.
    """

    __slots__ = ("nbytes", "path")

    start = 0
    path: str  #: where it lies: a path, or a URL
    nbytes: int  #: its size

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, InputError):
                self._blame_changes(error)
        finally:
            self.close()
            if isinstance(error, CkptmoveError):
                error.about(self.path)
            elif isinstance(error, MemoryError):
                from traceback import clear_frames  # which imports much

                clear_frames(error.__traceback__)  # what was built is not needed any more
                raise CorruptError(NO_MEMORY, path=self.path) from None

    def _blame_changes(self, error: InputError) -> None:
        """Raise that the file was changed, if that may be why it looks damaged."""
        try:
            self.wait_for_change()
            self.check_unchanged()
        except CorruptError as changed:
            changed.about(self.path)
            raise changed from error
        except InputError:  # it can't be asked
            pass

    @abstractmethod
    def close(self) -> None:
        """Close what it holds open."""

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes `[start, start + nbytes)`. Raises CorruptError if the file shrank meanwhile."""
        check_range(self, start, nbytes)
        buffer = bytearray(nbytes)
        self.read_into(start, buffer)
        return bytes(buffer)

    @abstractmethod
    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        """Fill the buffer with the bytes from `start` on. Raises as `read`."""

    def wait_for_change(self) -> None:  # noqa: B027 (most can't be changed in place)
        """Wait for the end of a change in place, so that `check_unchanged` knows of all of it."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raises CorruptError if it was written to since it was opened."""

    @abstractmethod
    def same_file(self, path: StrPath) -> bool:
        """Whether `path` names this very file."""

    @abstractmethod
    def mappable(self, start: int, nbytes: int) -> int:
        """The descriptor of a file to map, in which these bytes lie at the same offset as here."""

    def window(self, start: int, nbytes: int) -> Window:
        """As `Readable.window`."""
        return Window(self, start, nbytes)

    def chunks(self, start: int, nbytes: int) -> Iterator[tuple[int, bytes | memoryview]]:
        """The bytes of a range piece by piece, with their offsets. Raises as `read`.

        A view has them until the next is asked for.
        """
        for at in range(start, start + nbytes, _CHUNK):
            yield at, self.read(at, min(_CHUNK, start + nbytes - at))

    def pieces(self, start: int, nbytes: int) -> Iterator[Piece]:
        """Where the bytes of a range lie, in order: in other sources, if it only joins them."""
        yield Piece(self, start, nbytes)

    def note(self, source: Source, at: int, data: bytes | memoryview) -> None:  # noqa: B027
        """Take notice of bytes that were read from one of the sources that it joins."""

    def read_before(self, source: Source, at: int, nbytes: int) -> tuple[int, int]:
        """Return how far it noted a range of a source, and the CRC-32 of those bytes."""
        return at, 0

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`: unless it is far away, nothing is gained."""
        del ranges

    @property
    def fetch_stats(self) -> FetchStats | None:
        """How much of a remote file was fetched so far; None for a local one."""
        return None

    @property
    def mode(self) -> int:
        """Permission bits for a copy of it."""
        return 0o666

    @property
    def own_nbytes(self) -> int:
        """Its size without what only joins the bytes of other sources."""
        return self.nbytes

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that it takes, without its holes."""
        return self.nbytes

    def data_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of `[start, end)` that are no holes, as far as that is known."""
        if start < end:
            yield start, end


def check_range(source: Readable, start: int, nbytes: int) -> None:
    """Raises CorruptError if a range leaves what there is to read."""
    if start < 0 or nbytes < 0 or start + nbytes > source.nbytes:
        raise CorruptError(
            f"{nbytes:,} bytes at offset {start:,} are outside the file "
            f"({source.nbytes:,} bytes): it is truncated or damaged",
            path=source.path,
        )
