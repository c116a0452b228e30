"""Find the starts of zips that are concatenated in one file."""

from __future__ import annotations

from ..sources.source import Readable
from .archive import END, END64, END64_MAGIC, END_MAGIC, LOCAL_MAGIC, LOCATOR, LOCATOR_MAGIC

_MOST = 1000  # zips in one file


def zip_starts(source: Readable) -> list[int]:
    """Return the start of each zip, in order; empty if the file has other content.

    Several calls of `torch.save` to one open file write this. Offsets in each zip count from its
    own start.
    """
    starts, end = list[int](), source.nbytes
    while end and len(starts) < _MOST:
        start = _start(source, end)
        if start is None:
            return []
        starts.append(start)
        end = start
    return [] if end else starts[::-1]


def _start(source: Readable, end: int) -> int | None:
    """Return the start of the zip that ends there, without a comment; None if there is none."""
    at = max(0, end - END.size - LOCATOR.size - END64.size)
    tail = source.read(at, end - at)
    if not tail[-END.size :].startswith(END_MAGIC):
        return None
    _, _, _, _, _, nbytes, directory_at, _ = END.unpack(tail[-END.size :])
    behind = END.size
    if tail[-END.size - LOCATOR.size :].startswith(LOCATOR_MAGIC):
        behind = len(tail)
        if behind < END.size + LOCATOR.size + END64.size or not tail.startswith(END64_MAGIC):
            return None
        nbytes, directory_at = END64.unpack_from(tail)[8:10]
    start: int = end - behind - nbytes - directory_at
    return start if start >= 0 and source.read(start, 4) == LOCAL_MAGIC else None
