"""Send parts to a store, several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from io import BytesIO
from itertools import count
from typing import Any, Protocol

from ..execute import ProgressCounter
from .server_copy import StoreCopy

PART_NBYTES = 16 << 20
_MOST_PARTS = 10_000


class Upload(Protocol):
    """An upload in progress, which is not visible yet."""

    part_nbytes: int  #: the size of its parts, except the last
    at_once: int  #: how many parts may be put at the same time, in any order; if 1, then in order

    def begin(self) -> None:
        """Prepare for parts; forget earlier ones. All methods raise as `with_write_retries`."""

    def put(self, number: int, data: BytesIO) -> None:
        """Upload a part; the first has number 1. It replaces an earlier part of that number."""

    def copy(self, number: int, part: StoreCopy) -> None:
        """As `put`, for a part that the store copies itself. Raises NotCopiedError if it can't."""

    def stop(self) -> None:
        """Make parts that are on their way fail soon."""

    def complete(self, *, exclusive: bool) -> Mapping[str, Any]:
        """Make an object of the parts; return the store's description of it.

        If `exclusive`, only if no object is there, where the store can promise that. Raises
        WriteError if the object differs from what was sent; it was removed, or the message says why
        not.
        """

    def abort(self) -> None:
        """Remove all parts; does nothing if the upload was completed or never begun."""


class NotCopiedError(Exception):
    """A store can't copy a part itself: all of it has to be sent."""


def send(upload: Upload, parts: Iterator[BytesIO | StoreCopy], report: ProgressCounter) -> None:
    """Upload all parts, as many at once as allowed; report those that have arrived."""
    running = dict[Future[None], int]()

    def settle(most: int) -> None:
        while len(running) > most:
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                each.result()
                report(running.pop(each))

    pool = ThreadPoolExecutor(upload.at_once, "ckptmove-upload")
    try:
        for number in count(1):
            part = next(parts, None)  # a `for` loop would keep a part in memory while it waits
            if part is None:
                break
            settle(upload.at_once - 1)
            if isinstance(part, StoreCopy):
                running[pool.submit(upload.copy, number, part)] = part.nbytes
            else:
                running[pool.submit(upload.put, number, part)] = part.getbuffer().nbytes
            del part
        settle(0)
    except BaseException:
        upload.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def part_nbytes_for(nbytes: int) -> int:
    """Return a part size that keeps the number of parts within the limit."""
    return max(PART_NBYTES, -(-nbytes // _MOST_PARTS))
