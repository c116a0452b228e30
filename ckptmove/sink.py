"""Carry out a plan so that the destination appears whole and verified, or not at all.

What is written goes to a file of another name beside the destination. It takes the final name only
once every byte of it has been verified and is on disk, and then in one step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from types import TracebackType

from .errors import CorruptError, RefusedError, StrPath, WriteError
from .plan import Copy, Plan
from .source import Source
from .verifier import Progress, Verifier

_EXISTS_HINT = "--force replaces it, -o names another"
_STRIDE = 64 << 20  # bytes handed to the kernel at once
_BUFFER = 1 << 20  # bytes read at once
_FICLONE = 0x40049409  # linux/fs.h
_NOT_HERE = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ENOTTY}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


class Staged:
    """A file in the making. Used as a context, it is gone at the end unless it was committed."""

    def __init__(self, destination: StrPath, source: Source, *, force: bool) -> None:
        """Create the file under a name of its own.

        Raises:
            RefusedError: the destination exists (and `force` is not set), is the source, or is
                where nothing can be written.
        """
        self.path = os.fspath(destination)
        self.source = source
        self.force = force
        folder, self.name = os.path.split(self.path)
        check_destination(self.path, source, force=force)
        self._folder = self._open_folder(folder or ".")
        stem = os.fsdecode(os.fsencode(self.name)[:200])
        self._temporary = f".{stem}.{os.urandom(4).hex()}.ckptmove-tmp"
        self.committed = False
        try:
            self.fd = os.open(
                self._temporary,
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                source.mode | 0o200,
                dir_fd=self._folder,
            )
        except BaseException as error:  # a signal may come after the file did
            self._remove()
            os.close(self._folder)
            if isinstance(error, OSError):
                raise failure_of(error, self.path) from error
            raise

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._folder)

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.committed:
            self._remove()
        try:
            os.close(self.fd)
            os.close(self._folder)
        except OSError as error_at_end:
            if kind is None:
                raise WriteError(
                    f"closing failed: {error_at_end.strerror}", path=self.path
                ) from error_at_end

    # -- opening -------------------------------------------------------------------------------

    def _open_folder(self, folder: str) -> int:
        try:
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise failure_of(error, self.path) from error

    # -- writing -------------------------------------------------------------------------------

    def write(self, plan: Plan, progress: Progress | None = None) -> str:
        """Carry out the plan and verify every byte; gives how the bytes were copied.

        Args:
            plan: what to write.
            progress: called with bytes as they are copied and verified; they add up to the size.

        Returns:
            `reflink` (the file system shares the blocks), `kernel` or `read` and write.

        Raises:
            CorruptError: the source is damaged, by its own checksums, or changed meanwhile.
            RefusedError: there is no room.
            WriteError: the bytes can't be written, or did not arrive.
        """
        report = progress or (lambda nbytes: None)
        try:
            cloned = plan.is_clone and self._reflink()
            if not cloned:
                _refuse_if_full(os.fstatvfs(self.fd), plan, self.source, self.path)
                os.ftruncate(self.fd, plan.nbytes)
            with Verifier(plan, self.source, self.fd, self.path) as verifier:
                method = "reflink" if cloned else self._copy_all(plan, verifier, report)
                self._patch(plan)
                verifier.written(plan.nbytes)
                os.fsync(self.fd)
                verifier.finish(report)
            report(plan.nbytes - verifier.done)
        except OSError as error:
            raise failure_of(error, self.path) from error
        self.source.check_unchanged()
        return method

    def _reflink(self) -> bool:
        try:
            fcntl.ioctl(self.fd, _FICLONE, self.source.fd)
        except OSError:
            return False
        return True

    def _patch(self, plan: Plan) -> None:
        for at, data in plan.writes:
            write_at(self.fd, at, data)
            if read_at(self.fd, at, len(data)) != data:
                raise WriteError("the bytes that were written can't be read back", path=self.path)

    def _copy_all(self, plan: Plan, verifier: Verifier, report: Progress) -> str:
        copier = _Copier(self.source, self.fd)
        for copy in plan.copies:
            for done in copier.copy(copy):
                verifier.written(copy.at + done)
                report(verifier.take_done())
        return copier.method

    def reopen(self) -> Source:
        """The file as it stands, to be read like any other."""
        return Source(os.dup(self.fd), self.path)

    # -- committing ----------------------------------------------------------------------------

    def commit(self) -> None:
        """Give the file its name, at once and for good.

        Raises:
            RefusedError: the name was taken meanwhile.
            WriteError: the file system refused.
        """
        try:
            if self.force:
                self._rename()
            else:
                self._link()
        except OSError as error:
            if error.errno == errno.EEXIST:
                raise RefusedError(
                    "the destination exists", path=self.path, hint=_EXISTS_HINT
                ) from error
            raise WriteError(f"committing failed: {error.strerror}", path=self.path) from error
        try:
            os.fsync(self._folder)
        except OSError as error:
            raise WriteError(
                f"is whole and in its place, but may not survive a power cut: {error.strerror}",
                path=self.path,
            ) from error

    def _rename(self) -> None:
        os.rename(self._temporary, self.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.committed = True

    def _link(self) -> None:
        """Take the name only if nobody has it, which a rename can't promise."""
        try:
            os.link(self._temporary, self.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            if os.path.lexists(self.path):
                raise FileExistsError(errno.EEXIST, "exists") from error
            self._rename()
            return
        os.unlink(self._temporary, dir_fd=self._folder)
        self.committed = True


def check_destination(destination: StrPath, source: Source, *, force: bool) -> None:
    """Raises RefusedError if the destination must not be written, before anything is."""
    path = os.fspath(destination)
    if not os.path.basename(path):
        raise RefusedError("the destination is a directory", path=path)
    folder = os.path.dirname(path) or "."
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except (OSError, ValueError) as error:
        raise failure_of(error, path) from error
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise failure_of(error, path) from error
    if source.same_file(path):
        raise RefusedError("the destination is the source itself", path=path)
    if stat.S_ISDIR(mode):
        raise RefusedError("the destination is a directory", path=path)
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise RefusedError("the destination exists and is no file", path=path)
    if not force:
        raise RefusedError("the destination exists", path=path, hint=_EXISTS_HINT)


def check_room(destination: StrPath, plan: Plan, source: Source) -> None:
    """Raises RefusedError where writing would fail, as far as that can be known without it."""
    path = os.fspath(destination)
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedError("can't be written: the directory takes no files", path=path)
    _refuse_if_full(os.statvfs(folder), plan, source, path)


def _refuse_if_full(room: os.statvfs_result, plan: Plan, source: Source, path: str) -> None:
    free = room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)
    needed = min(plan.nbytes, source.allocated_nbytes)
    if needed > free:
        raise RefusedError(
            f"there is no room: {needed:,} bytes are needed, {free:,} are free", path=path
        )


