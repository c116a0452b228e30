"""Every error ckptmove raises on purpose, as one tree.

    CkptmoveError
    ├── UsageError        2   the request makes no sense, whatever the file
    │   └── DeviceError   2   no device that torch can load on, or none that is here
    ├── CheckFailed       1   a check the user asked for came out negative
    ├── InputError        3   the input can't be read, or is refused
    │   ├── CorruptError      damaged, truncated or hostile
    │   ├── UnsupportedError  a known thing that this version can't handle
    │   └── UntrustedError    names unknown callables, and `strict` was asked for
    ├── RefusedError      4   nothing was written, on purpose
    └── WriteError        5   writing, verifying or printing failed; no partial file is left

The number is the process exit code. A message is one line without the path; the path and a
hint (what to do next) are attributes, put together only where something is shown.
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
    """Anything that ckptmove raises on purpose.

    Attributes:
        path: the file concerned, or None.
        hint: what the user may do next, or None.
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
        """Name the file concerned, unless somebody nearer to it already has."""
        if self.path is None:
            self.path = os.fspath(path)


class UsageError(CkptmoveError):
    """The request itself makes no sense, whatever the file holds."""

    exit_code = 2


class DeviceError(UsageError, ValueError):
    """A device that torch can't load a checkpoint on, by its spelling or since it isn't here."""


class CheckFailed(CkptmoveError):
    """A check that the user asked for came out negative."""

    exit_code = 1


class InputError(CkptmoveError):
    """The input can't be read, or is refused for what it is."""

    exit_code = 3


class CorruptError(InputError):
    """The input is damaged, truncated, or built to do harm."""


class UnsupportedError(InputError):
    """The input is something known that this version can't handle."""


class UntrustedError(InputError):
    """The input names callables that are not known to be harmless, and that was to be refused."""


class RefusedError(CkptmoveError):
    """Nothing was written, on purpose: it would overwrite, lose or contradict something."""

    exit_code = 4


class WriteError(CkptmoveError):
    """Writing or verifying failed. No partial output is left under the final name.

    Where a change in place can't even be undone, the hint says so, and the journal stays.
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
