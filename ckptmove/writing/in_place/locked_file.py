"""A file that is locked for a change in place: open for writing, with its folder and journal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import time

from ...errors import InputError, WriteError
from ..copy import read_at, write_at
from .journal import HEAD_NBYTES, UNFINISHED, Change, check_head, journal_name

#: What this process holds for a change, or is about to: by holder, process, device and inode.
_held_here: dict[int, tuple[int, int, int]] = {}

_PATIENCE = 1.0  # seconds until who leases the file is not just looking who else has it open

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}


class LockedFile:
    """A file open for writing, and locked; with its folder and its journal, if it has one."""

    def __init__(self, path: str, patience: float = 0.0) -> None:
        """Open and lock it. Raises InputError if it is not free after `patience` seconds."""
        folder, self.name = os.path.split(os.path.realpath(path))
        self.path = path
        self.journal = journal_name(self.name)
        self._unfinished = self.journal + UNFINISHED
        self.folder = self.fd = -1
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _held_here[id(self)] = _key(os.stat(self.name, dir_fd=self.folder))
            self.fd = self._open(flags)
            self.locked = self._lock(patience)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LockedFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Give it back."""
        for fd in (self.fd, self.folder):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        _held_here.pop(id(self), None)

    def _open(self, flags: int) -> int:
        """Open it; who leases it for an instant, as `is_open_for_writing` does, is waited for."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return os.open(self.name, flags, dir_fd=self.folder)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.001)

    def _lock(self, patience: float) -> bool:
        """Whether the file system has locks."""
        until = time.monotonic() + patience
        while True:
            here = is_held_here(self.fd, self)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    here = here or is_held_here(self.fd, self)  # gone since, or come since
                    raise busy_error(self.path, here=here) from error
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return False

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the file."""
        return read_at(self.fd, at, nbytes)

    def check(self, at: int, data: bytes) -> None:
        """Raises WriteError if what was written there is not there."""
        if self.read(at, len(data)) != data:
            raise WriteError("the written bytes can't be read back", path=self.path)

    def has_journal(self) -> bool:
        """Whether there is one."""
        return self._has(self.journal)

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def write_journal(self, data: bytes) -> None:
        """Have it on disk, and only then under its name; or raise OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self._unfinished, flags, 0o600, dir_fd=self.folder)
        try:
            write_at(fd, 0, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        if self.has_journal():  # where there are no locks, somebody else's
            self.remove_unfinished()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(self._unfinished, self.journal, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        os.fsync(self.folder)

    def read_journal(self) -> bytes | None:
        """The journal's bytes; None if it is gone.

        Raises InputError if it belongs to another user, as a trap would, or is not of this file.
        """
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.journal, flags, dir_fd=self.folder)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(fd)
            file = os.fstat(self.fd)
            trusted = (0, os.geteuid(), file.st_uid)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in trusted:
                raise InputError(
                    "the journal beside it belongs to another user than the file", path=self.path
                )
            check_head(read_at(fd, 0, HEAD_NBYTES), found.st_size, file.st_size, file.st_ino)
            return read_at(fd, 0, found.st_size)
        finally:
            os.close(fd)

    def remove_journal(self) -> None:
        """Say that the file is what it is to be, for good."""
        self.remove_unfinished()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.journal, dir_fd=self.folder)
        os.fsync(self.folder)

    def remove_unfinished(self) -> None:
        """Remove what was to become the journal of a change that was not begun then."""
        if self._has(self._unfinished):
            os.unlink(self._unfinished, dir_fd=self.folder)

    def put_back(self, changes: list[Change]) -> None:
        """Undo changes and have the file on disk, with what others undid but did not sync."""
        for change in changes:
            write_at(self.fd, change.at, change.old)
        os.fsync(self.fd)
        for change in changes:
            self.check(change.at, change.old)


def busy_error(path: str, *, here: bool) -> InputError:
    """The error for a file that another process, or this one, has locked."""
    who = "another call in this process" if here else "another process"
    return InputError(f"is being changed in place by {who}", path=path)


def is_held_here(fd: int, but: LockedFile | None = None) -> bool:
    """Whether this process holds the file for a change, or is about to: another than `but`."""
    key = _key(os.fstat(fd))
    return any(each == key for holder, each in [*_held_here.items()] if holder != id(but))


def _key(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino  # a fork holds what its parent does, no more


def is_locked(fd: int) -> bool:
    """Whether another process has locked the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def is_open_for_writing(fd: int) -> bool:
    """Whether anybody has the file open for writing, if the system can tell.

    Linux leases a file for reading only where nobody has. The lease is given back at once; who
    opens the file in that instant would have us killed by SIGIO, hence a signal that is ignored.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False
