"""The process that talks to a Ray cluster (a Ray driver), controlled through a pipe.

    in (NUMBER, CALL) do this; None: end, and cancel unfinished calls
    out    ("connected", CPUS)                 or ("unconnected", WHY, HINT), and it ends
           ("cpus", CPUS)                      nodes came or went
           ("progress", {NUMBER: BYTES})       since the last such message
           ("answered", NUMBER, ANSWER)        ANSWER is what `carry_out` returns
           ("cancelled", NUMBER)               by somebody else
           ("lost", NUMBER, WHY, HINT)         its process died, and again when it was retried

Calls and answers are pickled; this process does not look into them. It ends when the process at the
other end of the pipe ends, for whatever reason; tasks are then cancelled, and clean up as after
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ...sources.budget import VARIABLE
from ...version import __version__
from ..messages import LISTENER, ProgressReporter, as_picklable

TRIES = 4  # tries of a task whose node or worker dies
_OFTEN = 0.25  # seconds between two messages of progress
_RARELY = 2.0  # seconds between two checks of the cluster's size
_SHORTLY = 0.05  # seconds that a new call may have to wait
_GRACE = 25.0  # seconds to clean up before a task is killed
_KNOCK = 5.0  # seconds to wait for an answer of a cluster
_STARTING = 3  # times as long until the first task ends: workers have to start, as would a listener


class TaskCall(NamedTuple):
    """A call for a Ray task, as it is pickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    ledger: str = ""  #: the path of the ledger, or nothing
    since: int = 0  #: the offset to read it from
    mark: str = ""  #: an entry of it; a node without this entry sees another file system


def serve(fd: int, address: str, quiet: float) -> None:
    """Do calls until the pipe closes.

    If no task ends for `quiet` seconds, tasks report their progress; later for the first task.
    """
    pipe = Connection(fd)
    try:
        driver = _Driver(pipe, _connected(address), quiet)
    except ImportError as error:
        why = "Ray is not installed" if error.name == "ray" else f"Ray can't be used: {error}"
        pipe.send(("unconnected", why, "pip install 'ckptmove[ray]'"))
        return
    except (Exception, SystemExit) as error:
        said = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        why = said.splitlines()[0]
        hint = "ray status shows the cluster of this machine"
        pipe.send(("unconnected", f"cannot reach a Ray cluster at {address!r}: {why}", hint))
        return
    driver.run()


def _connected(address: str) -> Any:
    """Return Ray's module after joining a cluster."""
    import ray
    import ray.util.scheduling_strategies

    meant = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = meant.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():  # Ray would try for minutes
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()
    limit = os.environ.get(VARIABLE)
    environment = {} if limit is None else {"runtime_env": {"env_vars": {VARIABLE: limit}}}
    ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **environment)
    return ray


class _Tasks:
    """Tasks in progress; tasks whose node or worker dies are begun again."""

    def __init__(self, ray: Any, progress: str, version: str) -> None:
        self._ray = ray
        self._progress = progress  # the name of the actor that collects progress
        self._task = ray.remote(num_cpus=1, max_retries=0)(_performing(version))
        self._under_way: dict[Any, tuple[int, bytes, int]] = {}  # by Ray's reference

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, number: int, call: bytes, tries: int = 1) -> None:
        """Start a task for a call; its progress is reported under its number."""
        task = self._task.remote(number, call, self._progress)
        self._under_way[task] = number, call, tries

    def ended(self, seconds: float) -> Iterator[tuple[Any, ...]]:
        """Yield the outcomes of ended tasks, as `out` above; waits `seconds` for the first."""
        if not self._under_way:
            return
        ready, rest = self._ray.wait(list(self._under_way), timeout=seconds)
        if ready and rest:
            more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0)
            ready += more
        for task in ready:
            outcome = self._outcome(task, *self._under_way.pop(task))
            if outcome is not None:
                yield outcome

    def _outcome(self, task: Any, number: int, call: bytes, tries: int) -> tuple[Any, ...] | None:
        errors = self._ray.exceptions
        try:
            return "answered", number, self._ray.get(task)
        except errors.TaskCancelledError:
            return "cancelled", number
        except errors.RayTaskError as error:
            return "answered", number, _raised(RuntimeError(_line(error)))
        except errors.RayError as error:
            if tries >= TRIES:
                return "lost", number, *self._why(error, tries)
            self.begin(number, call, tries + 1)
            return None

    def _why(self, error: Exception, tries: int) -> tuple[str, str | None]:
        errors, times = self._ray.exceptions, f", {tries} times"
        if isinstance(error, errors.OutOfMemoryError):
            return f"its worker was killed{times}", "the node ran out of memory"
        if isinstance(error, errors.NodeDiedError):
            return f"its node died{times}", None
        if isinstance(error, errors.WorkerCrashedError):
            return f"its worker died{times}", "perhaps the machine ran out of memory"
        return f"its result was lost{times}: {_line(error)}", None

    def break_off(self) -> None:
        """Make all tasks clean up and end."""
        left = list(self._under_way)
        for force, seconds in ((False, _GRACE), (True, 1.0)):
            for task in left:
                with contextlib.suppress(Exception):
                    self._ray.cancel(task, force=force)
            if left:
                with contextlib.suppress(Exception):
                    _, left = self._ray.wait(left, num_returns=len(left), timeout=seconds)