def failure_of(error: OSError | ValueError, path: str) -> RefusedError | WriteError:
    """What the system said, as an error of ours."""
    if isinstance(error, ValueError):
        return RefusedError("the destination is not a path", path=path)
    if error.errno in _FORBIDDEN:
        return RefusedError(f"can't be written: {error.strerror}", path=path)
    return WriteError(f"writing failed: {error.strerror}", path=path)


class _Copier:
    """Copies extents of the source, by the kernel where it can, and keeps holes."""

    def __init__(self, source: Source, fd: int) -> None:
        self.source = source
        self.fd = fd
        self.method = "kernel" if hasattr(os, "copy_file_range") else "read"

    def copy(self, copy: Copy) -> Iterator[int]:
        """Copy one extent; gives again and again how much of it is done."""
        for start, end in self.source.data_ranges(copy.source_at, copy.source_at + copy.nbytes):
            at = start
            while at < end:
                moved = self._move(at, min(_STRIDE, end - at), copy.at + at - copy.source_at)
                if moved == 0:
                    raise CorruptError("the file shrank while it was read", path=self.source.path)
                self._start_writeback(copy.at + at - copy.source_at, moved)
                at += moved
                yield at - copy.source_at
        yield copy.nbytes  # with the hole that may be at the end

    def _start_writeback(self, at: int, nbytes: int) -> None:
        """Have the disk begin with what was copied, while the rest is: the fsync then waits less.

        This is what the advice does to dirty pages on Linux (mm/fadvise.c); elsewhere it may do
        nothing, and nothing depends on it.
        """
        if nbytes >= _BUFFER and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, at, nbytes, os.POSIX_FADV_DONTNEED)

    def _move(self, start: int, nbytes: int, at: int) -> int:
        if self.method == "kernel":
            try:
                return os.copy_file_range(self.source.fd, self.fd, nbytes, start, at)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                self.method = "read"
        data = os.pread(self.source.fd, min(nbytes, _BUFFER), start)
        return os.pwrite(self.fd, data, at)


def write_at(fd: int, at: int, data: bytes) -> None:
    """Write all of it at an offset, however little is taken at once."""
    view = memoryview(data)
    while view:
        view = view[os.pwrite(fd, view, at + len(data) - len(view)) :]


def read_at(fd: int, at: int, nbytes: int) -> bytes:
    """The bytes at an offset; fewer where the file ends."""
    parts = []
    while nbytes:
        part = os.pread(fd, nbytes, at)
        if not part:
            break
        parts.append(part)
        at, nbytes = at + len(part), nbytes - len(part)
    return b"".join(parts)
