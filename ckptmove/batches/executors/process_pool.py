"""An executor of worker processes that survives the death of any of them.

The process pool of the standard library imports the user's `__main__` again, and gives up all calls
when one process is killed. Here, each process is `python -c` with a pipe in and a pipe out, or a
fork of the command line, which has already imported everything (`forking`). If one dies, only its
current call fails, and a new Python replaces it. Workers also end with the process that started
them: when its pipe closes, a worker stops as after SIGTERM, and leaves no temporary files.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextvars import ContextVar, copy_context
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn

from ...sources.filesystem import register_filesystems, registered_filesystems
from ...system import WINDOWS
from ...system.forks import Fork, can_fork
from ...system.signals import ENDING, KILL, ask_to_end, own_group
from ..messages import LISTENER, ProgressReporter, as_picklable

_LENGTH = struct.Struct("<Q")
_OFTEN = 0.1  # seconds between two messages of progress
_GRACE = 30.0  # seconds to clean up before a worker is killed
_BEGIN = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({known!r})"
_FORKING: ContextVar[bool] = ContextVar("_FORKING", default=False)
#: Called in any thread with the task and the number of bytes done since the last call.
Listener = Callable[[Any, int], object]
_Process = subprocess.Popen[bytes] | Fork


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """A context in which the first workers are forks of this process, if it has only one thread.

    Only for our own command line: another program may hold resources that do not survive a fork.
    """
    token = _FORKING.set(True)
    try:
        yield
    finally:
        _FORKING.reset(token)


class WorkerDied(Exception):
    """The worker process ended while it made the call."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code  #: the exit code, as in `subprocess`: a signal is negative
        #: the likely cause, or None
        self.hint = "perhaps the machine ran out of memory" if code == -KILL else None

    def __str__(self) -> str:
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"its worker was killed by {signal.Signals(-self.code).name}"
        return (
            f"its worker process exited with code {self.code}"
            if self.code
            else "its worker process was stopped"
        )


class Workers(Executor):
    """Worker processes, up to a maximum; each starts when there is work for it.

    Forks are made at the start, before there are threads.
    """

    def __init__(self, count: int, listener: Listener | None = None) -> None:
        self._count = count
        self._listener = listener
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: set[_Process] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._forks = list[Fork]()  # that wait for work
        if _FORKING.get() and can_fork():
            with contextlib.suppress(OSError):  # too many: `_start` makes new processes instead
                for _ in range(count):
                    self._forks.append(Fork(serve))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`; progress is reported under the first argument."""
        job = _Job(Future(), (fn, args, kwargs))
        with self._lock:
            if self._stopping:
                raise RuntimeError("the workers were stopped")
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._feed, name="ckptmove-worker", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)
        return job.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._stopping = True
        if cancel_futures:
            self._cancel()
        for _ in self._threads:
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
            while self._forks:
                self._end(self._forks.pop())

    def stop(self) -> None:
        """Stop now: cancel calls that were not begun; interrupt the others, and clean up."""
        with self._lock:
            self._stopping = True
            running = list(self._running)
        self._cancel()
        for process in running:
            _ask_to_end(process)
        self.shutdown(wait=False)
        until = time.monotonic() + _GRACE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for process in [*self._running]:
            process.kill()
        self.shutdown()

    def _cancel(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.cancel()

    # -- one thread a process ------------------------------------------------------------------

    def _feed(self) -> None:
        process: _Process | None = None
        try:
            while (job := self._jobs.get()) is not None:
                if not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    data = pickle.dumps(job.call)
                    process = process or self._start()
                    job.future.set_result(self._answer(process, job, data))
                except WorkerDied as error:
                    process = None
                    job.future.set_exception(error)
                except Exception as error:
                    job.future.set_exception(error)
        finally:
            if process is not None:
                self._end(process)

    def _start(self) -> _Process:
        code = _BEGIN.format(
            path=[os.path.abspath(each) for each in sys.path],
            module=__name__,
            known=registered_filesystems(),
        )
        with self._lock:
            if self._stopping:
                raise WorkerDied(-signal.SIGTERM)
            process: _Process
            if self._forks:
                process = self._forks.pop()
            else:
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    **own_group(),  # we pass Ctrl-C on ourselves
                )
            self._running.add(process)
        return process

    def _answer(self, process: _Process, job: _Job, data: bytes) -> Any:
        """Return or raise the result of the call; raises WorkerDied if the process ends instead."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _put(process.stdin, data)
            while True:
                kind, value = pickle.loads(_take(process.stdout))
                if kind == "raised":
                    raise value
                if kind == "returned":
                    return value
                if self._listener is not None:
                    self._listener(job.call[1][0], value)
        except (BrokenPipeError, EOFError) as error:
            raise WorkerDied(self._end(process)) from error

    def _end(self, process: _Process) -> int:
        """End the process."""
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code


def _ask_to_end(process: _Process) -> None:
    if WINDOWS:  # on systems where a signal kills at once, closing the pipe makes the worker unwind
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
    else:
        process.terminate()


class _Job(NamedTuple):
    """A call, and its future."""

    future: Future[Any]
    call: tuple[Callable[..., Any], Any, Any]


def _put(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _take(stream: IO[bytes]) -> bytes:
    """Read a message. Raises EOFError if the other end is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (nbytes,) = _LENGTH.unpack(head)
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise EOFError
    return data


# -- in the process ----------------------------------------------------------------------------


class _EndProcess(BaseException):
    """Raised to end the process, after unwinding everything."""


def serve(filesystems: Mapping[str, str] | None = None) -> None:
    """Do calls until the pipe closes. Output of other code goes to stderr.

    `filesystems` are those that the calling process has registered with fsspec.
    """
    register_filesystems(filesystems or {})
    given = os.fdopen(os.dup(0), "rb")
    told = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    ending = _Ending()
    for number in ENDING:
        signal.signal(number, ending)
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(given, calls), daemon=True).start()
    while (data := calls.get()) is not None:
        with contextlib.suppress(_EndProcess, BrokenPipeError), ending.unwound():
            _perform(data, told)
            continue
        break
    os._exit(0)  # threads of other code must not keep the process alive


class _Ending:
    """Handles signals: unwind the current call; if there is none, end the process."""

    def __init__(self) -> None:
        self._doing = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        if not self._doing:
            os._exit(0)
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)  # a second one is immediate
        raise _EndProcess

    @contextlib.contextmanager
    def unwound(self) -> Iterator[None]:
        """Context of a call, which signals unwind."""
        self._doing = True
        try:
            yield
        finally:
            self._doing = False


def _listen(given: IO[bytes], calls: queue.SimpleQueue[bytes | None]) -> None:
    """Pass on messages; when the pipe closes, stop the work in progress."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.put(_take(given))
    calls.put(None)
    ask_to_end()


def _perform(data: bytes, told: IO[bytes]) -> None:
    """Make one call, and send the answer."""
    try:
        call, args, kwargs = pickle.loads(data)
        context = copy_context()
        context.run(
            LISTENER.set,
            ProgressReporter(lambda nbytes: _put(told, pickle.dumps(("progress", nbytes))), _OFTEN),
        )
        answer = ("returned", context.run(call, *args, **kwargs))
        sent = pickle.dumps(answer)
    except Exception as error:
        sent = pickle.dumps(("raised", as_picklable(error)))
    _put(told, sent)
