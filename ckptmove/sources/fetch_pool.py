"""A thread pool for fetching, which never delays the end of the process.

The threads of `concurrent.futures` are joined at the end of a process, however long a server takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_AT_ONCE = 32  # requests


class FetchPool(Generic[_T]):
    """A few threads, each started when there is work for it and the others are busy."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[tuple[Future[_T], Callable[[], _T]] | None] = SimpleQueue()
        self._guard, self._unfinished = threading.Lock(), 0

    def submit(self, fetch: Callable[[], _T]) -> Future[_T]:
        """Submit a fetch; its future may be cancelled until it is begun."""
        future: Future[_T] = Future()
        self._todo.put((future, partial(copy_context().run, fetch)))
        with self._guard:
            self._unfinished += 1
            if len(self._threads) < min(self._count, self._unfinished):
                thread = threading.Thread(target=self._run, name="ckptmove-fetch", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """Begin no more fetches, and do not wait for those in progress."""
        while not self._todo.empty():
            waiting = self._todo.get()
            if waiting is not None:
                waiting[0].cancel()
        for _ in self._threads:
            self._todo.put(None)

    def _run(self) -> None:
        while (todo := self._todo.get()) is not None:
            future, fetch = todo
            if future.set_running_or_notify_cancel():
                self._do(future, fetch)
            else:
                self._finished()
            del todo, future, fetch  # release the result while waiting for more work

    def _do(self, future: Future[_T], fetch: Callable[[], _T]) -> None:
        try:
            result = fetch()
        except BaseException as error:
            self._finished()
            future.set_exception(error)
        else:
            self._finished()
            future.set_result(result)

    def _finished(self) -> None:
        with self._guard:
            self._unfinished -= 1


def result_of(first: Future[_T], others: Iterable[Future[_T]]) -> _T:
    """Return the result of the first future, or raise the error of any that fails before it.

    A server may take long for one request, while another was already refused.
    """
    waiting = {first, *others}
    while not first.done():
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for each in done:
            each.result()
    return first.result()


def map_parallel(call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
    """Call a function for each, several at a time, in order; an error ends it without waiting."""
    fetchers, coming = FetchPool[_R](_AT_ONCE), deque[Future[_R]]()
    try:
        for each in given:
            coming.append(fetchers.submit(partial(call, each)))
            if len(coming) > 2 * _AT_ONCE:
                yield result_of(coming.popleft(), coming)
        while coming:
            yield result_of(coming.popleft(), coming)
    finally:
        fetchers.close()
