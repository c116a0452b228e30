"""Put storages on devices, as `map_location` of torch.load does.

Source: torch/serialization.py (`_get_restore_location`, `_load`), torch/_utils.py (the function of
the same name, for tensors that store their own device).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.serialization import default_restore_location

from ..errors import DeviceError, UsageError

#: What torch.load takes: a device, a mapping of tags, a function, or None.
MapLocation = Any

#: What to do where a device is not there. It stands in the message, for tracebacks show no hints.
REMEDY = 'map_location="cpu" loads it on the CPU'
#: Where torch.load keeps its `map_location` for rebuild functions: torch 2.4 had another place.
_threads: Any = getattr(torch.serialization, "_serialization_tls", None) or getattr(
    torch._utils, "_thread_local_state", None
)


class Restoring:
    """Puts storages where they belong."""

    def __init__(self, map_location: MapLocation) -> None:
        """`map_location` is as torch.load takes it; a UsageError if it is nothing of the kind."""
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
        self._fake = torch._guards.detect_fake_mode(None) is not None
        self._without_bytes = self._fake or str(map_location) == "meta"

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """A context in which torch's rebuild functions do the same with what names a device."""
        before = getattr(_threads, "map_location", None)
        _threads.map_location = self._map
        try:
            yield
        finally:
            _threads.map_location = before

    def without_bytes(self, nbytes: int, location: str) -> torch.UntypedStorage | None:
        """The storage, where it is to have no bytes: on meta, or under a FakeTensorMode."""
        if not self._without_bytes:
            return None
        storage: Any = torch.UntypedStorage(nbytes, device="meta")
        if self._fake:
            storage._fake_device = location
        assert isinstance(storage, torch.UntypedStorage)
        return storage

    def placed(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """A storage where it belongs, by the location that it is tagged with.

        Raises:
            DeviceError: that is a device that is not there.
            UsageError: the function of the user gave no storage.
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
        except Exception as error:  # each backend has its own
            why = str(error).partition("\n")[0].split(". ")[0]
            raise DeviceError(
                f"no tensor can be put on {location!r} here: {why}; {REMEDY}"
            ) from error