class _Driver:
    """Takes calls from the pipe, and sends outcomes, progress and the size of the cluster."""

    def __init__(self, pipe: Connection, ray: Any, quiet: float) -> None:
        self._pipe = pipe
        self._ray = ray
        self._name = f"ckptmove-{os.urandom(8).hex()}"
        self._progress: Any = None
        self._tasks = _Tasks(ray, self._name, __version__)
        self._asked: Any = None
        self._cpus = -1
        self._next_progress = self._next_size = 0.0
        self._quiet, self._next_quiet = quiet, quiet * _STARTING
        self._answered = time.monotonic()

    def run(self) -> None:
        """Run until the process at the other end of the pipe is gone."""
        try:
            self._pipe.send(("connected", self._size()))
            while self._take_calls():
                for outcome in self._tasks.ended(_SHORTLY):
                    self._pipe.send(outcome)
                    self._answered, self._next_quiet = time.monotonic(), self._quiet
                self._look_around()
        except (EOFError, OSError):
            pass
        finally:
            self._tasks.break_off()
            self._ray.shutdown()

    def _take_calls(self) -> bool:
        if not self._tasks:
            self._answered = time.monotonic()
        while self._pipe.poll(0 if self._tasks else _SHORTLY):
            said = self._pipe.recv()
            if said is None:
                return False
            number, call = said
            self._tasks.begin(number, call)
        return True

    def _look_around(self) -> None:
        now = time.monotonic()
        if self._asked is not None and self._ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(self._ray.exceptions.RayError):  # then it is begun again
                progress = self._ray.get(self._asked)
                if progress:
                    self._pipe.send(("progress", progress))
            self._asked = None
        if self._progress is None and now >= self._answered + self._next_quiet:
            self._progress = self._listener()
        if self._progress and not self._asked and self._tasks and now >= self._next_progress:
            self._asked = self._progress.take.remote()
            self._next_progress = now + _OFTEN
        if now >= self._next_size:
            before = self._cpus
            if self._size() != before:
                self._pipe.send(("cpus", self._cpus))

    def _listener(self) -> Any:
        """Return an actor that collects the progress of tasks; a short run needs none."""
        ray = self._ray
        here = ray.get_runtime_context().get_node_id()
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)
        kept = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=near)
        return kept(_progress_class()).options(name=self._name).remote()

    def _size(self) -> int:
        self._cpus = int(self._ray.cluster_resources().get("CPU", 0))
        self._next_size = time.monotonic() + _RARELY
        return self._cpus


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]


# -- in the tasks ------------------------------------------------------------------------------

# Objects for the nodes are defined inside functions, so that Ray sends them completely; ckptmove
# may be missing on the nodes.


def _progress_class() -> type:
    class ReceivedProgress:
        """Collects the progress of tasks."""

        def __init__(self) -> None:
            self.nbytes: dict[int, int] = {}

        def add(self, number: int, nbytes: int) -> None:
            self.nbytes[number] = self.nbytes.get(number, 0) + nbytes

        def take(self) -> dict[int, int]:
            taken, self.nbytes = self.nbytes, {}
            return taken

    return ReceivedProgress


def _performing(version: str) -> Callable[[int, bytes, str], bytes]:
    def perform(number: int, call: bytes, progress: str) -> bytes:
        import pickle
        import platform

        try:
            from ckptmove.version import __version__ as found
        except ImportError:
            found = ""
        if found != version:
            has = f"has ckptmove {found}, not {version}" if found else f"has no ckptmove {version}"
            return pickle.dumps(("unfit", f"the node {platform.node()} {has}"))
        from ckptmove.batches.executors.ray_driver import carry_out

        return carry_out(call, number, progress)

    return perform


_seen = set[str]()


def carry_out(sent: bytes, number: int, progress: str) -> bytes:
    """Do a pickled `TaskCall` on a node; `progress` names the actor that collects progress.

    Returns, pickled, `("returned", VALUE)`, `("raised", ERROR)`, or `("unfit", WHY)` if this node
    can't do any call.
    """
    from ..trees import open_ledger  # imported only here, so that the driver starts sooner

    try:
        call: TaskCall = pickle.loads(sent)
        if call.mark and call.mark not in _seen:
            if open_ledger(call.ledger, call.since).entry(call.mark) is None:
                why = f"the node {socket.gethostname()} does not see {call.ledger} as it is here"
                return pickle.dumps(("unfit", why))
            _seen.add(call.mark)
        context = copy_context()
        context.run(LISTENER.set, ProgressReporter(partial(_tell, progress, number), _OFTEN))
        return pickle.dumps(("returned", context.run(call.function, *call.arguments)))
    except Exception as error:
        return _raised(error)


def _tell(progress: str, number: int, nbytes: int) -> None:
    import ray

    with contextlib.suppress(Exception):  # progress is not essential
        ray.get_actor(progress).add.remote(number, nbytes)


def _raised(error: Exception) -> bytes:
    return pickle.dumps(("raised", as_picklable(error)))
