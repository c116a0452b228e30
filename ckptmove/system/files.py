"""Access to files and folders by descriptor, with replacements for calls that a system lacks.

Linux has all of these calls. macOS lacks `copy_file_range` and an `fsync` that waits for the disk;
Windows lacks reading at an offset, open folders, private mappings as POSIX knows them, and renaming
open files. The docs of Python's `os` and `mmap` say which system has which call.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from . import WINDOWS

#: Whether a file, or a folder with files, can be renamed and removed while the file is open.
RENAMES_OPEN = not WINDOWS
#: Flags for every descriptor: child processes do not inherit it, and no bytes are translated.
_ALWAYS: int = getattr(os, "O_CLOEXEC", getattr(os, "O_NOINHERIT", 0)) | getattr(os, "O_BINARY", 0)
READ = os.O_RDONLY | _ALWAYS
READ_WRITE = os.O_RDWR | _ALWAYS
WRITE = os.O_WRONLY | _ALWAYS
#: Opening a FIFO does not block.
AT_ONCE: int = getattr(os, "O_NONBLOCK", 0)
#: Do not follow links. If this is 0, check for a link first, as `OpenFolder` does.
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_FOLDER: int = getattr(os, "O_DIRECTORY", 0)
_FICLONE = 0x40049409  # linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
#: A descriptor and its duplicates share one position: hold this lock to move it.
_position = threading.Lock()


def optional_module(name: str) -> Any:
    """A module of the standard library, or None where the system lacks it."""
    try:
        return import_module(name)
    except ImportError:
        return None


def most_descriptors() -> int:
    """How many files this process may have open (`ulimit -n`)."""
    limits = optional_module("resource")  # Windows has no such limit, and allows thousands
    if limits is None:
        return sys.maxsize
    most = int(limits.getrlimit(limits.RLIMIT_NOFILE)[0])
    return sys.maxsize if most == limits.RLIM_INFINITY else most


# -- reading and writing at an offset --------------------------------------------------------------


def read_some(fd: int, nbytes: int, at: int) -> bytes:
    """As `os.pread`: fewer bytes at the end of the file, or when a signal comes."""
    if hasattr(os, "pread"):
        data: bytes = os.pread(fd, nbytes, at)
        return data
    with _position:
        os.lseek(fd, at, os.SEEK_SET)
        return os.read(fd, nbytes)


def read_into(fd: int, buffer: bytearray | memoryview, at: int) -> int:
    """Read into a buffer as `os.preadv` does; return the number of bytes read."""
    if hasattr(os, "preadv"):
        nbytes: int = os.preadv(fd, [buffer], at)
        return nbytes
    view = memoryview(buffer)
    done = 0
    while done < len(view):
        part = read_some(fd, len(view) - done, at + done)
        if not part:
            break
        view[done : done + len(part)] = part
        done += len(part)
    return done


def write_some(fd: int, data: bytes | memoryview, at: int) -> int:
    """As `os.pwrite`: return the number of bytes written."""
    if hasattr(os, "pwrite"):
        taken: int = os.pwrite(fd, data, at)
        return taken
    with _position:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, data)


#: Whether the kernel can copy from one file to another.
COPIES: bool = hasattr(os, "copy_file_range")


def copy_range(source: int, to: int, nbytes: int, start: int, at: int) -> int:
    """As `os.copy_file_range`; OSError if the system lacks it."""
    if hasattr(os, "copy_file_range"):
        copied: int = os.copy_file_range(source, to, nbytes, start, at)
        return copied
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def clone(source: int, to: int) -> bool:
    """Make an empty file share the blocks of another, if the file system can."""
    fcntl = optional_module("fcntl")
    if not hasattr(fcntl, "ioctl") or sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(to, _FICLONE, source)
    except OSError:
        return False
    return True


def shares_blocks(folder: str) -> bool:
    """Whether files in a folder can share blocks; tried with unnamed files."""
    opened = list[int]()
    try:
        for _ in range(2):
            flags: int = getattr(os, "O_TMPFILE")  # noqa: B009 it is Linux's
            opened.append(os.open(folder, READ_WRITE | flags, 0o600))
        os.write(opened[0], bytes(1 << 16))
        return clone(*opened)
    except (OSError, AttributeError):
        return False
    finally:
        for fd in opened:
            os.close(fd)


# -- what is on disk -------------------------------------------------------------------------------


def sync(fd: int) -> None:
    """Flush written data to the disk, as `os.fsync` does.

    On macOS, `fsync` leaves the data in the cache of the disk; F_FULLFSYNC does not, but network
    file systems lack it. On Windows, this is FlushFileBuffers, for files open for writing.
    """
    fcntl = optional_module("fcntl")
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


#: File systems of Linux on which `syncfs` waits for the disk and reports errors: ext2 to ext4,
#: XFS, btrfs, F2FS, tmpfs (linux/magic.h).
_SYNCED_WHOLE = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994}
_REPORTS_ERRORS = (5, 8)  # `syncfs` reports errors since this version of Linux


def sync_all(fds: Sequence[int]) -> None:
    """As `sync` of each file; for many files on one file system, by one call if that is as safe.

    That call also waits for data that other processes have written there. Each separate `sync`
    takes one turn of the disk, so for tiny files the one call takes a twentieth of the time.
    """
    done = set[int]()
    for fd in fds:
        device = os.fstat(fd).st_dev
        if device in done:
            continue
        if len(fds) > 1 and _sync_file_system(fd, device):
            done.add(device)
        else:
            sync(fd)


def _sync_file_system(fd: int, device: int) -> bool:
    """Sync the file system of a file, if that is as safe as `sync`. Raises OSError."""
    call = _c_call("syncfs", "c_int")
    if call is None or not _is_synced_whole(fd, device):
        return False
    if call(fd):
        number = import_module("ctypes").get_errno()
        raise OSError(number, os.strerror(number))
    return True


def _is_synced_whole(fd: int, device: int) -> bool:
    if device not in _known_devices:
        release = tuple(map(int, re.findall(r"\d+", import_module("platform").release())[:2]))
        call, kind = _c_call("fstatfs", "c_int", "c_char_p"), 0
        if call is not None and release >= _REPORTS_ERRORS:
            about = import_module("ctypes").create_string_buffer(512)
            if call(fd, about) == 0:  # its first field is a long
                kind = int.from_bytes(about.raw[: struct.calcsize("l")], sys.byteorder)
        _known_devices[device] = kind in _SYNCED_WHOLE
    return _known_devices[device]


_known_devices: dict[int, bool] = {}  # by the number of the file system: can it be synced whole?


def start_sync(fd: int, at: int, nbytes: int) -> None:
    """Start writing a range to the disk. If the system lacks the call, does nothing."""
    call = _c_call("sync_file_range", "c_int", "c_int64", "c_int64", "c_uint")
    if call is not None:
        call(fd, at, nbytes, _SYNC_FILE_RANGE_WRITE)


@cache
def _c_call(name: str, *types: str) -> Callable[..., int] | None:
    """Return a function of Linux' C library, with the types of its arguments; None if missing."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes  # not every Python has it, and importing it is slow

        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    call.argtypes = tuple(getattr(ctypes, each) for each in types)
    found: Callable[..., int] = call
    return found


