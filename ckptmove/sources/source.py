"""Read ranges of a file that is not trusted to stay the same, of a part of it, or of decoded bytes.

Remote objects have the same interface; see `remote_object`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from traceback import clear_frames
from typing import NamedTuple, Protocol, TypeVar

from ..errors import CkptmoveError, CorruptError, InputError, StrPath, UnsupportedError
from ..system import files
from .budget import NO_MEMORY

#: The most that is read into memory at once and as a whole, in bytes.
MAX_NBYTES = 512 << 20

_CHUNK = 1 << 20
_TINY = 1 << 15  # bytes of a file that is read at once, and held while it is open
#: Files that are open at once with a descriptor each; each of a thousand ranks may have one.
_MOST_HELD = 100
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
                clear_frames(error.__traceback__)  # what was built is not needed any more
                raise CorruptError(NO_MEMORY, path=self.path) from None

    def _blame_changes(self, error: InputError) -> None:
        """Raise that the file was changed, if that may be why it looks damaged."""
        try:
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

    def chunks(self, start: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of a range piece by piece, with their offsets. Raises as `read`."""
        for at in range(start, start + nbytes, _CHUNK):
            yield at, self.read(at, min(_CHUNK, start + nbytes - at))

    def pieces(self, start: int, nbytes: int) -> Iterator[Piece]:
        """Where the bytes of a range lie, in order: in other sources, if it only joins them."""
        yield Piece(self, start, nbytes)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`: unless it is far away, nothing is gained."""
        del ranges

    @property
    def fetched(self) -> FetchStats | None:
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


class File(Source):
    """A regular file, open for reading.

    Nothing is mapped here: a mapping of a file that somebody truncates kills the process, a short
    `pread` is an error with a name.
    """

    __slots__ = ("_fd", "_is_counted", "_seen", "_stat", "_whole")
    _held = 0  #: how many that were opened by their paths hold a descriptor

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd  # -1 if it is opened whenever it is read
        self._is_counted = False
        self.path = path
        self._stat = os.fstat(fd)
        self.nbytes = self._stat.st_size
        self._seen = (0, 0, 0)  # from where holes were looked for; the data that came next
        self._whole: bytes | None = None  # a tiny file, once it was read; empty if it can't be

    @classmethod
    def open(cls, path: StrPath) -> File:
        """Open a regular file; a symbolic link is followed, and a FIFO does not block.

        Where very many are open, it holds no descriptor: a process may have few of these.
        """
        path = os.fspath(path)
        try:
            fd = os.open(path, files.READ | files.AT_ONCE)
        except OSError as error:
            raise InputError(f"can't be read: {error.strerror}", path=path) from error
        except ValueError as error:
            raise InputError("can't be read: not a path", path=path) from error
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise UnsupportedError(
                    "is a directory; a single file is needed", path=path, hint="give one file in it"
                )
            if not stat.S_ISREG(mode):
                raise InputError("is not a regular file", path=path)
            found = cls(fd, path)
        except BaseException:
            os.close(fd)
            raise
        found.hold_if_few()
        return found

    def hold_if_few(self) -> None:
        """Hold the descriptor, or close it where very many are open, until it is read."""
        if File._held < _MOST_HELD:
            File._held += 1
            self._is_counted = True
        else:
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        File._held -= self._is_counted
        self._is_counted = False
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    @property
    def fd(self) -> int:
        """Its descriptor, which it holds from now on."""
        if self._fd < 0:
            self._fd = self._open_again()
        return self._fd

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Its descriptor, which may be closed at the end; InputError if it can't be opened again.

        CorruptError if another file is there by now, or it was written to.
        """
        if self._fd >= 0:
            yield self._fd
            return
        fd = self._open_again()
        try:
            yield fd
        finally:
            os.close(fd)

    def _descriptor_again(self) -> int:
        return os.open(self.path, files.READ | files.AT_ONCE)

    def _open_again(self) -> int:
        try:
            fd = self._descriptor_again()
        except OSError as error:
            raise InputError(f"can't be read: {error.strerror}", path=self.path) from error
        try:
            self._check_same(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, start: int, nbytes: int) -> bytes:
        check_range(self, start, nbytes)
        if self.nbytes <= _TINY and self._fd >= 0:
            if self._whole is None:
                self._whole = b""
                with contextlib.suppress(OSError):  # a part of it may be readable
                    self._whole = files.read_some(self._fd, self.nbytes, 0)
            if len(self._whole) == self.nbytes:
                return self._whole[start : start + nbytes]
        parts = []
        with self.descriptor() as fd:
            while nbytes:
                try:
                    part = files.read_some(fd, nbytes, start)
                except OSError as error:
                    raise InputError(f"can't be read: {error.strerror}", path=self.path) from error
                if not part:
                    raise CorruptError("the file shrank while it was read", path=self.path)
                parts.append(part)
                start += len(part)
                nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        check_range(self, start, len(buffer))
        left = memoryview(buffer)
        with self.descriptor() as fd:
            while left:
                try:
                    nbytes = files.read_into(fd, left, start)
                except OSError as error:
                    raise InputError(f"can't be read: {error.strerror}", path=self.path) from error
                if not nbytes:
                    raise CorruptError("the file shrank while it was read", path=self.path)
                start += nbytes
                left = left[nbytes:]

    def mappable(self, start: int, nbytes: int) -> int:
        """As `Source.mappable`: its own."""
        return self.fd

    def same_file(self, path: StrPath) -> bool:
        """As `Source.same_file`, by device and inode."""
        try:
            other = os.stat(path)
        except OSError:
            return False
        return os.path.samestat(other, self._stat)

    def is_same(self, other: File) -> bool:
        """Whether another is this very file, by device and inode."""
        return os.path.samestat(self._stat, other._stat)

    @property
    def mode(self) -> int:
        """As `Source.mode`: its own."""
        return stat.S_IMODE(self._stat.st_mode) & 0o777

    @property
    def allocated_nbytes(self) -> int:
        """As `Source.allocated_nbytes`, on disk."""
        return files.allocated_nbytes(self._stat)

    def data_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """As `Source.data_ranges`, if the file system tells.

        Its last answer is kept: it may look through the whole rest of the file for a hole.
        """
        at = start
        while at < end:
            since, data, hole = self._seen
            if not since <= at < hole:
                try:
                    with self.descriptor() as fd:
                        data, hole = files.data_range(fd, at)
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        yield at, end
                        return
                    data = hole = max(end, self.nbytes)  # only a hole is left
                self._seen = at, data, hole
            if data < end:
                yield max(at, data), min(hole, end)
            at = hole

    def check_unchanged(self) -> None:
        with self.descriptor() as fd:  # one that is opened anew is checked by that
            self._check_same(os.fstat(fd))

    def _check_same(self, now: os.stat_result) -> None:
        before = self._stat
        if not os.path.samestat(now, before) or _version(now) != _version(before):
            raise CorruptError("the file was changed while it was read", path=self.path)


def _version(about: os.stat_result) -> tuple[int, int, int]:
    """What differs once a file was written to."""
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns


def check_range(source: Readable, start: int, nbytes: int) -> None:
    """Raises CorruptError if a range leaves what there is to read."""
    if start < 0 or nbytes < 0 or start + nbytes > source.nbytes:
        raise CorruptError(
            f"{nbytes:,} bytes at offset {start:,} are outside the file "
            f"({source.nbytes:,} bytes): it is truncated or damaged",
            path=source.path,
        )
