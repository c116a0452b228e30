"""Copy bytes to a file: by the kernel if possible; write and read them back."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator, Sequence

from ..errors import CorruptError
from ..plans.plan import Copy, Write
from ..sources.file import File
from ..sources.nearby import NearbyFiles
from ..sources.source import Source
from ..system import files
from ..system.files import NOT_HERE

_STRIDE = 64 << 20  # bytes handed to the kernel at once
_BUFFER = 1 << 20  # bytes read at once
_SMALL = 1 << 12  # largest copy that is written together with others, and largest gap between two
_RUN = 1 << 18  # bytes that are written together
_COMPARED = 1 << 17  # bytes read back at once; more than the processor's cache is slower


class Copier:
    """Copies extents of the sources, by the kernel if possible, and keeps holes."""

    def __init__(self, sources: Sequence[Source], fd: int) -> None:
        self.sources = sources
        self.fd = fd
        self.method = "kernel" if files.COPIES else "read"

    def copy(self, copy: Copy) -> Iterator[int]:
        """Copy one extent; yield repeatedly how many bytes are done."""
        done, source = 0, self.sources[copy.source]
        for piece in source.pieces(copy.source_at, copy.nbytes):
            part = Copy(piece.at, piece.nbytes, copy.at + done)
            yield from (done + moved for moved in self._piece(piece.source, part, source))
            done += piece.nbytes

    def _piece(self, source: Source, copy: Copy, whole: Source) -> Iterator[int]:
        """Copy a contiguous piece of one source; yields as `copy`."""
        if not isinstance(source, File):
            yield from self._fetched(source, copy, whole)
            return
        for start, end in source.data_ranges(copy.source_at, copy.source_at + copy.nbytes):
            at = start
            while at < end:
                to = copy.at + at - copy.source_at
                moved = self._move(source, at, min(_STRIDE, end - at), to)
                if moved == 0:
                    raise CorruptError("the file shrank while it was read", path=source.path)
                start_writeback(self.fd, to, moved)
                at += moved
                yield at - copy.source_at
        yield copy.nbytes  # includes a hole at the end

    def _fetched(self, source: Source, copy: Copy, whole: Source) -> Iterator[int]:
        """Copy from a source without a descriptor; read the written bytes back at once."""
        self.method = "fetch"
        for start, data in source.chunks(copy.source_at, copy.nbytes):
            to = copy.at + start - copy.source_at
            put(self.fd, to, data)
            if source is not whole:
                whole.note(source, start, data)
            start_writeback(self.fd, to, len(data))
            yield start + len(data) - copy.source_at
        yield copy.nbytes

    def _move(self, source: File, start: int, nbytes: int, at: int) -> int:
        with source.descriptor() as fd:
            if self.method == "kernel":
                try:
                    return files.copy_range(fd, self.fd, nbytes, start, at)
                except OSError as error:
                    if error.errno not in NOT_HERE:
                        raise
                    self.method = "read"
            data = files.read_some(fd, min(nbytes, _BUFFER), start)
        return files.write_some(self.fd, data, at)


class WriteRun:
    """Small copies that lie close together, and the writes over and between them, as one write.

    To have the kernel copy each would take twenty times as long.
    """

    def __init__(self, sources: Sequence[Source], fd: int) -> None:
        self._sources = sources
        self._files = NearbyFiles()
        self._fd = fd
        self._start = 0
        self._content = bytearray()

    @property
    def end(self) -> int:
        """The end of the written range, after `put`."""
        return self._start + len(self._content)

    def add(self, copy: Copy) -> bool:
        """Add the next copy; False if it must be copied separately."""
        gap = copy.at - self.end if self._content else 0
        if max(gap, copy.nbytes) > _SMALL or len(self._content) > _RUN:
            return False
        source = self._sources[copy.source]
        if isinstance(source, File):
            content = self._files.read(source, copy.source_at, copy.nbytes)
        else:
            pieces = list(source.pieces(copy.source_at, copy.nbytes))
            if not all(isinstance(each.source, File) for each in pieces):
                return False
            content = b"".join([self._files.read(*piece) for piece in pieces])
        if not self._content:
            self._start = copy.at
        if gap:
            self._content += bytes(gap)
        self._content += content
        return True

    def put(self, writes: deque[Write]) -> bool:
        """Write the copies, with the writes up to their end; False if there are no copies.

        These writes are removed from `writes`. Raises OSError.
        """
        if not self._content:
            return False
        start, end, before = self._start, self.end, list[Write]()
        while writes and writes[0].at + len(writes[0].data) <= end:
            at, data = write = writes.popleft()
            if at < start:
                before.append(write)
            else:
                self._content[at - start : at - start + len(data)] = data
        put(self._fd, start, memoryview(self._content))
        for write in before:
            put(self._fd, *write)
        self._content = bytearray()
        self._start = end
        return True


def start_writeback(fd: int, at: int, nbytes: int) -> None:
    """Start flushing written bytes to the disk, so that the fsync waits less.

    Only Linux has this call; other systems do without. The advice DONTNEED would also start it, but
    drops pages from the cache before they are verified.
    """
    if nbytes >= _BUFFER:
        files.start_sync(fd, at, nbytes)


def write_at(fd: int, at: int, data: bytes | memoryview) -> None:
    """Write all bytes at an offset, with as many calls as needed."""
    view = memoryview(data)
    while view:
        taken = files.write_some(fd, view, at)
        view, at = view[taken:], at + taken


def read_at(fd: int, at: int, nbytes: int) -> bytes:
    """Read bytes at an offset; fewer at the end of the file."""
    parts = []
    while nbytes:
        part = files.read_some(fd, nbytes, at)
        if not part:
            break
        parts.append(part)
        at, nbytes = at + len(part), nbytes - len(part)
    return b"".join(parts)


def put(fd: int, at: int, data: bytes | memoryview) -> None:
    """Write all bytes at an offset, and read them back. Raises OSError."""
    write_at(fd, at, data)
    if not holds_at(fd, at, data):
        raise OSError(errno.EIO, "the written bytes can't be read back")


def holds_at(fd: int, at: int, data: bytes | memoryview) -> bool:
    """Whether these bytes can be read at an offset."""
    view = memoryview(data)
    buffer = bytearray(min(len(view), _COMPARED))
    while view:
        part, view = view[:_COMPARED], view[_COMPARED:]
        if len(part) < len(buffer):
            del buffer[len(part) :]
        # with a bytearray first, this is one memcmp; two views are compared by element
        if files.read_into(fd, buffer, at) != len(part) or buffer != part:
            return False
        at += len(part)
    return True
