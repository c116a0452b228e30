"""The address space of this process, and whether it is limited."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any


def is_limited() -> bool:
    """Whether the address space of this process is limited (`ulimit -v`)."""
    try:
        import resource
    except ImportError:  # of Windows, which has other limits
        return False
    limits: Any = resource
    return bool(limits.getrlimit(limits.RLIMIT_AS)[0] != limits.RLIM_INFINITY)


def address_space() -> int:
    """The bytes of address space that this process uses; 0 if the system does not tell."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        import mmap

        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    return 0
