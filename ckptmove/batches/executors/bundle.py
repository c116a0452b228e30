"""Bundles: small items of a batch that one call does, because each alone would mostly wait.

Items in a store are done concurrently, because each waits for answers. Local items are done
together: all are written and verified, their file system is synced once, then each gets its name.
The promise is the same: a file with its final name is complete, verified and on disk. An item that
can't get its name in this way is done again, alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextvars import copy_context
from functools import partial
from typing import Any

from ...errors import CkptmoveError
from ...reports.batch.items import BUSY, LedgerEntry, Result, Task, result_of
from ...sources import place_of
from ...sources.fetch_pool import FetchPool
from ...sources.known_objects import KnownObjects, recalling
from ...writing.final_name import syncing_later
from ...writing.in_place.find_journal import looking_once
from ...writing.staged_file import LocalFile, naming_later, sync_together
from ..messages import LISTENER
from ..trees import Ledger
from .worker import (
    Steps,
    catching,
    do_alone,
    do_in_steps,
    foretell_alone,
    refuse_clash,
    shared_ledger,
    unrecorded_note,
    with_notes,
)

_SMALL = 256 << 10  # largest item in a bundle, in bytes
_MOST = 64  # items in a bundle: this many files are open, and lost if the process is killed
_FEW = 300  # this many items of a store take no longer than starting processes
_GRACE = 30.0  # seconds for begun items when a batch is stopped
_SHARES = 4  # least number of bundles per worker, so that all workers end at about the same time


def bundles_of(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, ...]]:
    """Yield bundles of the tasks, in order; large tasks are alone."""
    small = [task for task in tasks if _fits(task)]
    size = max(1, min(_MOST, len(small) // (_SHARES * jobs)))
    bundle = list[Task]()
    for task in tasks:
        if not _fits(task):
            yield (task,)
            continue
        bundle.append(task)
        if len(bundle) == size:
            yield tuple(bundle)
            bundle = []
    if bundle:
        yield tuple(bundle)


def _fits(task: Task) -> bool:
    """Whether an item can be in a bundle; a time limit or a change in place needs it alone."""
    small = task.item.kind in ("file", "other") and task.item.nbytes <= _SMALL
    return small and not task.in_place and task.timeout is None


class Threads(Executor):
    """Does a few small items of a store in this process, which has imported everything.

    Starting another process would take longer than the items.
    """

    def __init__(self, count: int, known: KnownObjects) -> None:
        """`known`: objects read during planning, which need not be read again."""
        self._pool = FetchPool[Any](count)
        self._known = known
        self._begun = list[Future[Any]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with recalling(self._known):
            self._begun.append(self._pool.submit(partial(fn, *args, **kwargs)))
        return self._begun[-1]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.stop()

    def stop(self) -> None:
        """Begin no more items, and wait a while for those that were begun."""
        self._pool.close()
        wait([each for each in self._begun if not each.cancelled()], _GRACE)

    @staticmethod
    def suit(tasks: Sequence[Task]) -> bool:
        """Whether threads are enough for these tasks."""
        few = 0 < len(tasks) <= _FEW and all(map(_fits, tasks))
        return few and not any(_all_here([task]) for task in tasks)


def work(tasks: Sequence[Task]) -> list[Result]:
    """Do items that are not done yet; errors of an item are in its result."""
    if len(tasks) == 1:
        return [do_alone(tasks[0])]
    token = LISTENER.set(None)  # for small items, the end is enough as progress
    try:
        if not _all_here(tasks):
            return _at_once(do_alone, tasks)
        return _done_together(tasks) if tasks[0].ledger else list(map(do_alone, tasks))
    finally:
        LISTENER.reset(token)


def foretell(tasks: Sequence[Task]) -> list[Result]:
    """Return what would happen to items, as far as their metadata tells; write nothing."""
    if len(tasks) > 1 and not _all_here(tasks):
        return _at_once(foretell_alone, tasks)
    return list(map(foretell_alone, tasks))


def _all_here(tasks: Iterable[Task]) -> bool:
    """Whether all items and outputs are local files."""
    paths = {path for task in tasks for path in (task.item.path, task.item.output) if path}
    return all(place_of(path).opens_by_path for path in paths)


def _at_once(call: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Call a function for all concurrently; if interrupted, wait for the begun calls."""
    pool = FetchPool[Result](len(tasks))
    coming = [pool.submit(partial(call, task)) for task in tasks]
    try:
        return [each.result() for each in coming]
    finally:
        pool.close()
        wait([each for each in coming if not each.cancelled()])


