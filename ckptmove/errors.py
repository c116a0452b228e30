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

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

StrPath = str | os.PathLike[str]

_P = ParamSpec("_P")
_R = TypeVar("_R")


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


def accept_former_names(**current: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Accept keyword arguments under the names that they had in earlier versions, with a warning.

    Args:
        current: former name → the name now.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with_current_names(kwargs, current)
            return function(*args, **kwargs)

        wrapper.former_names = current  # type: ignore[attr-defined]
        return wrapper

    return decorate


def with_current_names(arguments: dict[str, Any], current: Mapping[str, str]) -> None:
    """Rename arguments that are given under a former name.

    Raises:
        UsageError: an argument is given under both names.
    """
    for old, new in current.items():
        if old not in arguments:
            continue
        if new in arguments:
            raise UsageError(f"{old} is the former name of {new}; both are given")
        arguments[new] = arguments.pop(old)
        warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=3)
