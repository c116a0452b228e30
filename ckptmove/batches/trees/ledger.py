"""The ledger of a batch: one line in the destination for each finished item.

    {"name": "a/run.pt", "key": KEY, "outcome": "done", "nbytes": N, "stamp": STAMP, "crc32": N}

Lines are only appended, each in one write, by any process at work. An incomplete, too long or
unknown line is ignored. The output is the truth, not the ledger: a line counts only while the
output is as the line says; the line does not say where the output is. So lines are not synced: if
one is lost, doing the item again finds the finished output. The exception is a change in place,
which cannot be repeated if its rules depend on the old devices: a line with outcome `begun` is on
disk before it starts.

While a process does an item, it holds a lock on one byte of the ledger, computed from the item's
name. The lock ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, ClassVar

from ...errors import CkptmoveError, RefusedError
from ...reports.batch.items import LedgerEntry
from ...system.files import AT_ONCE, NO_LINK, READ, READ_WRITE, read_some, sync
from ...system.locks import close, lock_byte
from ...writing.final_name import failure_of
from .tree import Ledger

_PIECE = 1 << 20
_LONGEST_LINE = 1 << 16  # bytes; six for each of the longest path
MOST_NBYTES = 256 << 20  # bytes in all
_PATIENCE = 0.05  # seconds between two tries of a lock
_SHORTLY = 1.0  # seconds that a finished item waits for others
_LARGE = 64 << 20  # size of an item that is recorded at once, because repeating it is expensive
_TAIL = 1 << 62  # the byte locked while a line is added; bytes of items are below


class FileLedger:
    """A `Ledger` in a file. Threads of one process may share it."""

    is_shared: ClassVar[bool] = False  # on other machines, the path may lead to another disk

    def __init__(self, path: str, since: int = 0) -> None:
        """Read entries from offset `since` on; the file need not exist."""
        self.path = path
        self.entries: dict[str, LedgerEntry] = {}
        self._at = since
        self._file = (-1, -1)  # identity of the file
        self._guard = threading.Lock()

    def entry(self, name: str) -> LedgerEntry | None:
        """As `Ledger.entry`: from the last line about an item."""
        return self.entries_of([name]).get(name)

    def entries_of(self, names: Iterable[str]) -> dict[str, LedgerEntry]:
        """As `Ledger.entries_of`."""
        with self._guard:
            self._read()
            return {name: self.entries[name] for name in names if name in self.entries}

    def every(self) -> list[LedgerEntry]:
        """As `Ledger.every`."""
        with self._guard:
            self._read()
            return [*self.entries.values()]

    @property
    def nbytes(self) -> int:
        """As `Ledger.nbytes`."""
        return self._at

    def _read(self) -> None:
        try:
            fd = self._open(READ)
        except FileNotFoundError:
            return
        except OSError as error:
            raise failure_of(error, self.path) from error
        with _closing(fd), open(fd, "rb", buffering=_PIECE, closefd=False) as file:
            about = os.fstat(fd)
            which = (about.st_dev, about.st_ino)
            if about.st_size < self._at or self._file not in ((-1, -1), which):
                self.entries, self._at = {}, 0  # it was replaced
            self._file = which
            if about.st_size > MOST_NBYTES:
                raise RefusedError(
                    f"the ledger has {about.st_size:,} bytes, and {MOST_NBYTES:,} are the most",
                    path=self.path,
                    hint="remove it; then ckptmove compares the existing outputs instead",
                )
            if about.st_size > self._at:
                file.seek(self._at)
                self._take(file)

    def _take(self, file: IO[bytes]) -> None:
        """Read more lines; a last line without an end may still be written."""
        within = False  # in a line that is too long
        while line := file.readline(_LONGEST_LINE):
            whole = line.endswith(b"\n")
            if not whole and len(line) < _LONGEST_LINE:
                return
            entry = entry_of(line) if whole and not within else None
            if entry is not None:
                self.entries[entry.name] = entry
            within = not whole
            self._at += len(line)

    def _open(self, flags: int) -> int:
        """Open the ledger. Raises RefusedError unless it is a regular file without hard links."""
        try:
            if not NO_LINK and os.path.islink(self.path):
                raise self._trap()
            fd = os.open(self.path, flags | NO_LINK | AT_ONCE, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._trap() from error
            raise
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            os.close(fd)
            raise self._trap()
        return fd

    def _trap(self) -> RefusedError:
        return RefusedError(
            "the ledger is a link, has several hard links, or is not a regular file",
            path=self.path,
            hint="rm it",
        )

    def add(self, *entries: LedgerEntry, synced: bool = False) -> None:
        """As `Ledger.add`: lines in one write, which may be incomplete after an OSError."""
        lines = "".join(map(line_of, entries))
        fd = self._open(READ_WRITE | os.O_APPEND | os.O_CREAT)
        with _closing(fd):
            _lock(fd, _TAIL, wait=True)
            size = os.fstat(fd).st_size
            torn = size > 0 and read_some(fd, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + lines.encode()
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if synced:
                sync(fd)

    @contextlib.contextmanager
    def lock(self, names: Iterable[str], *, patient: bool) -> Iterator[list[str]]:
        """As `Ledger.lock`."""
        try:
            fd = self._open(READ_WRITE | os.O_CREAT)
        except OSError as error:
            raise failure_of(error, self.path) from error
        with _closing(fd):
            yield [name for name in names if _lock(fd, _byte_of(name), wait=patient)]


def _byte_of(name: str) -> int:
    data = os.fsencode(name)
    return zlib.crc32(data) << 29 | zlib.crc32(data[::-1]) >> 3


def _lock(fd: int, at: int, *, wait: bool) -> bool:
    """Lock a byte. Without locks this always succeeds: the second process finds the item done."""
    while not lock_byte(fd, at):
        if not wait:
            return False
        time.sleep(_PATIENCE if at != _TAIL else 0.001)
    return True


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    """Close a descriptor of the ledger at the end, and release only its locks."""
    try:
        yield
    finally:
        close(fd)


def line_of(entry: LedgerEntry) -> str:
    """The line of an entry."""
    return json.dumps({key: value for key, value in entry._asdict().items() if value}) + "\n"


def entry_of(line: bytes) -> LedgerEntry | None:
    """Parse a line; None if it is not an entry."""
    try:
        said = json.loads(line)
        if not isinstance(said, dict):
            return None
        entry = LedgerEntry(**_known(said))
    except (ValueError, TypeError, RecursionError):
        return None
    whole = all(isinstance(each, type(like)) for each, like in zip(entry, _LIKE, strict=True))
    return entry if whole else None


def _known(said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line that this version knows; a later one may write more."""
    return {key: value for key, value in said.items() if key in LedgerEntry._fields}


