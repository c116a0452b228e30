"""What the terminal is: how wide, and whether it shows colors.

A pipe has no width and no colors. `COLUMNS` is a width that the terminal does not have. `NO_COLOR`
and `TERM=dumb` take colors away (no-color.org), `FORCE_COLOR` gives them to a pipe too; where both
are set, there are none.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import IO

from ...reports.display.blocks import Terminal

_LEAST_WIDTH = 40  # letters


def terminal_of(stream: IO[str], *, full: bool = False) -> Terminal:
    """What a stream leads to; `full` shortens nothing."""
    shown = stream.isatty()
    color = bool(os.environ.get("FORCE_COLOR")) or (shown and os.environ.get("TERM") != "dumb")
    width = None
    if shown and not full:
        with contextlib.suppress(OSError, ValueError):
            width = _columns() or os.get_terminal_size(stream.fileno()).columns or None
    if width is not None:
        width = max(width, _LEAST_WIDTH)
    return Terminal(width, color and not os.environ.get("NO_COLOR"))


def _columns() -> int:
    """The width that the user asks for, as POSIX has it; 0 for none."""
    said = os.environ.get("COLUMNS", "")
    return int(said) if re.fullmatch("[0-9]{1,6}", said) else 0
