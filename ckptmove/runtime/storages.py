"""Make torch storages: map or read their bytes, and put them on devices by `map_location`.

Source: torch/serialization.py (`_get_restore_location`, `_load`); torch/_utils.py has
`_get_restore_location` too, for tensors that store their own device.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.serialization import default_restore_location

from ..errors import InputError, UsageError
from ..graph.draft import StorageBytes
from ..manifest.dtypes import BITS, storage_element_nbytes
from ..plans.plan import Proof
from ..sources.checksums import crc32_of, damage_error, read_before
from ..sources.file import File
from ..sources.joined import JoinedFiles
from ..sources.source import Piece, Source
from ..system.files import map_file
from .device_copies import DeviceCopies, device_error

_META = torch.device("meta")
#: The argument of torch.load: a device, a mapping of tags, a function, or None.
MapLocation = Any

#: The object in which torch.load stores `map_location` for rebuild functions; another in torch 2.4.
_threads: Any = getattr(torch.serialization, "_serialization_tls", None) or getattr(
    torch._utils, "_thread_local_state", None
)


class Restoring:
    """Puts storages on their devices."""

    def __init__(self, map_location: MapLocation) -> None:
        """`map_location` is that of torch.load; raises UsageError for any other type."""
        known = isinstance(map_location, (str, bytes, torch.device, Mapping, type(None)))
        if not known and not callable(map_location):
            raise UsageError(
                f"map_location can't be {map_location!r}",
                hint="it must be a device, a dict of devices, or a function",
            )
        if isinstance(map_location, bytes):
            map_location = map_location.decode("ascii", "replace")
        if isinstance(map_location, Mapping):
            map_location = {str(old): str(new) for old, new in map_location.items()}
        self._map = map_location
        #: whether tensors are made under a FakeTensorMode
        self.is_fake = torch._guards.detect_fake_mode(None) is not None
        self._without_bytes = self.is_fake or str(map_location) == "meta"
        self._devices: dict[str, torch.device | None] = {}

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """A context in which torch's rebuild functions use the same `map_location`."""
        before = getattr(_threads, "map_location", None)
        _threads.map_location = self._map
        try:
            yield
        finally:
            _threads.map_location = before

    def device_of(self, location: str) -> torch.device | None:
        """The device for storages with this location; None if they have no bytes, or a function
        of the user decides for each.

        Raises DeviceError if the device is missing.
        """
        if location not in self._devices:
            plain = self._map is None or isinstance(self._map, (str, torch.device, dict))
            device = None
            if plain and not self._without_bytes:
                device = self.on_device(torch.UntypedStorage(0), location).device
            self._devices[location] = None if device == _META else device
        return self._devices[location]

    def without_bytes(self, nbytes: int, location: str) -> torch.UntypedStorage | None:
        """A storage without bytes, for `meta` or under a FakeTensorMode; else None."""
        if not self._without_bytes:
            return None
        storage: Any = torch.UntypedStorage(nbytes, device="meta")
        if self.is_fake:
            storage._fake_device = location
        assert isinstance(storage, torch.UntypedStorage)
        return storage

    def on_device(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """A storage on the device of its location.

        Raises DeviceError if the device is missing, UsageError if the user's function does not
        return a storage.
        """
        placed: Any = None
        if isinstance(self._map, dict):
            location = self._map.get(location, location)
        elif isinstance(self._map, (str, torch.device)):
            location = str(self._map)
        elif self._map is not None:
            placed = self._map(storage, location)
        if placed is None:
            placed = self._by_default(storage, location)
        if isinstance(placed, torch.TypedStorage):
            placed = placed._untyped_storage
        if not isinstance(placed, torch.UntypedStorage):
            raise UsageError(f"map_location gave a {type(placed).__name__}, not a storage")
        return placed

    def _by_default(self, storage: torch.UntypedStorage, location: str) -> object:
        try:
            return default_restore_location(storage, location)
        except Exception as error:  # each backend raises its own kind
            raise device_error(location, error) from error


#: The largest alignment that an element needs, in bytes.
LARGEST_ALIGNMENT = 8
#: The dtypes that are not quantized and whose elements take whole bytes.
WHOLE: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in BITS
    if not name.startswith("q")
    and hasattr(torch, name)
    and BITS[name] == 8 * getattr(torch, name).itemsize
}
_BLOCK = 1 << 24  # bytes per read


