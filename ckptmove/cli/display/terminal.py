"""Find the width of the terminal and whether it shows colors; draw a bar on it.

A pipe has no width and no colors. `COLUMNS` overrides the width. `NO_COLOR` and `TERM=dumb` disable
colors (no-color.org), `FORCE_COLOR` enables them for a pipe too; if both are set, colors are
disabled.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import IO, Any

from ...display.blocks import Terminal

_LEAST_WIDTH = 40  # letters
_USUAL = 80, 24  # columns, lines: if a terminal does not report its size (docker run -t)


def terminal_of(stream: IO[str], *, full: bool = False) -> Terminal:
    """Return the properties of a stream's terminal; with `full`, nothing is shortened."""
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
    """Return a tqdm bar on stderr for this many bytes; it is removed at the end."""
    from tqdm import tqdm  # imported only here: it is slow

    tqdm.monitor_interval = 0  # no monitor thread: the bar is redrawn often anyway
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
    """The width that the user sets in COLUMNS, as in POSIX; 0 if there is none."""
    said = os.environ.get("COLUMNS", "")
    return int(said) if re.fullmatch("[0-9]{1,6}", said) else 0
