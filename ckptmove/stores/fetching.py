"""Threads that fetch: a process that ends waits for none of them.

Those of `concurrent.futures` are joined at the end of a process, however long a server may take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Fetchers:
    """A few threads, each begun when there is something to do for it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[tuple[Future[bytes], Callable[[], bytes]] | None] = SimpleQueue()

    def submit(self, fetch: Callable[[], bytes]) -> Future[bytes]:
        """Have something fetched; the future may be cancelled until it is begun."""
        future: Future[bytes] = Future()
        self._todo.put((future, fetch))
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name="ckptmove-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Begin nothing any more, and wait for nothing."""
        while not self._todo.empty():
            waiting = self._todo.get()
            if waiting is not None:
                waiting[0].cancel()
        for _ in self._threads:
            self._todo.put(None)

    def _run(self) -> None:
        while (todo := self._todo.get()) is not None:
            future, fetch = todo
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fetch())
            except BaseException as error:
                future.set_exception(error)
            del todo, future, fetch  # what was fetched is not held until there is more to do
