"""Read items that torch compressed with zstd while it wrote them.

    FileSystemWriter(…, _extensions=[ZStandard()])      `.metadata` says `stream.zstd/1` of an item

An item is decompressed as a stream, and again from its start to read earlier bytes. A few streams
are open at a time; after the elements of an item were found, nothing else of it stays in memory.
Its largest possible size is known in advance: for a chunk, from its box. Python 3.14 includes zstd;
earlier versions need the package `zstandard`.

Source: torch/distributed/checkpoint/_extension.py (torch 2.7 to 2.13).
"""

from __future__ import annotations

import importlib
import io
import threading
from typing import Any
from weakref import WeakKeyDictionary

from ....errors import CorruptError, StrPath, UnsupportedError
from ....plans.crc32 import extend_crc32
from ....sources.source import Source, check_range
from .metadata_walk import ItemRange

#: The most open streams: if more chunks divide columns, each would be read again and again.
MOST_OPEN = 16
_KEPT = 1 << 16  # bytes of the start and of the end that stay in memory
_BLOCK = 1 << 20
_LARGEST_WINDOW = 1 << 23  # bytes that a stream may refer back; torch uses 2 MB


class PackedItem(Source):
    """An item that is decompressed when it is read, by one thread."""

    __slots__ = ("__weakref__", "_at", "_head", "_item_range", "_packed", "_stream", "_tail")
    _stream: Any

    def __init__(self, packed: Source, span: ItemRange, most: int) -> None:
        """`most`: the largest size it may have; CorruptError if it is larger, or damaged."""
        self.path = packed.path
        self._packed, self._item_range = packed, span
        self._head = self._tail = b""
        self._rewind()
        self.nbytes = most
        head, tail, end = bytearray(), bytearray(), 0
        while block := self._next(_BLOCK):
            head += block[: _KEPT - len(head)]
            tail = (tail + block)[-_KEPT:]
            end += len(block)
            if end > most:
                raise CorruptError(f"it becomes more than {most:,} bytes, which is too large")
        self._head, self._tail, self.nbytes = bytes(head), bytes(tail), end

    def settle(self) -> None:
        """Forget the bytes around its elements, which were already found."""
        self._head = self._tail = b""
        self.close()

    def _rewind(self) -> None:
        self.close()
        opened = _OPENED.streams
        if len(opened) >= MOST_OPEN:
            next(iter(opened)).close()
        opened[self] = None
        self._stream, self._at = _stream_of(_Raw(self._packed, self._item_range)), 0

    def _next(self, nbytes: int) -> bytes:
        """The next bytes of the stream; empty at its end."""
        try:
            found: bytes = self._stream.read(nbytes)
        except (EOFError, OSError, ValueError, _error_of_zstd()) as error:
            raise CorruptError(f"what zstd compressed is damaged: {error!s:.80}") from error
        self._at += len(found)
        return found

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        end = start + len(view)
        check_range(self, start, len(view))
        kept_from = self.nbytes - len(self._tail)
        if end <= len(self._head):
            view[:] = self._head[start:end]
        elif start >= kept_from and self._tail:
            view[:] = self._tail[start - kept_from : end - kept_from]
        else:
            if self._stream is None or start < self._at:
                self._rewind()
            while self._at < start:
                self._wanted(min(_BLOCK, start - self._at))
            done = 0
            while done < len(view):
                block = self._wanted(min(_BLOCK, len(view) - done))
                view[done : done + len(block)] = block
                done += len(block)

    def _wanted(self, nbytes: int) -> bytes:
        found = self._next(nbytes)
        if not found:
            raise CorruptError("the file was changed while it was read", path=self.path)
        return found

    def crc32(self, start: int, nbytes: int) -> int:
        """The checksum of a range."""
        crc32 = 0
        for at in range(start, start + nbytes, _BLOCK):
            crc32 = extend_crc32(crc32, self.read(at, min(_BLOCK, start + nbytes - at)))
        return crc32

    def close(self) -> None:
        """Close its stream, which a later read opens again; the file belongs to the caller."""
        self._stream = None
        _OPENED.streams.pop(self, None)

    def check_unchanged(self) -> None:
        self._packed.check_unchanged()

    def same_file(self, path: StrPath) -> bool:
        return self._packed.same_file(path)

    def mappable(self, start: int, nbytes: int) -> int:
        raise UnsupportedError("can't be mapped: it is compressed", path=self.path)


class _OpenItems(threading.local):
    """The items with an open stream, the latest last.

    One per thread, so that no thread closes another's.
    """

    def __init__(self) -> None:
        self.streams = WeakKeyDictionary[PackedItem, None]()


_OPENED = _OpenItems()


class _Raw(io.RawIOBase):
    """The bytes of an item as stored in its file."""

    def __init__(self, source: Source, span: ItemRange) -> None:
        super().__init__()
        self._source, self._at, self._end = source, span.at, span.at + span.nbytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (io says so)
        view = memoryview(buffer).cast("B")[: self._end - self._at]
        self._source.read_into(self._at, view)
        self._at += len(view)
        return len(view)


def _zstd() -> tuple[Any, bool]:
    """The module that decompresses, and whether it is Python's own."""
    for name in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(name), name != "zstandard"
        except ImportError:
            continue
    raise UnsupportedError("its items are compressed by zstd", hint="pip install zstandard")


def _error_of_zstd() -> type[Exception]:
    error: type[Exception] = _zstd()[0].ZstdError
    return error


def _stream_of(raw: _Raw) -> Any:  # noqa: ANN401 (either module has a type of its own)
    """A reader that decompresses a stream."""
    module, is_own = _zstd()
    if is_own:
        limit = _LARGEST_WINDOW.bit_length() - 1
        options = {module.DecompressionParameter.window_log_max: limit}
        return module.ZstdFile(raw, options=options)
    return module.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(
        io.BufferedReader(raw), read_across_frames=True
    )
