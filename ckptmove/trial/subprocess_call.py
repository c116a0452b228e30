"""Call a function in a separate process, so that even a crash is a result.

The arguments and the result are files in a temporary folder. No pipe is used for them, because a
process that the function started could keep it open forever; such processes are ended too. If the
function runs code from a file, its process is guarded, and ended if it tries to reach outside.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .. import errors
from ..system.signals import CRASHES, KILL
from ..system.temporary import temporary_folder
from .sandbox import guard

_MOST_SAID = 1 << 16  # the last bytes of the output that are kept
_MOST_TOLD = 1 << 26  # bytes of the result file
_GRACE = 1.0  # seconds that remaining processes have to end
#: Imports this copy of ckptmove, wherever it is, without `sys.path` or environment variables.
_BEGIN = """
import sys
from importlib import util
if sys.path[:1] == [""]:
    del sys.path[0]
spec = util.spec_from_file_location("ckptmove", sys.argv[1])
sys.modules["ckptmove"] = util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["ckptmove"])
from ckptmove.trial.subprocess_call import serve
serve(sys.argv[2])
"""
_ASKED, _TOLD = "asked.json", "told.json"


class SubprocessLost(Exception):
    """The process gave no result.

    Attributes:
        code: its exit code, or the negative number of a signal; None: its time was up.
        latest: its latest intermediate result, if any.
        lines: the last lines of its output.
        attempt: the forbidden action that ended it, if it was guarded, such as `open a socket`.
    """

    def __init__(
        self,
        why: str,
        *lines: str,
        code: int | None = None,
        latest: dict[str, Any] | None = None,
        attempt: str | None = None,
    ) -> None:
        super().__init__(why)
        self.attempt = attempt
        self.lines = lines
        self.code = code
        self.latest = latest

    @property
    def crashed(self) -> bool:
        """Whether code in C ended it, as by reading values of a tensor that has none."""
        return self.attempt is None and -(self.code or 0) in CRASHES


class _SignalReceived(BaseException):
    """A signal arrived that asks this process to end."""


def call_in_subprocess(
    function: Callable[[Any], Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    patience: float | None,
    heard: bool = False,
    script: bool = False,
    guarded: bool = False,
) -> dict[str, Any]:
    """Call a function in another process.

    Args:
        function: a function at the top level of a module; its argument and result are JSON data.
        request: the argument of the function.
        patience: seconds until the process is ended; None waits forever.
        heard: whether its output goes to stderr; else only the last line is shown if it is lost.
        script: whether it has the `sys.path` and the standard input of `python script.py`; else it
            has the `sys.path` of this process and no standard input.
        guarded: whether it runs code from a file; see `guard`. It calls `enforce` after it imported
            all code of the user.

    Raises:
        SubprocessLost: it ended without a valid result.
        CkptmoveError: the function raised it.
    """
    asked = {
        "module": function.__module__,
        "name": function.__name__,
        "path": None if script else [str(Path(path).absolute()) for path in sys.path],
        "request": request,
    }
    with temporary_folder() as folder:
        Path(folder, _ASKED).write_text(json.dumps(asked))
        own = os.fspath(Path(folder, "tmp")) if guarded else None
        if own is not None:
            Path(own).mkdir()
        code, said = _run(folder, patience, heard, None if script else subprocess.DEVNULL, own)
        done, result = _read(folder)
        attempt = None if own is None else guard.read_attempt(folder, code)
    if attempt is not None:
        raise SubprocessLost(f"it tried to {attempt}", code=code, latest=result, attempt=attempt)
    if done and result is not None:
        if "error" not in result:
            return result
        if (error := _error(result)) is not None:
            raise error
    if code is None:
        raise SubprocessLost(f"it did not finish within {patience:g} s", latest=result)
    lines = said.decode(errors="replace").strip().splitlines()
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    raise SubprocessLost(f"its process ended ({how})", *lines[-1:], code=code, latest=result)


def _error(result: Mapping[str, Any]) -> errors.CkptmoveError | None:
    """The error that the process reports, if valid: the process may report arbitrary data."""
    name, message, path, hint = map(result.get, ("error", "message", "path", "hint"))
    if not isinstance(name, str) or not isinstance(message, str):
        return None
    if not all(each is None or isinstance(each, str) for each in (path, hint)):
        return None
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, errors.CkptmoveError):
        return None
    return kind(message, path=path, hint=hint)


def _run(
    folder: str, patience: float | None, heard: bool, stdin: int | None, own: str | None
) -> tuple[int | None, bytes]:
    """Run the process until it ends or its time is up; returns its exit code and output."""
    ours = Path(__file__).resolve().parents[1] / "__init__.py"
    said = bytearray()
    out, listener = 2, None
    if not heard:
        source, out = os.pipe()
        listener = threading.Thread(target=_listen, args=(source, said), daemon=True)
        listener.start()
    with _signals_raised():
        process: subprocess.Popen[bytes] | None = None
        try:
            # A new session gives the process its own group; it can still read from a terminal.
            process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, os.fspath(ours), folder],
                stdin=stdin,
                stdout=out,
                stderr=out,
                env=None if own is None else {**os.environ, **guard.environment(own)},
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            code = process.returncode
        finally:
            if listener is not None:
                os.close(out)
            if process is not None:
                _end(process)
    if listener is not None:
        listener.join(_GRACE)  # a process that left the group may still hold the other end
    return code, bytes(said)


def _listen(source: int, said: bytearray) -> None:
    """Read a pipe, and keep only the end of its data."""
    with open(source, "rb", buffering=0) as stream:
        while piece := stream.read(_MOST_SAID):
            said += piece
            del said[:-_MOST_SAID]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: first with SIGTERM, so that they can clean up."""
    if not hasattr(os, "killpg"):
        process.kill()
        process.wait()
        return
    for number in (signal.SIGTERM, KILL):
        try:
            os.killpg(process.pid, number)
            until = time.monotonic() + _GRACE
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.01)
        except OSError:  # no process is left
            break
    process.wait()


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """A context in which a signal that would end this process ends the other process first."""
    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    ours = [each for each in numbers if each and signal.getsignal(each) is signal.SIG_DFL]
    arrived: list[int] = []

    def arrive(number: int, frame: FrameType | None) -> None:
        if not arrived:
            arrived.append(number)
            raise _SignalReceived

    if threading.current_thread() is not threading.main_thread():
        ours = []
    try:
        for each in ours:
            signal.signal(each, arrive)
        yield
    except _SignalReceived:
        pass
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)
        if arrived:
            os.kill(os.getpid(), arrived[0])


