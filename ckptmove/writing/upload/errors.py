"""Turn errors of object stores into ours, and run calls that signals must not interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ...display.phrases import format_error
from ...errors import CkptmoveError, InputError, RefusedError, WriteError
from ...sources.filesystem import status_of, with_retries

_T = TypeVar("_T")
_UNWRITABLE = (NotImplementedError, ValueError, TypeError, IsADirectoryError, NotADirectoryError)


def failure(error: BaseException, url: str) -> CkptmoveError:
    """Convert an error of a store while writing into one of ours."""
    status = status_of(error)
    if isinstance(error, PermissionError) or status in (401, 403):
        return RefusedError(f"can't be written: access is denied ({format_error(error)})", path=url)
    if "Credentials" in type(error).__name__:
        return RefusedError("can't be written: there are no credentials for it", path=url)
    if isinstance(error, FileNotFoundError) or status == 404:
        return RefusedError(
            f"can't be written: its bucket or container does not exist ({format_error(error)})",
            path=url,
        )
    if isinstance(error, _UNWRITABLE):
        return RefusedError(f"can't be written there: {format_error(error)}", path=url)
    return WriteError(f"writing failed: {format_error(error)}", path=url)


def with_write_retries(call: Callable[[], _T], url: str) -> _T:
    """Make a write call to a store; retry after a transient error.

    Raises RefusedError if nothing can be written there, WriteError for other errors.
    """
    try:
        return with_retries(call, url)
    except InputError as error:
        cause = error.__cause__ or error
        said = failure(cause, url)
        said.hint = error.hint
        raise said from cause


def is_gone(error: RefusedError) -> bool:
    """Whether an error of `with_write_retries` says that the object or upload does not exist."""
    cause = error.__cause__
    return isinstance(cause, FileNotFoundError) or (cause is not None and status_of(cause) == 404)


def uninterruptible(call: Callable[[], _T]) -> _T:
    """Make a call that delays signals: only at its end is it known what to undo."""
    given = list[_T]()
    raised = list[BaseException]()

    def run() -> None:
        try:
            given.append(call())
        except BaseException as error:
            raised.append(error)
        finally:
            ended.set()

    ended = threading.Event()
    thread = threading.Thread(target=run, name="ckptmove-ask", daemon=True)
    try:
        thread.start()
        ended.wait()  # after a signal, join takes a running thread for ended
    except BaseException:
        if thread in threading.enumerate():
            ended.wait()
        raise
    if raised:
        raise raised[0]
    return given[0]