def data_range(fd: int, at: int) -> tuple[int, int]:
    """Return the next range from an offset that is not a hole; OSError if the system cannot tell.

    ENXIO says that only a hole is left.
    """
    whence: tuple[int | None, int | None]
    whence = getattr(os, "SEEK_DATA", None), getattr(os, "SEEK_HOLE", None)
    if whence[0] is not None and whence[1] is not None:
        data = os.lseek(fd, at, whence[0])
        return data, os.lseek(fd, data, whence[1])
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def allocated_nbytes(about: os.stat_result) -> int:
    """The bytes that a file takes on disk; its size, if the system does not tell."""
    blocks: int | None = getattr(about, "st_blocks", None)
    return about.st_size if blocks is None else blocks * 512


def free_nbytes(path: str, fd: int | None = None) -> int:
    """How many bytes this user may still write to the file system of a file or folder."""
    if not hasattr(os, "statvfs"):
        import shutil  # only needed if the system lacks `statvfs`

        return shutil.disk_usage(path).free
    room = os.statvfs(path if fd is None else fd)
    return int(room.f_frsize * (room.f_bavail if user() else room.f_bfree))


def is_read_only(path: str) -> bool:
    """Whether a file system is mounted read-only, if the system tells."""
    if not hasattr(os, "statvfs"):
        return False
    return bool(os.statvfs(path).f_flag & getattr(os, "ST_RDONLY", 0))


def user() -> int:
    """The user ID; 0 on systems without user IDs, where files have owner 0 too."""
    return int(os.geteuid()) if hasattr(os, "geteuid") else 0


