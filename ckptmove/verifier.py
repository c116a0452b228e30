"""Verify what a plan has copied, while it is still being copied.

A record with a checksum is proved by it, which also finds damage in the source; everything else is
compared with the source, byte for byte.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

from .errors import CorruptError, WriteError
from .plan import Check, Plan
from .source import Source

#: Called with how many bytes were copied and verified since the last call.
Progress = Callable[[int], object]

_BUFFER = 1 << 17  # bytes read at once: more than a processor's cache holds is slower


class Verifier:
    """Follows the copying, and verifies what is there: by checksum, else against the source."""

    def __init__(self, plan: Plan, source: Source, fd: int, path: str) -> None:
        self._path = path
        self._plan = plan
        self._source = source
        self._fd = fd
        self._marks: SimpleQueue[int | None] = SimpleQueue()
        self._mark = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ckptmove-verify", daemon=True)
        self._error: BaseException | None = None
        self.done = self._taken = 0
        self._buffer, self._other = bytearray(_BUFFER), bytearray(_BUFFER)

    def __enter__(self) -> Verifier:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._marks.put(None)
        self._thread.join()

    def written(self, end: int) -> None:
        """Say that everything before `end` is in its place."""
        self._marks.put(end)

    def take_done(self) -> int:
        """Bytes verified since this was last asked."""
        done = self.done
        self._taken, new = done, done - self._taken
        return new

    def finish(self, report: Progress) -> None:
        """Wait for the rest.

        Raises:
            CorruptError, WriteError: what was found.
        """
        while self._thread.is_alive():
            self._thread.join(0.1)
            report(self.take_done())
        report(self.take_done())
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for check in self._plan.checks():
                if not self._verify(check):
                    return
        except BaseException as error:
            self._error = error

    def _verify(self, check: Check) -> bool:
        crc32, end = 0, check.at + check.nbytes
        for at in range(check.at, end, _BUFFER):
            nbytes = min(_BUFFER, end - at)
            if not self._wait_for(at + nbytes):
                return False
            view = memoryview(self._buffer)[:nbytes]
            if os.preadv(self._fd, [view], at) != nbytes:
                raise self._lost("the bytes that were written can't be read back")
            if check.checksum is not None:
                crc32 = zlib.crc32(view, crc32)
            elif not self._same_in_source(check.source_at + at - check.at, nbytes):
                raise self._lost(f"the {nbytes:,} bytes at offset {at:,} did not arrive")
            self.done += nbytes
        if check.checksum is not None and crc32 != check.checksum.crc32:
            self._blame(check)
        return True

    def _same_in_source(self, at: int, nbytes: int) -> bool:
        other = memoryview(self._other)[:nbytes]
        if os.preadv(self._source.fd, [other], at) != nbytes:
            raise CorruptError("the file shrank while it was read", path=self._source.path)
        if nbytes == _BUFFER:
            return self._buffer == self._other
        return self._buffer[:nbytes] == self._other[:nbytes]

    def _wait_for(self, end: int) -> bool:
        while self._mark < end and not self._stopped:
            mark = self._marks.get()
            if mark is None:
                return False
            self._mark = mark
        return not self._stopped

    def _blame(self, check: Check) -> None:
        """Say who is at fault where a checksum does not match."""
        assert check.checksum is not None
        crc32 = 0
        for at in range(check.source_at, check.source_at + check.nbytes, _BUFFER):
            nbytes = min(_BUFFER, check.source_at + check.nbytes - at)
            crc32 = zlib.crc32(self._source.read(at, nbytes), crc32)
        if crc32 != check.checksum.crc32:
            raise CorruptError(
                f"the record {check.checksum.name!r} is damaged: its checksum is wrong",
                path=self._source.path,
            )
        raise self._lost(f"the record {check.checksum.name!r} did not arrive as it was")

    def _lost(self, message: str) -> WriteError:
        return WriteError(message, path=self._path)
