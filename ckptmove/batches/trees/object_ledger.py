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

from ...reports.data.batch_items import Entry
from ...sources import place_of
from ...sources.fetch_pool import many
from ...sources.filesystem import Missing
from ...sources.remote_place import RemotePlace
from ...writing.upload.small_objects import put_small
from .ledger import LEDGER, MARKS, Ledger, entry_of

_LONGEST = 1 << 16  # bytes


class Marks:
    """A `Ledger` of objects.

    Attributes:
        path: the folder that they are in.
    """

    nbytes = 0  # that were read, as far as it matters: each is asked for anew

    def __init__(self, path: str, *, whole: bool) -> None:
        """Args:
        path: the folder.
        whole: whether to read all that are there now, and look for no others.
        """
        self.path = path
        self._entries: dict[str, Entry] | None = None
        if whole:
            found = many(_entry, _listed(path))
            self._entries = {entry.name: entry for entry in found if entry is not None}

    def of(self, name: str) -> Entry | None:
        """As `Ledger.of`."""
        if self._entries is not None:
            return self._entries.get(name)
        entry = _entry(self._url(name))
        return entry if entry is not None and entry.name == name else None

    def add(self, entry: Entry, *, synced: bool = False) -> None:
        """As `Ledger.add`."""
        said = {key: value for key, value in entry._asdict().items() if value}
        put_small(self._url(entry.name), json.dumps(said).encode())

    @contextlib.contextmanager
    def held(self, name: str, *, patient: bool) -> Iterator[bool]:
        """As `Ledger.held`, but without a lock: a store has none."""
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


Book = Ledger | Marks


def open_ledger_in(root: str) -> Book:
    """The ledger of a tree, as a batch is planned."""
    place = place_of(root)
    if not place.opens_by_path:
        return Marks(place.child(MARKS).path, whole=True)
    return Ledger(place.child(LEDGER).path)


def open_ledger_at(path: str, since: int = 0) -> Book:
    """The same ledger, as an item is done.

    Args:
        path: as the other has it.
        since: from where on there may be news.
    """
    return Ledger(path, since) if place_of(path).opens_by_path else Marks(path, whole=False)
