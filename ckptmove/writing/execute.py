"""Execute a plan into a new file, and verify every byte of it."""

from __future__ import annotations

import contextlib
import heapq
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import TypeVar

from ..errors import UnsupportedError, WriteError
from ..plans.plan import Copy, Gather, Plan, Write
from ..sources.file import File
from ..sources.place import stamp_of
from ..sources.source import Source
from ..system.files import READ, READ_WRITE, OpenFolder, clone, free_nbytes, sync
from ..system.locks import lock_file
from .copy import Copier, WriteRun, put, start_writeback
from .final_name import check_free_space, failure_of, mode_from
from .running_checksums import RunningChecksums, SummedSource
from .verify import Progress, Verifier

_Self = TypeVar("_Self", bound="PlanFile")
_SUMS: ContextVar[dict[str, int] | None] = ContextVar("_SUMS", default=None)


class PlanFile:
    """A file that is being written. As a context manager, it is closed at the end."""

    def __init__(self, name: str, folder: OpenFolder, path: str, sources: Sequence[Source]) -> None:
        """Create the file as `name` in the open directory `folder`; messages name `path`."""
        self.path = path
        self.sources = sources
        self._place = folder, name
        flags = READ_WRITE | os.O_CREAT | os.O_EXCL
        self.fd = folder.open(name, flags, mode_from(sources) | 0o200)
        with contextlib.suppress(OSError):  # so that `abandoned` leaves it alone
            lock_file(self.fd)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except OSError as error_at_end:
            if kind is None:
                raise WriteError(
                    f"closing failed: {error_at_end.strerror}", path=self.path
                ) from error_at_end

    def close(self) -> None:
        """Close the file, if it isn't."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def write(self, plan: Plan, progress: Progress | None = None) -> str:
        """Execute the plan and verify every byte.

        `progress` is called with bytes as they are verified. Return how the bytes were copied:
        `reflink` (the file system shares the blocks), `kernel`, `read` and write, or `fetch` (from
        a store). Raises CorruptError if a source is damaged or was changed.
        """
        report = ProgressCounter(progress)
        method = "reflink"
        try:
            if self._reflink(plan):
                crcs = self._carry_out(plan, None, report)
            else:
                free = free_nbytes(os.path.dirname(self.path) or ".", self.fd)
                check_free_space(free, [plan], self.sources, self.path)
                os.ftruncate(self.fd, plan.nbytes)
                copier = Copier(self.sources, self.fd)
                crcs = self._carry_out(plan, copier, report)
                method = copier.method
            if plan.seal is not None:
                for write in plan.seal(crcs):
                    put(self.fd, *write)
                self._sync()
            report(plan.nbytes - report.nbytes)
        except OSError as error:
            raise failure_of(error, self.path) from error
        for source in self.sources:
            source.check_unchanged()
        return method

    def _carry_out(
        self, plan: Plan, copier: Copier | None, report: ProgressCounter
    ) -> Sequence[int]:
        """Copy (unless cloned), gather, write and verify; return CRC-32s of the measures."""
        sums = None if plan.seal else _SUMS.get()
        running = RunningChecksums(plan.source_checksums, self.sources)
        with Verifier(
            plan, self.sources, self.fd, self.path, running, summed=sums is not None
        ) as verifier:
            writes = deque(sorted(plan.writes, key=attrgetter("at")))
            filled: Iterable[int] = (plan.nbytes,)
            if copier is not None:
                filled = self._fill(plan, copier, writes, running, report)
            for end in filled:
                while writes and writes[0].at + len(writes[0].data) <= end:
                    put(self.fd, *writes.popleft())
                verifier.report_written(min(end, writes[0].at) if writes else end)
                report(verifier.take_done())
            assert not writes, "the plan writes beyond its end"
            self._sync()
            verifier.finish(report)
        if sums is not None:
            sums[stamp_of(os.fstat(self.fd))] = verifier.crc32
        return verifier.crcs

    def _sync(self) -> None:
        """Sync the file before it gets its name."""
        sync(self.fd)

    def _reflink(self, plan: Plan) -> bool:
        if not plan.is_clone:
            return False
        source = self.sources[plan.copies[0].source]
        if source.nbytes != plan.nbytes or not isinstance(source, File):
            return False
        return clone(source.fd, self.fd)

    def _fill(
        self,
        plan: Plan,
        copier: Copier,
        writes: deque[Write],
        running: RunningChecksums,
        report: ProgressCounter,
    ) -> Iterator[int]:
        """Copy and gather; yield repeatedly the end of the finished range, without `writes`.

        Writes that lie among small copies are written with them, and removed from `writes`.
        """
        parts: Iterable[Copy | Gather] = plan.copies
        if plan.gathers:
            parts = heapq.merge(plan.copies, plan.gathers, key=attrgetter("at"))
        run = WriteRun(self.sources, self.fd)
        for part in parts:
            if isinstance(part, Copy) and run.add(part):
                continue
            if run.put(writes):
                yield run.end
            if isinstance(part, Copy):
                if run.add(part):
                    continue
                yield from (part.at + done for done in copier.copy(part))
            else:
                yield from self._gather(part, running, report)
        run.put(writes)
        yield plan.nbytes

    def _gather(self, gather: Gather, running: RunningChecksums, report: Progress) -> Iterator[int]:
        source = None
        if gather.content is None:
            source = SummedSource(self.sources[gather.source], gather.source, running)
        for at, data in read_gather(source, gather, self.path):
            put(self.fd, at, data)
            start_writeback(self.fd, at, len(data))
            report(len(data))
            yield at + len(data)

    def open_written(self) -> File:
        """Open what was written, to be read like any other file."""
        try:
            found = _WrittenFile(os.dup(self.fd), self.path, self._place)
        except OSError as error:
            raise failure_of(error, self.path) from error
        found.hold_if_few()
        return found


@contextlib.contextmanager
def summing_written() -> Iterator[dict[str, int]]:
    """Collect the CRC-32s of files written in this context, by their stamps after writing.

    The verification computes them. A file with a `seal` has none.
    """
    sums = dict[str, int]()
    token = _SUMS.set(sums)
    try:
        yield sums
    finally:
        _SUMS.reset(token)


class _WrittenFile(File):
    """A file that does not have its final name yet: opened again by its temporary name."""

    __slots__ = ("_place",)

    def __init__(self, fd: int, path: str, place: tuple[OpenFolder, str]) -> None:
        super().__init__(fd, path)
        self._place = place

    def _descriptor_again(self) -> int:
        folder, name = self._place
        return folder.open(name, READ)


def read_gather(
    source: Source | None, gather: Gather, path: str
) -> Iterator[tuple[int, memoryview]]:
    """Yield the gathered bytes of a source or of memory, with their offsets in the destination.

    Raises UnsupportedError if torch is missing.
    """
    from ..runtime.gather import gather_chunks

    try:  # only a gather needs torch
        chunks = gather_chunks(source, gather)
    except ImportError as error:
        raise UnsupportedError(f"needs torch to write strided or cast tensors: {error}") from error

    at, left = gather.at, gather.nbytes
    for chunk in chunks:
        data = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
        left -= len(data)
        if left < 0:
            break
        if data:
            yield at, data
            at += len(data)
    if left:
        raise WriteError(
            f"what was gathered for offset {gather.at:,} is not {gather.nbytes:,} bytes", path=path
        )


class ProgressCounter:
    """Passes progress on, and counts it."""

    def __init__(self, progress: Progress | None) -> None:
        self.nbytes = 0
        self._progress = progress

    def __call__(self, nbytes: int) -> None:
        """Report bytes that are written and verified."""
        self.nbytes += nbytes
        if self._progress is not None:
            self._progress(nbytes)
