"""Write to stdout and stderr, and handle their failures.

A result that cannot be printed is an error like any other; a reader that closes the pipe early is
not. A failure of stderr must never make a command fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, NoReturn

from ...errors import WriteError
from ...system.signals import PIPE, SignalReceived


class _Remarks(io.TextIOWrapper):
    """stderr: write errors are ignored."""

    def __init__(self, fd: int, stream: IO[str] | None) -> None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        super().__init__(
            os.fdopen(fd, "wb", closefd=False), encoding, "backslashreplace", line_buffering=fd == 2
        )

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.on_failure(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.on_failure(error)

    def on_failure(self, error: OSError) -> None:
        """Write nothing more after a failure, not even the buffered rest at the end."""
        _lead_nowhere(self.fileno())


class _Result(_Remarks):
    """stdout: write errors become WriteError; a broken pipe ends the process with SIGPIPE."""

    def on_failure(self, error: OSError) -> NoReturn:
        """Raise the failure as our error, or end the process as a broken pipe does."""
        super().on_failure(error)
        if isinstance(error, BrokenPipeError):
            raise SignalReceived(PIPE) from None
        raise WriteError(f"output failed: {error.strerror}") from error


def _lead_nowhere(fd: int, flags: int = os.O_RDWR) -> None:
    opened = os.open(os.devnull, flags)
    if opened != fd:
        os.dup2(opened, fd)
        os.close(opened)


def take_streams() -> None:
    """Print through the streams above from now on, for the rest of the process."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # closed: a file opened later must not get this descriptor
            # A lost result is an error, so the replacement of stdout can't be written.
            _lead_nowhere(fd, os.O_RDONLY if fd == 1 else os.O_RDWR)
    sys.stdout = _Result(1, sys.stdout)
    sys.stderr = _Remarks(2, sys.stderr)


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Send the output of other code to stderr, so that stdout has only our result."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