# -- mappings --------------------------------------------------------------------------------------

# Writable pages count as memory, and the file may be larger than the memory.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def map_file(fd: int, nbytes: int, at: int = 0, *, written: bool = False) -> mmap.mmap:
    """Map a part of a file into memory. With `written`, it is writable; writing changes no file."""
    if hasattr(mmap, "MAP_PRIVATE"):
        pages: Any = mmap
        flags = pages.MAP_PRIVATE | (_NORESERVE if written else 0)
        protection = pages.PROT_READ | (pages.PROT_WRITE if written else 0)
        return mmap.mmap(fd, nbytes, flags, protection, offset=at)
    access = mmap.ACCESS_COPY if written else mmap.ACCESS_READ
    return mmap.mmap(fd, nbytes, access=access, offset=at)


# -- folders ---------------------------------------------------------------------------------------


class OpenFolder:
    """A folder kept open, so that renaming it does no harm; if the system can't, only its path."""

    def __init__(self, path: str) -> None:
        """Raises OSError if it can't be opened."""
        self.fd: int | None = None
        self._path = os.path.abspath(path or ".")
        called = {os.open, os.mkdir, os.rename, os.stat, os.unlink}
        if _FOLDER and called <= os.supports_dir_fd:
            self.fd = os.open(path or ".", READ | _FOLDER)
        elif not os.path.isdir(self._path):
            os.stat(self._path)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def _at(self, name: str) -> str:
        return name if self.fd is not None else os.path.join(self._path, name)

    def open(self, name: str, flags: int, mode: int = 0o777) -> int:
        """As `os.open`; a link is an OSError."""
        if not NO_LINK and os.path.islink(self._at(name)):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return os.open(self._at(name), flags | NO_LINK, mode, dir_fd=self.fd)

    def stat(self, name: str) -> os.stat_result:
        """As `os.lstat`."""
        return os.stat(self._at(name), dir_fd=self.fd, follow_symlinks=False)

    def mkdir(self, name: str, mode: int) -> None:
        """As `os.mkdir`."""
        os.mkdir(self._at(name), mode, dir_fd=self.fd)

    def rmdir(self, name: str) -> None:
        """As `os.rmdir`."""
        os.rmdir(self._at(name), dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """As `os.unlink`."""
        os.unlink(self._at(name), dir_fd=self.fd)

    def replace(self, old: str, new: str) -> None:
        """As `os.replace`: an existing file with the name is replaced."""
        os.replace(self._at(old), self._at(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        """As `os.rename`: on POSIX it replaces; on Windows it fails if the name is taken."""
        os.rename(self._at(old), self._at(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def take_name(self, old: str, new: str) -> None:
        """Give a file a new name that must be free; FileExistsError if it is taken.

        By a hard link, or by a rename that never replaces. Without both, it checks whether the name
        is free just before the rename.
        """
        unable: OSError | None = None
        if hasattr(os, "link"):
            try:
                os.link(self._at(old), self._at(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                unable = error
            else:
                self.unlink(old)
                return
        with contextlib.suppress(FileNotFoundError):
            self.stat(new)
            raise FileExistsError(errno.EEXIST, "exists") from unable
        self.rename(old, new)

    def sync(self) -> None:
        """Flush the names in the folder to disk, if a folder can be synced; Windows cannot."""
        if self.fd is not None:
            sync(self.fd)

    def sync_inside(self, name: str) -> None:
        """Flush the names in a subfolder to disk."""
        if self.fd is not None:
            inner = os.open(name, READ | _FOLDER, dir_fd=self.fd)
            try:
                sync(inner)
            finally:
                os.close(inner)

    def close(self) -> None:
        """Close it."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


#: Error numbers of a file system that does not support a call at all.
NOT_HERE = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ENOTTY}


def with_those_above(folders: Iterable[str], root: str) -> set[str]:
    """Return folders and their parents, up to the root: the parents may be new as well."""
    found, top = set[str](), os.path.abspath(root)
    for folder in folders:
        while folder not in found:
            found.add(folder)
            if folder == top or not folder.startswith(top):
                break
            folder = os.path.dirname(folder)
    return found


def sync_folder(path: str) -> None:
    """Put the names in a folder on disk, or raise OSError."""
    folder = OpenFolder(path)
    try:
        folder.sync()
    finally:
        folder.close()
