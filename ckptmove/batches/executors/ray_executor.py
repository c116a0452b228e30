"""An executor that runs its calls as tasks on a Ray cluster.

Ray runs in its own process (`ray_driver`), because it prints, takes over signals, tries for minutes
to reach a missing cluster, and ends a process that loses its cluster.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing import Pipe
from typing import Any

from ...errors import UsageError, WriteError
from ...reports.batch.items import LedgerEntry, Task
from ...writing.final_name import failure_of
from ..trees import open_ledger
from .process_pool import Listener, WorkerDied
from .ray_driver import TaskCall

_BEGIN = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve{given!r}"
_DRIVER = f"{__package__}.ray_driver"
_CONNECTING = 30.0  # seconds to reach a cluster
_QUIET = 4.0  # seconds without an answer before tasks report progress
_GRACE = 40.0  # seconds to stop
_LEAST_AHEAD = 16  # least tasks handed out, even to a small cluster: it may grow
_AHEAD = 2  # tasks handed out for each CPU


class TaskLost(WorkerDied):
    """The Ray task of a call died in every try."""

    def __init__(self, why: str, hint: str | None) -> None:
        super().__init__(0)
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        return self.why


class Cluster(Executor):
    """A Ray cluster. Each call takes one CPU; calls of a node that dies are retried."""

    def __init__(self, address: str) -> None:
        """Join a cluster at `auto`, `HOST:PORT` or `ray://HOST:PORT`, or raise UsageError."""
        self.ahead = _LEAST_AHEAD  #: how many calls to hand out at once
        self.listener: Listener | None = None  #: called with progress
        self._jobs: dict[int, tuple[Future[Any], Any]] = {}
        self._count = 0
        self._marks: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()
        self._ended = self._stopped = False
        self._pipe, theirs = Pipe()
        path = [os.path.abspath(each) for each in sys.path]
        given = (theirs.fileno(), address, _QUIET)
        code = _BEGIN.format(path=path, module=_DRIVER, given=given)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us to pass on
        )
        theirs.close()
        try:
            self._join(address)
        except BaseException:
            self._process.kill()
            self._end()
            raise
        self._thread = threading.Thread(target=self._listen, name="ckptmove-ray", daemon=True)
        self._thread.start()

    def _join(self, address: str) -> None:
        why, hint = "no Ray cluster answers there", None
        with contextlib.suppress(EOFError):
            if self._pipe.poll(_CONNECTING):
                kind, *said = self._pipe.recv()
                if kind == "connected":
                    self._grown(said[0])
                    return
                why, hint = said
                raise UsageError(why, hint=hint)
        raise UsageError(f"cannot reach a Ray cluster at {address!r}: {why}", hint=hint)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`, without keywords; the first argument is tasks of a batch."""
        assert not kwargs, "no longer needed"
        call = TaskCall(fn, args, *self._mark(args[0][0]))
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(_gone())
                return future
            self._count += 1
            self._jobs[self._count] = future, args[0]
            with contextlib.suppress(OSError):  # the future passes it on
                self._pipe.send((self._count, pickle.dumps(call)))
        return future

    def _mark(self, task: Task) -> tuple[str, int, str]:
        """Return a ledger entry by which a node can check that it sees the same destination."""
        path = task.ledger
        if not path or open_ledger(path).is_shared:  # all machines see the same store
            return "", 0, ""
        if path not in self._marks:
            mark = f"/{os.urandom(8).hex()}"  # no item has this name
            try:
                open_ledger(path).add(LedgerEntry(mark, task.request, "run"))
            except OSError as error:
                raise failure_of(error, path) from error
            self._marks[path] = task.since, mark
        return path, *self._marks[path]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not cancel_futures:
            while wait and self._jobs:
                time.sleep(0.01)
        self.stop()

    def stop(self) -> None:
        """End now: what was not begun is cancelled, what was is broken off and cleaned up.

        If all is done, the driver disconnects from the cluster by itself.
        """
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(OSError), self._lock:
            self._pipe.send(None)
        if not self._jobs:
            return
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def _end(self) -> None:
        self._process.wait()
        self._pipe.close()

    def _grown(self, cpus: int) -> None:
        self.ahead = max(_LEAST_AHEAD, _AHEAD * cpus)

    # -- one thread ----------------------------------------------------------------------------

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._hear(*self._pipe.recv())
        with self._lock:
            self._ended = True
        for future, _ in self._jobs.values():
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(_gone())
        self._jobs.clear()
        self._end()

    def _hear(self, kind: str, *said: Any) -> None:
        if kind == "progress":
            for number, nbytes in said[0].items():
                if number in self._jobs:  # otherwise it was answered already
                    self._progress(*self._jobs[number], nbytes)
        elif kind == "cpus":
            self._grown(said[0])
        else:
            future, _ = self._jobs.pop(said[0])
            if not (future.running() or future.set_running_or_notify_cancel()):
                return
            if kind == "answered":
                _settle(future, said[1])
            elif kind == "lost":
                future.set_exception(TaskLost(*said[1:]))
            else:
                future.set_exception(TaskLost("its Ray task was cancelled", None))

    def _progress(self, future: Future[Any], task: Any, nbytes: int) -> None:
        running = future.running() or future.set_running_or_notify_cancel()
        if running and self.listener is not None:
            self.listener(task, nbytes)


def _settle(future: Future[Any], answer: bytes) -> None:
    kind, value = pickle.loads(answer)
    if kind == "returned":
        future.set_result(value)
    elif kind == "unfit":
        hint = (
            "every node needs the same version of ckptmove and a shared file system; "
            "finished items stay finished"
        )
        future.set_exception(UsageError(value, hint=hint))
    else:
        future.set_exception(value)


def _gone() -> WriteError:
    return WriteError(
        "the connection to the Ray cluster is lost",
        hint="run the same command again; finished items stay finished",
    )