class Storages:
    """The storages of a checkpoint, each made once.

    Mapped storages are private: writing to them changes memory, never the file. They need the file
    as long as they exist: truncating it kills the process, as with `torch.load(mmap=True)`.
    """

    def __init__(self, sources: Sequence[Source], restoring: Restoring) -> None:
        self._sources = sources
        self._restoring = restoring
        self._files: dict[int, Any] = {}
        self._made: dict[str, torch.UntypedStorage] = {}
        self._copies = DeviceCopies()
        self._proofs: list[Proof] = []  # the checksums of read parts

    def storage(self, stored: StorageBytes) -> torch.UntypedStorage:
        """A storage on its tagged device, or on the device to which `map_location` maps it.

        Raises DeviceError if the device is missing, CorruptError if the file has changed.
        """
        made = self._made.get(stored.id)
        if made is None:
            made = self._restoring.without_bytes(stored.nbytes, stored.location)
            if made is None:
                made = self._copied(stored)
            if made is None:
                made = self._restoring.on_device(self._bytes(stored), stored.location)
            self._made[stored.id] = made
        return made

    def finish_copies(self) -> None:
        """Fill the storages on other devices, which `storage` only makes.

        Raises InputError if a file can't be read.
        """
        self._copies.finish()

    def _copied(self, stored: StorageBytes) -> torch.UntypedStorage | None:
        """A storage that `finish_copies` fills straight from a file; None if that is impossible."""
        device = self._restoring.device_of(stored.location)
        source = self._sources[stored.source]
        plain = stored.content is None and not stored.big_endian and isinstance(source, File)
        if device is None or device.type == "cpu" or not plain or not stored.nbytes:
            return None
        return self._copies.storage(stored.nbytes, device, source, stored.start)

    def _bytes(self, stored: StorageBytes) -> torch.UntypedStorage:
        if not stored.nbytes:
            return torch.UntypedStorage(0)
        content = stored.content
        if content is None and stored.big_endian:
            content = self._sources[stored.source].read(stored.start, stored.nbytes)
        if content is not None and not stored.big_endian:
            return _copy_to_storage(content)
        if content is not None:
            storage = _copy_to_storage(content)
            if stored.dtype is not None and storage_element_nbytes(stored.dtype) > 1:
                storage.byteswap(getattr(torch, stored.dtype))
            return storage
        pieces = list(islice(self._sources[stored.source].pieces(stored.start, stored.nbytes), 2))
        joined = len(pieces) > 1 or isinstance(pieces[0].source, JoinedFiles)
        if joined or pieces[0].at % _alignment(stored):
            return self._read(stored)
        return self._map_piece(pieces[0])

    def check_read(self) -> None:
        """Raise CorruptError if bytes that were read, not mapped, do not match their checksums.

        A checksum is not checked if less than half of its bytes were read, because reading the rest
        would take long.
        """
        for proof in dict.fromkeys(self._proofs):
            at, crc32 = read_before(self._sources, proof)
            done = at - proof.source_at
            source, left = self._sources[proof.source], proof.nbytes - done
            if left <= done and crc32_of(source, at, left, crc32) != proof.crc32:
                raise damage_error(proof.name, source)

    def _read(self, stored: StorageBytes) -> torch.UntypedStorage:
        content = bytearray(stored.nbytes)
        view, source = memoryview(content), self._sources[stored.source]
        for at in range(0, stored.nbytes, _BLOCK):
            source.read_into(stored.start + at, view[at : at + _BLOCK])
        self._proofs += (each._replace(at=None) for each in stored.proofs)
        return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()

    def _map_piece(self, piece: Piece) -> torch.UntypedStorage:
        whole = self._files.get(id(piece.source))
        if whole is None:
            whole = self._files[id(piece.source)] = _whole(piece.source)
        piece.source.mappable(piece.at, piece.nbytes)
        part = whole[piece.at : piece.at + piece.nbytes]
        assert isinstance(part, torch.UntypedStorage)
        return part


def _whole(source: Source) -> Any:
    """A storage of the whole file, mapped so that writing changes only memory."""
    return torch.frombuffer(pages_of(source), dtype=torch.uint8).untyped_storage()


def pages_of(source: Source) -> mmap.mmap:
    """A private writable mapping of a file; raises InputError if it can't be mapped."""
    try:
        return map_file(source.mappable(0, 0), source.nbytes, written=True)
    except (OSError, ValueError) as error:
        raise InputError(f"can't be mapped: {error}", path=source.path) from error


def _alignment(stored: StorageBytes) -> int:
    """The alignment that a storage needs to be mapped."""
    if stored.dtype is None:
        return LARGEST_ALIGNMENT
    return min(storage_element_nbytes(stored.dtype), LARGEST_ALIGNMENT)


def _copy_to_storage(content: bytes | memoryview) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()
