"""What the terminal is: how wide, and whether it shows colors; a bar on it.

A pipe has no width and no colors. `COLUMNS` is a width that the terminal does not have. `NO_COLOR`
and `TERM=dumb` take colors away (no-color.org), `FORCE_COLOR` gives them to a pipe too; where both
are set, there are none.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import IO, Any

from ...reports.display.blocks import Terminal

_LEAST_WIDTH = 40  # letters
_USUAL = 80, 24  # letters, lines: of a terminal that does not say so, such as one of docker run -t


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


def byte_bar(total: int, label: str | None = None) -> Any:
    """A bar on stderr for so many bytes, as tqdm has it; it is gone at the end."""
    from tqdm import tqdm  # only here: it takes a while to import

    tqdm.monitor_interval = 0  # it takes no thread: the bar is drawn again and again
    return tqdm(
        total=total,
        desc=label,
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        leave=False,
        ncols=terminal_of(sys.stderr).width or _USUAL[0],
        nrows=_USUAL[1],
    )


def _columns() -> int:
    """The width that the user asks for, as POSIX has it; 0 for none."""
    said = os.environ.get("COLUMNS", "")
    return int(said) if re.fullmatch("[0-9]{1,6}", said) else 0
