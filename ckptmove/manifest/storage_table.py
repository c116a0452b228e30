"""The storages of a checkpoint, possibly hundreds of thousands, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, MutableMapping

from .manifest import Extent, Storage


class StorageTable(MutableMapping[str, Storage]):
    """Storages by id. Most of one file differ only in place: each is made when it is asked for.

    So a storage takes fifty bytes and its id, instead of two hundred.
    """

    def __init__(self) -> None:
        #: the row of each storage, or the storage
        self._rows: dict[str, int | Storage] = {}
        #: in each row location, size and dtype of a storage; and where it starts in the file
        self._alike: list[tuple[str, int, str | None]] = []
        self._starts = array("Q")
        self._kinds: dict[tuple[str, int, str | None], tuple[str, int, str | None]] = {}

    def add(
        self, id: str, location: str, nbytes: int, dtype: str | None, extent: Extent | None
    ) -> None:
        """Add a storage with a new id."""
        if extent is None or extent[1] != nbytes or extent[2]:
            self._rows[id] = Storage(id, location, nbytes, dtype, extent)
            return
        alike = location, nbytes, dtype
        self._rows[id] = len(self._starts)
        self._alike.append(self._kinds.setdefault(alike, alike))
        self._starts.append(extent[0])

    def __getitem__(self, id: str) -> Storage:
        row = self._rows[id]
        if type(row) is not int:
            return row  # type: ignore[return-value] # it is a storage
        location, nbytes, dtype = self._alike[row]
        # the constructors would take longer
        extent = tuple.__new__(Extent, (self._starts[row], nbytes, 0))
        return tuple.__new__(Storage, (id, location, nbytes, dtype, extent))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __setitem__(self, id: str, storage: Storage) -> None:
        self._rows[id] = storage

    def __delitem__(self, id: str) -> None:
        del self._rows[id]

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
