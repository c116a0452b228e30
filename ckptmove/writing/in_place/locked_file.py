"""Files and folders that are locked for a change in place, with their journals."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from ...errors import InputError, RefusedError, WriteError
from ...system.files import AT_ONCE, READ, READ_WRITE, WRITE, OpenFolder, sync, user
from ...system.locks import LOCKS_FILES, lock_file
from ..copy import read_at, write_at
from .journal import HEAD_NBYTES, Change, Read, check_head
from .journal_name import SUFFIX, UNFINISHED, journal_name

_Self = TypeVar("_Self", bound="LockedPlace")

#: Files that this process has locked or is locking: by holder, process, device and inode.
_held_here: dict[int, tuple[int, int, int]] = {}

PATIENCE = 1.0  # seconds to wait for a change or an undo, which takes a fraction of a second
_GLANCE = 0.05  # seconds after which the lock is not just a check by another process
_LEASE = 1.0  # seconds after which a lease is not just a check by another process


class LockedPlace:
    """A locked file or folder, and its journal, which is a file in the open `folder`."""

    path: str
    folder: OpenFolder
    fd: int
    journal: str

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock and close the files."""
        with contextlib.suppress(OSError):
            if self.fd not in (-1, self.folder.fd):
                os.close(self.fd)
        with contextlib.suppress(OSError):
            self.folder.close()
        _held_here.pop(id(self), None)

    def _lock(self, patience: float) -> bool:
        """Lock; return whether the file system has locks. InputError after `patience` seconds."""
        until = time.monotonic() + max(patience, _GLANCE)
        while True:
            here = is_held_here(self.fd, self)
            try:
                return lock_file(self.fd)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    here = here or is_held_here(self.fd, self)  # removed or created meanwhile
                    raise busy_error(self.path, here=here) from error
                time.sleep(0.01)

    def has_journal(self) -> bool:
        """Whether a journal exists."""
        return self._has(self.journal)

    def _has(self, name: str) -> bool:
        try:
            self.folder.stat(name)
        except FileNotFoundError:
            return False
        return True

    @property
    def _unfinished(self) -> str:
        return self.journal + UNFINISHED

    def write_journal(self, parts: Iterable[bytes]) -> None:
        """Write and sync the journal, and only then give it its name. Raises OSError."""
        fd = self.folder.open(self._unfinished, WRITE | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            at = 0
            for part in parts:
                write_at(fd, at, part)
                at += len(part)
            sync(fd)
        finally:
            os.close(fd)
        if self.has_journal():  # without locks, it may be another process's
            self.remove_unfinished()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self.folder.rename(self._unfinished, self.journal)
        self.folder.sync()

    @contextlib.contextmanager
    def _open_journal(self, owners: Collection[int]) -> Iterator[tuple[int, int] | None]:
        """Return the descriptor and the size of the journal; None if there is no journal.

        Raises InputError if its owner is neither one of `owners` nor us: it may be a trap.
        """
        try:
            fd = self.folder.open(self.journal, READ | AT_ONCE)
        except FileNotFoundError:
            yield None
            return
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, user(), *owners):
                raise InputError(self._foreign, path=self.path)
            yield fd, found.st_size
        finally:
            os.close(fd)

    #: The error message for a journal of another user.
    _foreign = "the journal beside it belongs to another user than the file"

    def remove_journal(self) -> None:
        """Remove the journal: the present bytes of the file or folder become final."""
        self.remove_unfinished()
        with contextlib.suppress(FileNotFoundError):
            self.folder.unlink(self.journal)
        self.folder.sync()

    def remove_unfinished(self) -> None:
        """Remove an unfinished journal, whose change was never begun."""
        if self._has(self._unfinished):
            self.folder.unlink(self._unfinished)


class LockedFile(LockedPlace):
    """A locked file, open for writing, with its folder and its journal, if it has one."""

    def __init__(self, path: str, patience: float = 0.0) -> None:
        """Open and lock it. Raises InputError if it is still locked after `patience` seconds."""
        folder, self.name = os.path.split(os.path.realpath(path))
        self.path = path
        self.journal = journal_name(self.name)
        check_system(path)
        self.fd, self.folder = -1, OpenFolder(folder)
        try:
            _held_here[id(self)] = _key(self.folder.stat(self.name))
            self.fd = self._open(READ_WRITE | AT_ONCE)
            self.locked = self._lock(patience)
        except BaseException:
            self.close()
            raise

    def _open(self, flags: int) -> int:
        """Open the file; wait for a brief lease, such as that of `is_open_for_writing`."""
        until = time.monotonic() + _LEASE
        while True:
            try:
                return self.folder.open(self.name, flags)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.001)

    def read(self, at: int, nbytes: int) -> bytes:
        """Read bytes of the file."""
        return read_at(self.fd, at, nbytes)

    def sync_written(self) -> None:
        """Sync the file, and give it a modification time that no reader has seen before.

        The clock for files may tick only every few milliseconds, and the time is taken before the
        bytes are written. So a reader that opened the file in between could not notice the change.
        """
        with contextlib.suppress(PermissionError):  # another user owns it, and lets us write
            os.utime(self.fd, ns=(os.fstat(self.fd).st_atime_ns, time.time_ns()))
        sync(self.fd)

    def check(self, at: int, data: bytes) -> None:
        """Raises WriteError if the file does not have the written bytes."""
        if self.read(at, len(data)) != data:
            raise WriteError("the written bytes can't be read back", path=self.path)

    def read_journal(self) -> bytes | None:
        """Return the journal's bytes; None if there is no journal.

        Raises InputError if it belongs to another user (it may be a trap) or to another file.
        """
        file = os.fstat(self.fd)
        with self._open_journal([file.st_uid]) as opened:
            if opened is None:
                return None
            fd, nbytes = opened
            check_head(read_at(fd, 0, HEAD_NBYTES), nbytes, file.st_size, file.st_ino)
            return read_at(fd, 0, nbytes)

    def put_back(self, changes: Iterable[Change]) -> None:
        """Undo changes and sync the file, including bytes that others restored but did not sync."""
        changes = list(changes)
        for change in changes:
            write_at(self.fd, change.at, change.old)
        self.sync_written()
        for change in changes:
            self.check(change.at, change.old)


class LockedFolder(LockedPlace):
    """A folder locked for a change of several files in it, with their common journal."""

    _foreign = "the journal in it belongs to another user than the folder"

    def __init__(self, path: str, patience: float = 0.0) -> None:
        """Open and lock it. Raises InputError if it is still locked after `patience` seconds."""
        self.path, self.journal = path, SUFFIX
        check_system(path)
        self.folder = OpenFolder(path)
        if self.folder.fd is None:
            raise _unable(path, "has no locks on folders")
        self.fd = self.folder.fd
        try:
            _held_here[id(self)] = _key(os.fstat(self.fd))
            self.locked = self._lock(patience)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def open_journal(self) -> Iterator[tuple[Read, int, int] | None]:
        """Return a reader of the journal, its size and its owner; None if there is no journal.

        Raises InputError if its owner is neither the folder's owner nor us: it may be a trap.
        """
        with self._open_journal([os.fstat(self.fd).st_uid]) as opened:
            if opened is None:
                yield None
                return
            fd, nbytes = opened
            yield (lambda at, count: read_at(fd, at, count)), nbytes, os.fstat(fd).st_uid


def may_change(owner: int, file: os.stat_result) -> bool:
    """Whether a journal of this user may change a file; otherwise it may be a trap."""
    return owner in (0, user(), file.st_uid)


def busy_error(path: str, *, here: bool) -> InputError:
    """Return the error for a file that another process, or this one, has locked."""
    who = "another call in this process" if here else "another process"
    return InputError(f"is being changed in place by {who}", path=path)


def is_held_here(fd: int, but: LockedPlace | None = None) -> bool:
    """Whether a holder in this process other than `but` has locked the file, or is locking it."""
    key = _key(os.fstat(fd))
    return any(each == key for holder, each in [*_held_here.items()] if holder != id(but))


def _key(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino  # entries of the parent do not count in a fork


def check_system(path: str) -> None:
    """Raises RefusedError on systems without changes in place, such as Windows."""
    if not LOCKS_FILES:
        raise _unable(path, "has no locks on files")


def _unable(path: str, why: str) -> RefusedError:
    return RefusedError(
        f"can't be changed in place on this system, which {why}",
        path=path,
        hint="without --in-place, ckptmove writes a relocated copy",
    )