def _read(folder: str) -> tuple[bool, dict[str, Any] | None]:
    """Whether the process finished, and its result or latest intermediate result."""
    try:
        told = json.loads(guard.read_own(Path(folder, _TOLD), _MOST_TOLD))
        result = told["result"]
        return told["done"] is True, result if isinstance(result, dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, None


# -- in that process -------------------------------------------------------------------------------


class _ServedProcess:
    """The folder for the results, and the id of the process: forks of it report nothing."""

    folder = ""
    process = 0


def serve(folder: str) -> None:
    """In that process: call the requested function and report its result."""
    _ServedProcess.folder, _ServedProcess.process = folder, os.getpid()
    asked = json.loads(Path(folder, _ASKED).read_bytes())
    sys.argv[1:] = []
    if asked["path"] is not None:
        sys.path[:] = asked["path"]
    function = getattr(importlib.import_module(asked["module"]), asked["name"])
    result: Mapping[str, Any]
    try:
        result = function(asked["request"])
    except errors.CkptmoveError as error:
        result = {
            "error": type(error).__name__,
            "message": str(error),
            "path": error.path,
            "hint": error.hint,
        }
    tell(result)


def enforce() -> tuple[str, ...]:
    """In that process: guard it from now on; see `guard.enforce`."""
    return guard.enforce(_ServedProcess.folder)


def tell_so_far(result: Mapping[str, Any]) -> None:
    """In that process: report an intermediate result, in case the process ends early."""
    if os.getpid() == _ServedProcess.process:
        with contextlib.suppress(OSError):
            _write(result, done=False)


def tell(result: Mapping[str, Any]) -> NoReturn:
    """In that process: report the result, and exit."""
    if os.getpid() == _ServedProcess.process:
        _write(result, done=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # they may be objects of the user's code
            stream.flush()
    os._exit(0)  # torch may abort during shutdown


def _write(result: Mapping[str, Any], *, done: bool) -> None:
    path = Path(_ServedProcess.folder, _TOLD)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"done": done, "result": result}))
    draft.replace(path)
