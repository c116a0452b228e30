"""The ledger of a batch in an object store: one object per finished item.

Objects cannot be appended to. So the entries are objects below `.ckptmove-batch/` in the
destination, named by digests of the items' names. There are no locks: two runs may do the same
item; the second one finds the output of the first, and compares.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import ClassVar

from ...reports.batch_items import Entry
from ...sources.fetch_pool import map_parallel
from ...sources.filesystem import Missing
from ...sources.remote_place import RemotePlace
from ...writing.upload.destination import RemoteDestination
from .ledger import entry_of

_LONGEST = 1 << 16  # bytes


class ObjectLedger:
    """A `Ledger` of objects."""

    is_shared: ClassVar[bool] = True
    nbytes = 0  # that were read, as far as it matters: each is asked for anew

    def __init__(self, path: str, *, whole: bool) -> None:
        """`whole`: read all entries that are there now, and look for no others."""
        self.path = path
        self._entries: dict[str, Entry] | None = None
        if whole:
            found = map_parallel(_entry, _listed(path))
            self._entries = {entry.name: entry for entry in found if entry is not None}

    def entry(self, name: str) -> Entry | None:
        """As `Ledger.entry`."""
        if self._entries is not None:
            return self._entries.get(name)
        entry = _entry(self._url(name))
        return entry if entry is not None and entry.name == name else None

    def add(self, entry: Entry, *, synced: bool = False) -> None:
        """As `Ledger.add`."""
        said = {key: value for key, value in entry._asdict().items() if value}
        RemoteDestination(self._url(entry.name)).write_small(json.dumps(said).encode())

    @contextlib.contextmanager
    def lock(self, name: str, *, patient: bool) -> Iterator[bool]:
        """As `Ledger.lock`, but without a lock: a store has none."""
        yield True

    def _url(self, name: str) -> str:
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
        return RemotePlace(self.path).child(f"{digest[:32]}.json").path


def _listed(path: str) -> list[str]:
    try:
        return [each.path for each in RemotePlace(path).files_below()]
    except Missing:
        return []


def _entry(url: str) -> Entry | None:
    try:
        return entry_of(RemotePlace(url).read_small(_LONGEST))
    except Missing:
        return None