def _done_together(tasks: Sequence[Task]) -> list[Result]:
    """Do local items whose outputs share one sync."""
    ledger = shared_ledger(tasks[0].ledger, tasks[0].since)
    names = [task.item.name for task in tasks]
    with (
        looking_once() as journals,
        contextlib.ExitStack() as ending,
        ledger.lock(names, patient=False) as held,
    ):
        known, ours = ledger.entries_of(held), set(held)
        begun = [_Item(task, ledger, known) for task in tasks if task.item.name in ours]
        for each in begun:
            ending.callback(each.end)
            each.write()
        with contextlib.suppress(OSError):  # then each is done alone, and reports its own error
            sync_together(file for each in begun for file in each.files)
            for each in begun if journals.are_clear() else ():
                each.finish()
        results = {each.task.item.name: each.result for each in begun if each.result is not None}
        _record(ledger, results)
    for task in tasks:
        name = task.item.name
        if name not in ours:
            results[name] = result_of(task.item, BUSY)
        elif name not in results:
            results[name] = do_alone(task)
    return [results[name] for name in names]


def _record(ledger: Ledger, results: dict[str, Result]) -> None:
    """Record the finished items in the ledger, and remove the entries from the results."""
    entries = [entry for each in results.values() for entry in each.entries]
    note = ""
    try:
        if entries:
            ledger.add(*entries)
    except (OSError, CkptmoveError) as error:
        note = unrecorded_note(error)
    for name, each in results.items():
        noted = with_notes(each, [note]) if note and each.entries else each
        results[name] = noted._replace(entries=())


class _Item:
    """An item of a bundle: written, then named and recorded."""

    def __init__(self, task: Task, ledger: Ledger, known: Mapping[str, LedgerEntry]) -> None:
        self.task = task
        self.result: Result | None = None  #: None while it waits, or if it got no name
        self.files = list[LocalFile]()  #: files that wait for their names
        self._steps = self._caught(do_in_steps(task, ledger, known, recorded=False))
        self._context = copy_context()  # each item has its own
        self._seconds = 0.0

    def _caught(self, steps: Steps) -> Steps:
        with syncing_later() as folders, catching(self.task) as made, naming_later(self.files):
            refuse_clash(self.task)
            made.result = yield from steps
        assert made.result is not None, "what was raised was caught"
        return made.result._replace(folders=tuple(sorted(folders)))

    def write(self) -> None:
        """Write and verify the files, which get their names later; do the rest if possible."""
        self._go_on()
        if self.result is not None:
            self._drop()

    def finish(self) -> None:
        """Name the written files, and continue; if one gets no name, there is no result."""
        try:
            for each in [*self.files]:
                self._context.run(each.name_now)
        except CkptmoveError:
            return
        if self.result is None:
            self._go_on()

    def end(self) -> None:
        """Remove files that did not get a name."""
        self._context.run(self._steps.close)
        self._drop()

    def _drop(self) -> None:
        for each in [*self.files]:
            each.drop()

    def _go_on(self) -> None:
        started = time.monotonic()
        try:
            self._context.run(next, self._steps)
        except StopIteration as ended:
            self.result = ended.value
        self._seconds += time.monotonic() - started
        if self.result is not None:
            self.result = self.result._replace(seconds=self._seconds)
