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

    part_nbytes: int  #: the size of its parts, but for the last
    at_once: int  #: how many may be put at the same time, in any order; where it is one, in theirs

    def begin(self) -> None:
        """Get ready for parts; forget earlier ones. All methods raise as `with_write_retries`."""

    def put(self, number: int, data: BytesIO) -> None:
        """Bring a part there; the first has the number 1. What had its number is replaced."""

    def copy(self, number: int, part: StoreCopy) -> None:
        """As `put`, of a part that the store copies. Raises NotCopiedError if it can't."""

    def stop(self) -> None:
        """Have parts that are on their way fail soon."""

    def complete(self, *, exclusive: bool) -> Mapping[str, Any]:
        """Make an object of the parts; gives what the store says of it.

        If `exclusive`, only where nothing is, if the store can promise that. Raises WriteError if
        the object is not what was sent; it was removed, or the message says why not.
        """

    def abort(self) -> None:
        """Forget all parts; nothing happens if it was completed, or never begun."""


class NotCopiedError(Exception):
    """A store can't copy a part itself: all of it has to be sent."""


def send(upload: Upload, parts: Iterator[BytesIO | StoreCopy], report: ProgressCounter) -> None:
    """Put all parts, as many at once as may be; tells when they have arrived."""
    running = dict[Future[None], int]()

    def settle(most: int) -> None:
        while len(running) > most:
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                each.result()
                report(running.pop(each))

    pool = ThreadPoolExecutor(upload.at_once, "ckptmove-upload")
    try:
        for number in count(1):
            part = next(parts, None)  # a loop over them would hold on to one while it waits
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
    """The size of parts that makes them few enough."""
    return max(PART_NBYTES, -(-nbytes // _MOST_PARTS))
