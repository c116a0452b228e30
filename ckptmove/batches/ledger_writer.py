"""Write what workers have finished into a ledger that many items share a request for."""

from __future__ import annotations

import time

from ..errors import CkptmoveError
from ..reports.batch.items import Entry
from .trees import open_ledger

_SHORTLY = 1.0  # seconds that a finished item waits for others
_LARGE = 64 << 20  # bytes of an item that is not done again lightly: it waits for none


class LedgerWriter:
    """The finished items of a run that are not in the ledger yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ledger = open_ledger(path) if path else None
        self._entries = list[Entry]()
        self._since = 0.0
        self.failure = ""  #: why the last request for it failed

    def add(self, entries: tuple[Entry, ...], nbytes: int) -> None:
        """Have entries written soon; `nbytes` is the size of their item."""
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
        """How long it may be until `write_due` is called; None if nothing waits."""
        if not self._entries:
            return None
        return max(0.0, self._since + _SHORTLY - time.monotonic())

    def write_due(self) -> None:
        """Write what has waited long enough."""
        if self.seconds == 0.0:
            self.write()

    def write(self) -> None:
        """Write what waits. If that fails, those items will be compared when they are run again."""
        entries, self._entries = self._entries, []
        if not entries or self._ledger is None:
            return
        try:
            self._ledger.add(*entries)
            self.failure = ""
        except (OSError, CkptmoveError) as error:
            self.failure = f"the ledger could not record what is done: {error}"
