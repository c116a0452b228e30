"""Files that a batch writes beside its outputs: the log, the manifest of digests, and others."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from ...errors import RefusedError, WriteError
from ...reports.batch.items import Result
from ...reports.batch.log import log_line, manifest_lines
from ...system.files import sync
from ...version import __version__

_HEAD_NBYTES = 100  # of a file, to see what it is


class Log:
    """A log file with a line for each item, if requested. If writing fails, the batch continues."""

    def __init__(self, path: str | None, verb: str, shard: str | None) -> None:
        """Raises WriteError if it can't be opened."""
        self.error: WriteError | None = None
        self._about = {
            "host": socket.gethostname(),
            "shard": shard,
            "version": __version__,
            "verb": verb,
        }
        self._path = path
        self._file: IO[str] | None = None
        if path is not None:
            try:
                torn = _is_torn(Path(path))
                self._file = Path(path).open("a", encoding="utf-8", newline="\n")  # noqa: SIM115 until we end
                if torn:
                    self._file.write("\n")
            except OSError as error:
                raise self._write_error(error) from error

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *raised: object) -> None:
        self._close()

    def add(self, result: Result) -> None:
        """Add a line with the result of an item."""
        if self._file is None:
            return
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        try:
            self._file.write(log_line(result, time=time, **self._about).text() + "\n")
            self._file.flush()
        except OSError as error:
            self.error = self._write_error(error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # its error was reported
                file.close()

    def _write_error(self, error: OSError) -> WriteError:
        return WriteError(f"the log can't be written: {error.strerror}", path=self._path)


def _is_torn(path: Path) -> bool:
    """Whether the last line of a log is incomplete; raises OSError if the file is not a log."""
    if path.is_fifo():
        raise OSError(errno.EINVAL, "it is no file")
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        if file.read(1) != b"{":
            raise OSError(errno.EINVAL, "it is not a log of ckptmove batch")
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class ReplacedFile:
    """A text file that is replaced as a whole, and only if a batch wrote the one that is there."""

    def __init__(self, path: str, kind: str, start: bytes) -> None:
        """`start` is a pattern of how such files begin. Raises RefusedError for any other file."""
        self._path, self._kind = Path(path), kind
        if os.path.lexists(path) and not _begins(self._path, start):
            raise RefusedError(f"exists, and is not a {kind} file of ckptmove batch", path=path)

    def write(self, lines: Iterable[str], *, synced: bool = False) -> None:
        """Write the file, complete or not at all. Raises WriteError."""
        path = self._path
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            try:
                with beside.open(
                    "w", encoding="utf-8", errors="surrogateescape", newline="\n"
                ) as file:
                    file.writelines(lines)
                    file.flush()
                    if synced:
                        sync(file.fileno())
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            said = f"the {self._kind} can't be written: {error.strerror}"
            raise WriteError(said, path=str(path)) from error


def _begins(path: Path, start: bytes) -> bool:
    """Whether a regular file is empty, or begins with a pattern."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_NBYTES)
    except OSError:
        return False
    return not head or re.match(start, head) is not None


class ChecksumFile(ReplacedFile):
    """The SHA-256 of the files in the destination, as `sha256sum -c` reads it."""

    def __init__(self, path: str, dst: str) -> None:
        """Raises WriteError if its folder is missing and is not one that the batch may make."""
        super().__init__(path, "manifest", rb"\\?[0-9a-f]{64} [ *]")
        folder = Path(path).absolute().parent
        if not folder.is_dir() and not folder.is_relative_to(Path(dst).absolute()):
            said = f"the manifest can't be written: {os.strerror(errno.ENOENT)}"
            raise WriteError(said, path=path)

    def write_digests(self, digests: Mapping[str, str]) -> None:
        """Write the digests of files, by their names in the destination. Raises WriteError."""
        self.write(manifest_lines(digests), synced=True)