_LIKE = LedgerEntry("", "", "")


class LedgerWriter:
    """Finished items of a run that are not in its ledger yet; many share one request."""

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger
        self._entries = list[LedgerEntry]()
        self._since = 0.0
        self.failure = ""  #: why the last request failed

    def add(self, entries: tuple[LedgerEntry, ...], nbytes: int) -> None:
        """Queue entries for writing; `nbytes` is the size of their item."""
        if not entries:
            return
        if not self._entries:
            self._since = time.monotonic()
        self._entries += entries
        if nbytes >= _LARGE:
            self.write()
        self.write_due()

    @property
    def seconds(self) -> float | None:
        """Return how long `write_due` can wait; None if the queue is empty."""
        if not self._entries:
            return None
        return max(0.0, self._since + _SHORTLY - time.monotonic())

    def write_due(self) -> None:
        """Write the queue if it has waited long enough."""
        if self.seconds == 0.0:
            self.write()

    def write(self) -> None:
        """Write the queue. If that fails, the next run compares the outputs of these items."""
        entries, self._entries = self._entries, []
        if not entries or self._ledger is None:
            return
        try:
            self._ledger.add(*entries)
            self.failure = ""
        except (OSError, CkptmoveError) as error:
            self.failure = f"the ledger could not record what is done: {error}"
