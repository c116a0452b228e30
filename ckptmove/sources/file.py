"""Regular files as sources."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator

from ..errors import CorruptError, InputError, StrPath, UnsupportedError, descriptor_error
from ..system import files
from ..system.locks import is_locked
from .source import Source, check_range

_TINY = 1 << 15  # a file up to this size is read at once, and kept while it is open
#: Most files that keep a descriptor open at the same time; a checkpoint may have thousands.
_MOST_HELD = 100
_SAVE_FIRST = "save it to a file first"
_PATIENCE = 1.0  # seconds to wait for a change in place, which takes a fraction of a second


class File(Source):
    """A regular file, open for reading.

    Nothing is mapped here: a mapping of a file that somebody truncates kills the process, a short
    `pread` is an error with a name.
    """

    __slots__ = ("_fd", "_is_counted", "_seen", "_stat", "_whole")
    _held = 0  #: how many files opened by path keep a descriptor

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd  # -1 if the file is opened again for each read
        self._is_counted = False
        self.path = path
        self._stat = os.fstat(fd)
        self.nbytes = self._stat.st_size
        self._seen = (0, 0, 0)  # search start; data found
        self._whole: bytes | None = None  # a tiny file, once read; empty on failure

    @classmethod
    def open(cls, path: StrPath) -> File:
        """Open a regular file; a symbolic link is followed, and a FIFO does not block.

        If very many files are open, it keeps no descriptor, because descriptors are limited.
        """
        path = os.fspath(path)
        try:
            fd = os.open(path, files.READ | files.AT_ONCE)
        except OSError as error:
            raise _unreadable(error, path) from error
        except ValueError as error:
            raise InputError("can't be read: not a path", path=path) from error
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise UnsupportedError(
                    "is a directory; a single file is needed", path=path, hint="give one file in it"
                )
            if not stat.S_ISREG(mode):
                raise InputError("is not a regular file", path=path, hint=_SAVE_FIRST)
            found = cls(fd, path)
        except BaseException:
            os.close(fd)
            raise
        found.hold_if_few()
        return found

    def hold_if_few(self) -> None:
        """Keep the descriptor, or close it until the next read if very many files are open."""
        if File._held < min(_MOST_HELD, files.most_descriptors() // 4):
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
        """The descriptor, kept open from now on."""
        if self._fd < 0:
            self._fd = self._open_again()
        return self._fd

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yield the descriptor, which may be closed at the end; InputError if it can't be reopened.

        CorruptError if the file was replaced or changed meanwhile.
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
            raise _unreadable(error, self.path) from error
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
        """As `Source.mappable`: its own descriptor."""
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
        """As `Source.mode`: the mode of the file."""
        return stat.S_IMODE(self._stat.st_mode) & 0o777

    @property
    def allocated_nbytes(self) -> int:
        """As `Source.allocated_nbytes`, on disk."""
        return files.allocated_nbytes(self._stat)

    def data_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """As `Source.data_ranges`, if the file system tells.

        The last answer is kept, because a search for a hole may go through the rest of the file.
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

    def wait_for_change(self) -> None:
        """As `Source.wait_for_change`: a process that changes the file has it locked.

        Tests with a new descriptor, because ours may be a copy of the one that has the lock.
        """
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(OSError):
            fd = os.open(self.path, files.READ | files.AT_ONCE)
            try:
                while is_locked(fd) and time.monotonic() < until:
                    time.sleep(0.005)
            finally:
                os.close(fd)

    def check_unchanged(self) -> None:
        with self.descriptor() as fd:  # a reopened file is checked when it is opened
            self._check_same(os.fstat(fd))

    def _check_same(self, now: os.stat_result) -> None:
        before = self._stat
        if not os.path.samestat(now, before) or _version(now) != _version(before):
            raise CorruptError("the file was changed while it was read", path=self.path)


def _unreadable(error: OSError, path: str) -> InputError:
    """Return the error for a file that can't be opened, with a hint if the cause lies elsewhere."""
    if path == "-" and error.errno == errno.ENOENT:
        message = "standard input can't be read: ckptmove reads from any place of a file"
        return InputError(message, path=path, hint=_SAVE_FIRST)
    limited = descriptor_error(error)
    hint = None if limited is None else limited.hint
    return InputError(f"can't be read: {error.strerror}", path=path, hint=hint)


def _version(about: os.stat_result) -> tuple[int, int, int]:
    """Return values that change when a file is written to."""
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns
