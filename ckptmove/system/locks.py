"""Locks on files and on bytes of files, which end with the process.

A whole file is locked for a change in place, by `flock`, which Windows lacks. A byte is locked by
locks of open files (Linux) or of handles (Windows); then only one of two descriptors of a process
can have the lock. On other systems, such as macOS, a lock belongs to the process and is lost as
soon as the process closes any descriptor of the file; there, this process keeps its own list of
locks, and closes descriptors late.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
import sys
import threading
from typing import Any

from .files import optional_module

_fcntl: Any = optional_module("fcntl")
_msvcrt: Any = optional_module("msvcrt")
_STRUCT_FLOCK = struct.Struct("hh4xqqi4x")  # of Linux, 64 bits
_ON_WINDOWS = (1 << 29, (1 << 31) - 2)  # any CRT can lock these bytes; nobody reads them
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_TAKEN = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}

#: Whether files can be locked here for a change in place.
LOCKS_FILES: bool = hasattr(_fcntl, "flock")
#: Held while a thread tries a lock of a file, so that no other thread meets what is just a check.
_trying = threading.RLock()  # a handler of a signal may try one while its thread tries another


def _make_lock_anew() -> None:
    global _trying
    _trying = threading.RLock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_make_lock_anew)  # the thread that holds it is not there


# -- of a whole file -------------------------------------------------------------------------------


def lock_file(fd: int) -> bool:
    """Lock a file; return whether its file system has locks. BlockingIOError if it is locked."""
    with _trying:
        return _lock_file(fd)


def _lock_file(fd: int) -> bool:
    if not LOCKS_FILES:
        return False
    try:
        _fcntl.flock(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in {*_NO_LOCKS, errno.EBADF}:
            raise
        return False
    return True


def is_locked(fd: int) -> bool:
    """Whether somebody has locked the file, by another descriptor."""
    with _trying:
        try:
            if _lock_file(fd):
                _fcntl.flock(fd, _fcntl.LOCK_UN)
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def is_open_for_writing(fd: int) -> bool:
    """Whether any process has the file open for writing, if the system can tell.

    Linux grants a read lease only if no process has the file open for writing. The lease is
    returned at once. If a process opens the file in that instant, SIGIO would kill us, so another
    signal, which is ignored, is set instead.
    """
    if not hasattr(_fcntl, "F_SETLEASE") or not hasattr(signal, "SIGURG"):
        return False
    try:
        _fcntl.fcntl(fd, _fcntl.F_SETSIG, signal.SIGURG)
        _fcntl.fcntl(fd, _fcntl.F_SETLEASE, _fcntl.F_RDLCK)
        _fcntl.fcntl(fd, _fcntl.F_SETLEASE, _fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False


# -- of a byte -------------------------------------------------------------------------------------


def lock_byte(fd: int, at: int) -> bool:
    """Lock a byte of a file until `close` closes the descriptor; False if it is locked already.

    If the file system has no locks, every caller gets True.
    """
    try:
        if _fcntl is None:
            return _lock_of_handle(fd, at)
        if hasattr(_fcntl, "F_OFD_SETLK") and sys.platform == "linux" and sys.maxsize > 1 << 32:
            request = _STRUCT_FLOCK.pack(_fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
            _fcntl.fcntl(fd, _fcntl.F_OFD_SETLK, request)
            return True
        return _OF_PROCESS.lock(fd, at)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno in _TAKEN:
            return False
        raise


def close(fd: int) -> None:
    """Close a descriptor of a file with locked bytes, and release the locks of the descriptor."""
    _OF_PROCESS.close(fd)


def _lock_of_handle(fd: int, at: int) -> bool:
    """Lock on Windows. Others can't read a locked byte, so it is beyond the end of any ledger."""
    if _msvcrt is None:
        return True
    start, end = _ON_WINDOWS
    os.lseek(fd, start + at % (end - start), os.SEEK_SET)
    _msvcrt.locking(fd, _msvcrt.LK_NBLCK, 1)
    return True


class _LocksOfProcess:
    """Locks that belong to the process; records which descriptor has which byte of which file."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._bytes: dict[tuple[int, int], dict[int, int]] = {}  # file → byte → descriptor
        self._late: dict[tuple[int, int], list[int]] = {}  # file → descriptors to be closed

    def lock(self, fd: int, at: int) -> bool:
        """As `lock_byte`; raises OSError if another process has it."""
        with self._guard:
            locked = self._bytes.setdefault(_file(fd), {})
            if at in locked:
                return False
            _fcntl.lockf(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB, 1, at)
            locked[at] = fd
            return True

    def close(self, fd: int) -> None:
        """Close the descriptor as soon as no other descriptor has a lock on the file."""
        if not self._bytes:
            os.close(fd)
            return
        with self._guard:
            key = _file(fd)
            locked = self._bytes.get(key, {})
            for at in [at for at, owner in locked.items() if owner == fd]:
                _fcntl.lockf(fd, _fcntl.LOCK_UN, 1, at)
                del locked[at]
            late = self._late.setdefault(key, [])
            late.append(fd)
            if not locked:
                self._bytes.pop(key, None)
                for each in self._late.pop(key):
                    os.close(each)


def _file(fd: int) -> tuple[int, int]:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


_OF_PROCESS = _LocksOfProcess()
