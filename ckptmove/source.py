"""Ranged reads: of one file that is never changed, and never trusted to stay the same; of a part of
it; and of bytes that had to be decoded first."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from .errors import CkptmoveError, CorruptError, InputError, StrPath, UnsupportedError

#: The most that is read into memory at once and as a whole, in bytes.
MAX_NBYTES = 512 << 20


class Readable(Protocol):
    """What can be read by ranges. All sizes and offsets are bytes.

    Attributes:
        path: the file, for messages.
        nbytes: how much there is to read.
        start: where it lies in the file, or None if it does not lie there as it is.
    """

    @property
    def path(self) -> str:
        """As above."""

    @property
    def nbytes(self) -> int:
        """As above."""

    @property
    def start(self) -> int | None:
        """As above."""

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes `[start, start + nbytes)`.

        Raises:
            CorruptError: the range leaves what there is.
        """

    def window(self, start: int, nbytes: int) -> Readable:
        """A part, to be read as if it were a file of its own."""


class Memory:
    """Bytes that were decoded from what the file holds."""

    start = None

    def __init__(self, content: bytes, path: str) -> None:
        self.content = content
        self.path = path
        self.nbytes = len(content)

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Readable.read`."""
        _check_range(self, start, nbytes)
        return self.content[start : start + nbytes]

    def window(self, start: int, nbytes: int) -> Memory:
        """As `Readable.window`."""
        return Memory(self.read(start, nbytes), self.path)


class Window:
    """A part of a file."""

    def __init__(self, source: Source, start: int, nbytes: int) -> None:
        _check_range(source, start, nbytes)
        self.source = source
        self.start = start
        self.nbytes = nbytes
        self.path = source.path

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Readable.read`."""
        _check_range(self, start, nbytes)
        return self.source.read(self.start + start, nbytes)

    def window(self, start: int, nbytes: int) -> Window:
        """As `Readable.window`."""
        _check_range(self, start, nbytes)
        return Window(self.source, self.start + start, nbytes)


class Source:
    """A regular file, open for reading, whose size was taken once.

    Used as a context, it closes the file, and names it in errors that name none.

    All sizes and offsets are bytes. Nothing is mapped here: a mapping of a file that somebody
    truncates kills the process, a short `pread` is an error with a name.
    """

    __slots__ = ("_seen", "_stat", "fd", "nbytes", "path")

    start = 0

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path
        self._stat = os.fstat(fd)
        self.nbytes = self._stat.st_size
        self._seen = (0, 0, 0)  # from where holes were looked for; the data that came next

    @classmethod
    def open(cls, path: StrPath) -> Source:
        """Open a regular file; a symbolic link is followed.

        Raises:
            InputError: missing, unreadable, or not a regular file (a FIFO does not block).
        """
        path = os.fspath(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InputError(f"can't be read: {error.strerror}", path=path) from error
        except ValueError as error:
            raise InputError("can't be read: not a path", path=path) from error
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise UnsupportedError(
                    "is a directory: only single files can be read",
                    path=path,
                    hint="name one file inside it",
                )
            if not stat.S_ISREG(mode):
                raise InputError("is not a regular file", path=path)
            return cls(fd, path)
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        if isinstance(error, CkptmoveError):
            error.about(self.path)

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes `[start, start + nbytes)`.

        Raises:
            CorruptError: the range leaves the file, or the file shrank since it was opened.
        """
        _check_range(self, start, nbytes)
        parts = []
        while nbytes:
            try:
                part = os.pread(self.fd, nbytes, start)
            except OSError as error:
                raise InputError(f"can't be read: {error.strerror}", path=self.path) from error
            if not part:
                raise CorruptError("the file shrank while it was read", path=self.path)
            parts.append(part)
            start += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        """Fill the buffer with the bytes from `start` on. Raises as `read`."""
        _check_range(self, start, len(buffer))
        left = memoryview(buffer)
        while left:
            try:
                nbytes = os.preadv(self.fd, [left], start)
            except OSError as error:
                raise InputError(f"can't be read: {error.strerror}", path=self.path) from error
            if not nbytes:
                raise CorruptError("the file shrank while it was read", path=self.path)
            start += nbytes
            left = left[nbytes:]

    def window(self, start: int, nbytes: int) -> Window:
        """As `Readable.window`."""
        return Window(self, start, nbytes)

    def same_file(self, path: StrPath) -> bool:
        """Whether `path` names this very file, by device and inode."""
        try:
            other = os.stat(path)
        except OSError:
            return False
        return os.path.samestat(other, self._stat)

    @property
    def mode(self) -> int:
        """Permission bits."""
        return stat.S_IMODE(self._stat.st_mode) & 0o777

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the file takes on disk, without its holes."""
        return self._stat.st_blocks * 512

    def data_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of `[start, end)` that are no holes, as far as the file system tells.

        Who goes on where the last call ended asks it nothing: it may look through the whole rest
        of the file for a hole.
        """
        at = start
        while at < end:
            since, data, hole = self._seen
            if not since <= at < hole:
                try:
                    data = os.lseek(self.fd, at, os.SEEK_DATA)
                    hole = os.lseek(self.fd, data, os.SEEK_HOLE)
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
        """Raises CorruptError if the file was written to since it was opened."""
        now = os.fstat(self.fd)
        before = self._stat
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            before.st_size,
            before.st_mtime_ns,
            before.st_ctime_ns,
        ):
            raise CorruptError("the file was changed while it was read", path=self.path)


def _check_range(source: Readable, start: int, nbytes: int) -> None:
    if start < 0 or nbytes < 0 or start + nbytes > source.nbytes:
        raise CorruptError(
            f"{nbytes:,} bytes at offset {start:,} are outside the file "
            f"({source.nbytes:,} bytes): it is truncated or damaged",
            path=source.path,
        )
