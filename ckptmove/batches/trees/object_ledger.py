"""The ledger of a batch in an object store: objects of many lines each, one line a finished item.

    .ckptmove-batch/20261123T141502-3f9a1c70.jsonl        lines as those of `ledger`

Objects cannot be appended to. So each run collects the finished items of its workers, and rewrites
its own object, with up to a thousand lines; then it begins another. A reader lists these objects,
and reads the new ones. There are no locks: two runs may do the same item; the second one finds the
output of the first, and compares. If a run is killed, the lines of the last second are missing, and
those outputs are compared too.

The object with the latest name counts. Clocks of machines differ, and may be set back, so a new
object gets a time later than the times of all existing objects.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import ClassVar

from ...errors import RefusedError
from ...reports.batch.items import LedgerEntry
from ...sources.fetch_pool import map_parallel
from ...sources.filesystem import Missing
from ...sources.place import FolderEntry
from ...sources.remote_place import RemotePlace
from ...writing.upload.destination import RemoteDestination
from .ledger import MOST_NBYTES, entry_of, line_of

_SUFFIX = ".jsonl"
_BEGUN = "%Y%m%dT%H%M%S"  # when an object was begun, as its name says
_MOST_LINES = 1000  # in an object
_LARGE = 1 << 18  # bytes after which another object is begun
_LARGEST = 4 << 20  # bytes of an object that is read
_SHORTLY = 5.0  # seconds before the objects are listed again


class ObjectLedger:
    """A `Ledger` of objects. Threads of one process may share it."""

    is_shared: ClassVar[bool] = True
    nbytes = 0  # bytes read: always 0, because new objects are found by listing

    def __init__(self, path: str) -> None:
        self.path = path
        self._entries: dict[str, LedgerEntry] = {}
        self._read: dict[str, tuple[str, list[LedgerEntry]]] = {}  # by URL: stamp and entries
        self._next_look = 0.0
        self._lines: list[str] = []  # of the object being written
        self._url = ""
        self._guard = threading.Lock()

    def entry(self, name: str) -> LedgerEntry | None:
        """As `Ledger.entry`, as of a few seconds ago."""
        return self.entries_of([name]).get(name)

    def entries_of(self, names: Iterable[str]) -> dict[str, LedgerEntry]:
        """As `Ledger.entries_of`, as of a few seconds ago."""
        with self._guard:
            self._look()
            return {name: self._entries[name] for name in names if name in self._entries}

    def every(self) -> list[LedgerEntry]:
        """As `Ledger.every`, as of a few seconds ago."""
        with self._guard:
            self._look()
            return [*self._entries.values()]

    def _look(self) -> None:
        """Read new objects in order, unless just done: later objects overrule earlier ones."""
        if time.monotonic() < self._next_look:
            return
        listed = [each for each in _listed(self.path) if each.name.endswith(_SUFFIX)]
        if sum(each.nbytes for each in listed) > MOST_NBYTES:
            raise RefusedError(
                f"the ledger has more than {MOST_NBYTES:,} bytes",
                path=self.path,
                hint="remove it; then ckptmove compares the existing outputs instead",
            )
        new = [each for each in listed if self._read.get(each.path, ("",))[0] != each.stamp]
        for each, entries in zip(new, map_parallel(_entries_in, new), strict=True):
            self._read[each.path] = each.stamp, entries
        if new:
            self._entries = {
                entry.name: entry for each in sorted(listed) for entry in self._read[each.path][1]
            }
        self._next_look = time.monotonic() + _SHORTLY

    def add(self, *entries: LedgerEntry, synced: bool = False) -> None:
        """As `Ledger.add`: by one request."""
        with self._guard:
            for entry in entries:
                self._lines.append(line_of(entry))
                self._entries[entry.name] = entry
            if not self._url:
                begun = time.strftime(_BEGUN, time.gmtime(_later(_listed(self.path))))
                name = f"{begun}-{os.urandom(4).hex()}{_SUFFIX}"
                self._url = RemotePlace(self.path).child(name).path
            data = "".join(self._lines).encode()
            RemoteDestination(self._url).write_small(data)
            if len(self._lines) >= _MOST_LINES or len(data) >= _LARGE:
                self._url, self._lines = "", []

    @contextlib.contextmanager
    def lock(self, names: Iterable[str], *, patient: bool) -> Iterator[list[str]]:
        """As `Ledger.lock`, but without locks: a store has none."""
        yield list(names)


def _listed(path: str) -> list[FolderEntry]:
    try:
        return RemotePlace(path).files_below()
    except Missing:
        return []


def _later(listed: Iterable[FolderEntry]) -> int:
    """Return the present time, or a later time than that of every object of the ledger."""
    newest = int(time.time())
    for each in listed:
        with contextlib.suppress(ValueError):  # not one of our objects
            begun = time.strptime(each.name.partition("-")[0], _BEGUN)
            newest = max(newest, calendar.timegm(begun) + 1)
    return newest


def _entries_in(file: FolderEntry) -> list[LedgerEntry]:
    try:
        lines = RemotePlace(file.path).read_small(_LARGEST).splitlines()
    except Missing:
        return []
    found = map(entry_of, lines)
    return [each for each in found if each is not None]
