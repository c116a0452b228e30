"""Have code of the user that ends the process fail instead, so that there is a report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NoReturn


@contextlib.contextmanager
def exits_raised() -> Iterator[None]:
    """Within it, `os._exit` in this process raises SystemExit, as `sys.exit` does."""
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
