"""Turn `os._exit` in user code into an exception, so that a report can still be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NoReturn


@contextlib.contextmanager
def exits_raised() -> Iterator[None]:
    """A context in which `os._exit` in this process raises SystemExit, like `sys.exit`."""
    before, own = os._exit, os.getpid()

    def leave(status: Any = 0) -> NoReturn:
        if os.getpid() != own:  # a fork, which has nothing to report
            before(status)
        raise SystemExit(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = before
