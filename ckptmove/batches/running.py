"""Run a planned batch: hand out items, collect results, and always clean up."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import replace
from typing import TYPE_CHECKING

from ..display.phrases import plural
from ..errors import CkptmoveError
from ..reports.batch.items import (
    BUSY,
    FAILED,
    LEFT_OUT,
    OUTCOMES,
    SKIPPED,
    Contents,
    Result,
    Task,
    result_of,
    skipped_result,
)
from ..reports.batch.report import BatchPlan, BatchReport
from ..reports.batch.table import InspectedItem
from ..sources import place_of
from ..sources.known_objects import KnownObjects
from ..system.files import sync_folder, with_those_above
from ..writing.in_place import recover_if_interrupted
from ..writing.verify import Progress
from .executors.bundle import Threads, bundles_of, foretell, work
from .executors.process_pool import WorkerDied, Workers
from .outputs import named_in
from .trees import open_ledger, tree_at
from .trees.ledger import LedgerWriter

if TYPE_CHECKING:
    from .executors.ray_executor import Cluster

_LOGGER = logging.getLogger("ckptmove.batch")
logging.getLogger("ckptmove").addHandler(logging.NullHandler())  # print nothing unless asked
_AHEAD = 2  # items handed out for each worker
_FAR_AHEAD = 256  # if the number of workers is unknown
_Tasks = tuple[Task, ...]  # tasks of one call: one item, or a bundle of small ones
_Event = Future[list[Result]] | tuple[_Tasks, int]


class Batch(Iterator[Result]):
    """A planned batch that runs while you iterate over it; a context manager that closes it.

    If you stop early (by `close`, an exception or Ctrl-C), you can resume later: items that have
    not begun do not begin, and items in progress are stopped and cleaned up (unless another
    executor runs them).

    In a dry run nothing is done: each result says what would happen to the item, judged by its
    metadata.
    """

    def __init__(
        self,
        plan: BatchPlan,
        jobs: int,
        executor: Executor | None,
        progress: Progress | None,
        *,
        cluster: Cluster | None = None,
        dry_run: bool = False,
        max_failures: int | None = None,
        known_objects: KnownObjects | None = None,
    ) -> None:
        self._cluster = cluster
        call = foretell if dry_run else work
        self._run = _Run(plan, jobs, executor, progress, cluster, call, max_failures, known_objects)
        self._results = self._run.results()
        self._is_pending = not dry_run and bool(plan.tasks)

    def __iter__(self) -> Batch:
        return self

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __next__(self) -> Result:
        self._is_pending = False
        return next(self._results)

    def __del__(self) -> None:
        if getattr(self, "_is_pending", False):
            told = "the batch was planned and never run: iterate over it, or close it"
            warnings.warn(told, RuntimeWarning, stacklevel=2, source=self)

    def close(self) -> None:
        """Stop the batch, and the items in progress."""
        self._is_pending = False
        close = getattr(self._results, "close", None)
        if close is not None:
            close()
        if self._cluster is not None:  # the cluster was joined, even if no item has begun
            self._cluster.stop()

    @property
    def plan(self) -> BatchPlan:
        """The plan; in a dry run, with the predicted result of each item so far."""
        return self._run.plan

    @property
    def current(self) -> list[str]:
        """The names of the items in progress, as far as known; otherwise the last one."""
        return self._run.current

    def report(self) -> BatchReport:
        """Return the results so far."""
        return self._run.report()


class _Run:
    """One run of a batch. Its results end when the `Batch` that iterates over them is gone."""

    def __init__(
        self,
        plan: BatchPlan,
        jobs: int,
        executor: Executor | None,
        progress: Progress | None,
        cluster: Cluster | None,
        call: Callable[[_Tasks], list[Result]],
        max_failures: int | None,
        known_objects: KnownObjects | None,
    ) -> None:
        self._plan = plan
        self._objects = known_objects
        self._call = call
        self._max_failures = max_failures
        self._forecasts = list[Result]()
        self._copied = self._removed = 0
        self._may_have_left = cluster is not None  # such as uploads of dead nodes
        self._jobs = jobs
        self._executor = executor
        self._cluster = cluster
        self._progress = progress
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._pending: dict[Future[list[Result]], _Tasks] = {}
        self._reported_nbytes: Counter[str] = Counter()
        self._last: list[str] = []
        self._folders: set[str] = set()
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._failures = list[Result]()
        self._items = list[InspectedItem]()  # if digests are requested
        self._contents = plan.verb == "inspect" or any(task.contents for task in plan.tasks)
        self._names_with_result: set[str] = set()
        self._notes = list[str]()
        self._nbytes = self._bytes_written = 0
        self._started = time.monotonic()
        ledger = plan.tasks[0].ledger if plan.tasks else ""
        self._ledger = LedgerWriter(open_ledger(ledger) if ledger else None)

    @property
    def plan(self) -> BatchPlan:
        """As `Batch.plan`."""
        foretold = tuple(self._forecasts)
        return replace(self._plan, forecasts=foretold) if self._is_dry else self._plan

    @property
    def _is_dry(self) -> bool:
        return self._call is foretell

    @property
    def current(self) -> list[str]:
        """As `Batch.current`."""
        running = (tasks for future, tasks in self._pending.items() if future.running())
        return [_name_of(tasks) for tasks in running] or self._last

    def report(self) -> BatchReport:
        """As `Batch.report`."""
        remaining = [task.item.name for task in self._plan.tasks]
        return BatchReport(
            verb=self._plan.verb,
            source=self._plan.source,
            destination=self._plan.destination,
            outcomes=dict(self._counts),
            copied=self._copied,
            sources_removed=self._removed,
            failures=tuple(sorted(self._failures)),
            remaining=tuple(name for name in remaining if name not in self._names_with_result),
            others=self._plan.others,
            nbytes=self._nbytes,
            bytes_written=self._bytes_written,
            seconds=time.monotonic() - self._started,
            notes=(*self._plan.notes, *self._notes),
            items=tuple(sorted(self._items)) if self._contents else None,
        )

    def results(self) -> Iterator[Result]:
        """The results of the items, as they finish."""
        for item in self._plan.done:
            yield self._count(skipped_result(item, "done before", item))
        workers = self._workers()
        plan = self._plan
        _LOGGER.info("%s %s: %d items, %d bytes", plan.verb, plan.source, *_totals(plan))
        executor = self._executor or workers
        assert executor is not None
        finished = False
        try:
            for result in self._gather(executor):
                self._ledger.add(result.entries, result.nbytes)
                yield self._count(result)
                if len(self._failures) == self._max_failures and self._has_items_left():
                    self._notes.append(f"stopped after {plural(len(self._failures), 'failure')}")
                    return
            finished = True
        finally:
            if workers is not None:
                workers.shutdown() if finished else workers.stop()
            elif not finished:
                self._give_up()
            self._may_have_left |= not finished
            self._ledger.write()
            if self._ledger.failure:
                self._notes.append(self._ledger.failure)
            if not self._is_dry:
                self._tidy_up()
            _LOGGER.info("%s %s: %s", plan.verb, plan.source, self._counts)

    def _has_items_left(self) -> bool:
        """Whether there are items without a result."""
        return any(task.item.name not in self._names_with_result for task in self._plan.tasks)

    def _workers(self) -> Workers | Threads | Cluster | None:
        """Start our own workers, unless the user has given an executor."""
        if self._cluster is not None:
            self._cluster.listener = self._receive
            return self._cluster
        if self._executor is not None:
            return None
        known_objects, self._objects = self._objects or KnownObjects(), None
        if Threads.suit(self._plan.tasks):
            return Threads(self._jobs, known_objects)
        return Workers(min(self._jobs, len(self._plan.tasks)), self._receive)

    def _window(self) -> int:
        """How many items to hand out at once."""
        if self._cluster is not None:
            return self._cluster.ahead
        return _FAR_AHEAD if self._executor is not None else _AHEAD * self._jobs

    def _receive(self, tasks: _Tasks, nbytes: int) -> None:
        self._events.put((tasks, nbytes))

    def _gather(self, executor: Executor) -> Iterator[Result]:
        todo, later = deque(bundles_of(self._plan.tasks, self._jobs)), deque[Task]()
        while todo or later or self._pending:
            while todo and len(self._pending) < self._window():
                self._submit(executor, todo.popleft())
            if not self._pending:  # only items of other runs are left
                self._submit(executor, (later.popleft()._replace(patient=True),))
            try:
                event = self._events.get(timeout=self._ledger.seconds)
            except queue.Empty:
                self._ledger.write_due()
                continue
            if isinstance(event, tuple):
                (task, *_), nbytes = event
                self._tell(task, nbytes)
                continue
            tasks = self._pending.pop(event)
            if len(tasks) > 1 and self._is_lost(event):  # unclear which item, if any, is the cause
                todo.extendleft((task,) for task in reversed(tasks))
                continue
            for task, result in zip(tasks, self._results_of(event, tasks), strict=True):
                if result.outcome == BUSY:
                    later.append(task)
                    continue
                self._tell(task, max(0, task.item.nbytes - self._reported_nbytes[task.item.name]))
                yield result

    def _submit(self, executor: Executor, tasks: _Tasks) -> None:
        try:
            future: Future[list[Result]] = executor.submit(self._call, tasks)
        except Exception as error:  # the executor is broken, or was shut down
            future = Future()
            future.set_exception(error)
        self._pending[future] = tasks
        future.add_done_callback(self._events.put)

    def _tell(self, task: Task, nbytes: int) -> None:
        """Report progress: for each item at most its size, even if more was written."""
        left = task.item.nbytes - self._reported_nbytes[task.item.name]
        nbytes = min(nbytes, left)
        self._reported_nbytes[task.item.name] += nbytes
        self._last = [task.item.name]
        if self._progress is not None:
            self._progress(nbytes)

    def _is_lost(self, future: Future[list[Result]]) -> bool:
        """Whether the process that did the item died."""
        died = not future.cancelled() and isinstance(future.exception(), WorkerDied)
        self._may_have_left |= died
        return died

    def _results_of(self, future: Future[list[Result]], tasks: _Tasks) -> list[Result]:
        hint = None
        try:
            return future.result()
        except CancelledError:
            why = "was cancelled"
        except WorkerDied as error:
            self._may_have_left = True
            (task,) = tasks
            why, hint = str(error), self._mend(task) or error.hint
        except CkptmoveError:  # a fault of the workers, not of this item
            raise
        except Exception as error:
            self._may_have_left = True
            why = " ".join(f"the executor failed: {type(error).__name__}: {error}".split())
        return [result_of(task.item, FAILED, why, hint=hint) for task in tasks]

    def _mend(self, task: Task) -> str | None:
        """Remove leftovers of an item whose worker died; return a hint if that failed."""
        if task.in_place:
            try:
                recover_if_interrupted(task.item.path)
            except CkptmoveError as error:
                return error.hint
        elif task.item.output and not self._is_dry:
            with contextlib.suppress(CkptmoveError, OSError):  # the next run does it
                tree = tree_at(os.path.dirname(task.item.output))
                tree.remove_leftovers([task.item], task.ledger)
        return None

    def _count(self, result: Result) -> Result:
        self._counts[result.outcome] += 1
        self._copied += result.copied
        self._removed += result.source_removed
        if self._plan.verb == "inspect":
            contents = None if result.report is None else Contents(**result.report)
            self._items.append(InspectedItem.of(result, contents))
        elif self._contents:
            self._items.append(InspectedItem.of(result, result.contents))
        if self._is_dry:
            self._forecasts.append(result)
        self._names_with_result.add(result.name)
        self._folders.update(result.folders)
        if not result.ok:
            self._failures.append(result)
        elif result.outcome not in (SKIPPED, LEFT_OUT):
            self._nbytes += result.nbytes
            self._bytes_written += result.bytes_written
        if not result.ok:
            _LOGGER.warning("%s %s: %s", result.outcome, result.name, result.reason)
        return result._replace(folders=(), entries=(), digests=self._digests_by_name(result))

    def _digests_by_name(self, result: Result) -> dict[str, str]:
        """Return the digests of a result, by names in the destination."""
        return named_in(self._plan.destination or "", result.output or "", result.digests)

    def _give_up(self) -> None:
        """Cancel calls that were not begun, and wait for the others."""
        for future in self._pending:
            future.cancel()
        for future in self._pending:
            with contextlib.suppress(Exception, CancelledError):
                self._folders.update(*(each.folders for each in future.result()))

    def _tidy_up(self) -> None:
        """Sync the names of new files, and remove temporary files."""
        plan = self._plan
        for folder in sorted(with_those_above(self._folders, plan.destination or "")):
            try:
                sync_folder(folder)
            except FileNotFoundError:  # its files are gone, such as outputs that were only compared
                continue
            except OSError as error:
                self._notes.append(
                    f"{folder} may lose file names in a power failure: {error.strerror}"
                )
        written = [each.item for each in plan.tasks if each.item.output not in ("", each.item.path)]
        if plan.destination is not None and written and not self._is_clean(plan.destination):
            with contextlib.suppress(CkptmoveError, OSError):
                tree_at(plan.destination).remove_leftovers(written)

    def _is_clean(self, destination: str) -> bool:
        """Whether there can be no leftovers, so that no requests are needed to look for them."""
        return not self._may_have_left and not place_of(destination).opens_by_path


def _name_of(tasks: _Tasks) -> str:
    """Return the name to show for the tasks of one call."""
    more = f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""
    return tasks[0].item.name + more


def _totals(plan: BatchPlan) -> tuple[int, int]:
    return len(plan.tasks), plan.nbytes
