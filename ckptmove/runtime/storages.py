"""Storages of torch: mapped from files where they lie there as they are, else read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.serialization import _get_restore_location

from ..drafts.draft import Stored
from ..dtypes import storage_element_nbytes
from ..errors import CorruptError, UnsupportedError
from ..source import Source

#: What torch.load takes: a device, a mapping of tags, a function, or None.
MapLocation = Any

_ALIGNMENT = 8  # bytes; what begins elsewhere is read


class Storages:
    """The storages of a checkpoint, each made once.

    Mapped ones are private: writing to such a tensor changes memory, never the file. They are of
    the file for as long as they live; who truncates it meanwhile ends the process, as with
    `torch.load(mmap=True)`.
    """

    def __init__(self, sources: Sequence[Source], map_location: MapLocation) -> None:
        """Args:
        sources: the files.
        map_location: as torch.load takes it.
        """
        self._sources = sources
        self._restore: Callable[[Any, str], Any] = _get_restore_location(map_location)
        self._files: dict[int, torch.UntypedStorage] = {}
        self._made: dict[str, torch.UntypedStorage] = {}

    def storage(self, stored: Stored) -> torch.UntypedStorage:
        """A storage, on the device that it is tagged with or mapped to.

        Raises:
            UnsupportedError: it is tagged with a device that is not there.
            CorruptError: the file is not the one that was read.
        """
        if stored.id not in self._made:
            self._made[stored.id] = self._placed(self._bytes(stored), stored.location)
        return self._made[stored.id]

    def _placed(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        placed: object
        try:
            placed = self._restore(storage, location)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UnsupportedError(
                f"a storage can't be put on {location!r}: {str(error).split('. ')[0]}",
                hint="map_location='cpu' loads it on the CPU",
            ) from error
        if isinstance(placed, torch.TypedStorage):
            return placed._untyped_storage
        assert isinstance(placed, torch.UntypedStorage)
        return placed

    def _bytes(self, stored: Stored) -> torch.UntypedStorage:
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
        if stored.start % _ALIGNMENT:
            return self._read(stored)
        return self._mapped(stored)

    def _read(self, stored: Stored) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(stored.nbytes)
        whole = torch.tensor([], dtype=torch.uint8).set_(storage)
        step = 1 << 24
        for at in range(0, stored.nbytes, step):
            nbytes = min(step, stored.nbytes - at)
            content = self._sources[stored.source].read(stored.start + at, nbytes)
            whole[at : at + nbytes] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return storage

    def _mapped(self, stored: Stored) -> torch.UntypedStorage:
        source = self._sources[stored.source]
        if stored.source not in self._files:
            mapped: Any = torch.UntypedStorage.from_file(source.path, False, source.nbytes)
            if not source.same_file(source.path):
                raise CorruptError("the file was replaced while it was read", path=source.path)
            self._files[stored.source] = mapped
        part: Any = self._files[stored.source][stored.start : stored.start + stored.nbytes]
        assert isinstance(part, torch.UntypedStorage)
        return part


def _copied(content: bytes | memoryview) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()
