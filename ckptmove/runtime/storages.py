"""Make torch storages: memory-mapped from the file if possible, otherwise read."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InputError
from ..graph.draft import StorageBytes
from ..manifest.dtypes import storage_element_nbytes
from ..sources.source import Source
from .restoring import Restoring

_LARGEST_ALIGNMENT = 8  # bytes, of any number
# Pages that could be written to count as memory, of which there may be less than the file has.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Storages:
    """The storages of a checkpoint, each made once.

    Mapped ones are private: writing to such a tensor changes memory, never the file. They are of
    the file for as long as they live; who truncates it meanwhile ends the process, as with
    `torch.load(mmap=True)`.
    """

    def __init__(self, sources: Sequence[Source], restoring: Restoring) -> None:
        self._sources = sources
        self._restoring = restoring
        self._files: dict[int, Any] = {}
        self._made: dict[str, torch.UntypedStorage] = {}

    def storage(self, stored: StorageBytes) -> torch.UntypedStorage:
        """A storage, on the device that it is tagged with or mapped to.

        Raises:
            DeviceError: it is tagged with a device that is not there.
            CorruptError: the file is not the one that was read.
        """
        made = self._made.get(stored.id)
        if made is None:
            made = self._restoring.without_bytes(stored.nbytes, stored.location)
            if made is None:
                made = self._restoring.placed(self._bytes(stored), stored.location)
            self._made[stored.id] = made
        return made

    def _bytes(self, stored: StorageBytes) -> torch.UntypedStorage:
        if not stored.nbytes:
            return torch.UntypedStorage(0)
        content = stored.content
        if content is None and stored.big_endian:
            content = self._sources[stored.source].read(stored.start, stored.nbytes)
        if content is not None and not stored.big_endian:
            return _copied(content)
        if content is not None:
            storage = _copied(content)
            if stored.dtype is not None and storage_element_nbytes(stored.dtype) > 1:
                storage.byteswap(getattr(torch, stored.dtype))
            return storage
        if stored.start % _alignment(stored):
            return self._read(stored)
        return self._mapped(stored)

    def _read(self, stored: StorageBytes) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(stored.nbytes)
        whole = torch.tensor([], dtype=torch.uint8).set_(storage)
        step = 1 << 24
        for at in range(0, stored.nbytes, step):
            nbytes = min(step, stored.nbytes - at)
            content = self._sources[stored.source].read(stored.start + at, nbytes)
            whole[at : at + nbytes] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return storage

    def _mapped(self, stored: StorageBytes) -> torch.UntypedStorage:
        whole = self._files.get(stored.source)
        if whole is None:
            source = self._sources[stored.source]
            whole = self._files[stored.source] = _whole(source)
        self._sources[stored.source].mappable(stored.start, stored.nbytes)
        part = whole[stored.start : stored.start + stored.nbytes]
        assert isinstance(part, torch.UntypedStorage)
        return part


def _whole(source: Source) -> Any:
    """A file, mapped so that writing changes memory alone."""
    try:
        pages = mmap.mmap(
            source.mappable(0, 0),
            source.nbytes,
            mmap.MAP_PRIVATE | _NORESERVE,
            mmap.PROT_READ | mmap.PROT_WRITE,
        )
    except (OSError, ValueError) as error:
        raise InputError(f"can't be mapped: {error}", path=source.path) from error
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


def _alignment(stored: StorageBytes) -> int:
    """What the bytes of a storage must begin at a multiple of, to be used where they are."""
    if stored.dtype is None:
        return _LARGEST_ALIGNMENT
    return min(storage_element_nbytes(stored.dtype), _LARGEST_ALIGNMENT)


def _copied(content: bytes | memoryview) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()
