"""All errors that ckptmove raises on purpose, with their exit codes.

    CkptmoveError
    ├── UsageError        2   the request makes no sense, whatever the file holds
    │   └── DeviceError   2   the name of a device is not valid, or this machine lacks the device
    ├── CheckFailed       1   a check that the user asked for failed
    ├── InputError        3   the input cannot be read, or is refused
    │   ├── CorruptError      damaged, truncated or hostile
    │   ├── UnsupportedError  a known kind of input that this version cannot handle
    │   └── UntrustedError    names unknown callables, and `strict` is set
    ├── RefusedError      4   nothing was written, on purpose
    └── WriteError        5   writing, verifying or printing failed; no partial file is left

The number is the exit code of the process. A message is one line without the path. The path and a
hint (what to do next) are attributes; they are joined only where an error is shown.
"""

from __future__ import annotations

import errno
import os

StrPath = str | os.PathLike[str]


class CkptmoveError(Exception):
    """The base class of all errors that ckptmove raises on purpose.

    Attributes:
        path: the file that the error is about, or None.
        hint: what the user can do next, or None.
        exit_code: the exit code of the command line for this error.
    """

    exit_code = 70

    def __init__(
        self, message: str, *, path: StrPath | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
        self.hint = hint

    def about(self, path: StrPath) -> None:
        """Set the path that the error is about, unless it is set already."""
        if self.path is None:
            self.path = os.fspath(path)


class UsageError(CkptmoveError):
    """The request makes no sense, whatever the file holds."""

    exit_code = 2


class DeviceError(UsageError, ValueError):
    """The name of a device is not valid, or this machine does not have the device."""


class CheckFailed(CkptmoveError):
    """A check that the user asked for failed."""

    exit_code = 1


class InputError(CkptmoveError):
    """The input cannot be read, or is refused because of what it is."""

    exit_code = 3


class CorruptError(InputError):
    """The input is damaged, truncated, or built to do harm."""


class UnsupportedError(InputError):
    """The input is of a known kind that this version cannot handle."""


class UntrustedError(InputError):
    """The input names callables not known to be harmless, and `strict` is set."""


class RefusedError(CkptmoveError):
    """Nothing was written, on purpose: it would overwrite, lose or contradict something."""

    exit_code = 4


class WriteError(CkptmoveError):
    """Writing or verifying failed; no partial output is left under the final name.

    If a change in place cannot be undone either, the hint says so, and the journal is kept.
    """

    exit_code = 5


def descriptor_error(error: Exception) -> InputError | None:
    """The error to show if no more files can be opened, for which even an import fails; or None."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return InputError("no more files can be opened at the same time", hint="raise ulimit -n")
    return None
