"""Files that a batch writes beside its outputs: the log, and the manifest of digests."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from ...errors import WriteError
from ...reports.batch.items import Result
from ...reports.batch.log import log_line, manifest_lines
from ...system.files import sync
from ...version import __version__


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


def write_manifest(path: str, digests: Mapping[str, str]) -> None:
    """Write a file that `sha256sum -c` reads, complete or not at all. Raises WriteError."""
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        try:
            with Path(beside).open(
                "w", encoding="utf-8", errors="surrogateescape", newline="\n"
            ) as file:
                file.writelines(manifest_lines(digests))
                file.flush()
                sync(file.fileno())
            Path(beside).replace(path)
        finally:
            Path(beside).unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"the manifest can't be written: {error.strerror}", path=path) from error
