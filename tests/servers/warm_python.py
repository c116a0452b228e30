"""Python processes with modules already imported: forks of a process that imported them once.

Starting Python and importing torch takes two seconds; a fork takes a moment. The fork is a process
like any other: a child of the caller, with its own arguments, folder, environment, streams and
session. What a fork can't have, such as another hash seed, starts a new Python.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What is there before a program begins that may need torch: nothing of ckptmove, nor of the tests.
_WITH_TORCH = ("numpy", "torch", "torch._dynamo", "torch.export", "safetensors.torch", "pytest")
_OF_TORCH = ("runtime", "live", "trial")  # rooms; `training` needs other frameworks


def _own(is_in: Callable[[str], bool]) -> tuple[str, ...]:
    """The modules of the package whose room is one of these."""
    return tuple(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "ckptmove").rglob("*.py"))
        if is_in(path.relative_to(ROOT).parts[1])
    )


#: What is there before a command begins: all that it may import in the middle of its work, so that
#: the system calls of a run are those of the work. torch is not.
_WITH_COMMANDS = (
    *("difflib", "hashlib", "isal.isal_zlib", "json", "locale", "shutil", "tempfile"),
    *_own(lambda room: room not in (*_OF_TORCH, "training", "__main__.py")),
)
#: What else is there before a command begins that asks torch.
_WITH_RUNS = _own(lambda room: room in _OF_TORCH)
#: What else is there before a test begins that runs on a second device.
_WITH_TESTS = (
    *("hypothesis.strategies", "_hypothesis_pytestplugin", "anyio.pytest_plugin", "numpy.random"),
    *("ckptmove.api.in_memory", "ckptmove.live", "tests.devices.installed"),
)
_ASK_TORCH = {"validate", "doctor"}
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
#: Variables that Python, C or torch read when they start: a fork must have those of its server.
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "MALLOC_", "LD_", "LC_", "LANG", "TORCH")
_READ_LATER = (
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"),  # by us
    *("TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),  # to compile
)
_WITHOUT = {"OMP_PROC_BIND": "false"}  # what they are where they are not set
_new_python = subprocess.Popen

# -- in the process that asks ----------------------------------------------------------------------


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, but a start of this Python becomes a fork with torch imported."""

    preloaded: tuple[str, ...] = _WITH_TORCH

    def _execute_child(self, *given: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        said = inspect.signature(execute).bind(*given).arguments
        asked = _asked(said)
        if asked is None:
            execute(*given)
            return
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        streams = [
            own if said[name] == -1 else said[name]
            for own, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        self.pid = _server(self._preloaded_for(asked)).fork(asked, streams)
        self._child_created = True
        self._close_pipe_fds(*(said[name] for name in pipes))  # type: ignore[attr-defined]

    def _preloaded_for(self, asked: Mapping[str, Any]) -> tuple[str, ...]:
        return self.preloaded


class WarmRun(WarmPopen):
    """The same for commands that ask torch, with the modules of the command line imported."""

    preloaded = (*_WITH_COMMANDS, *_WITH_TORCH, *_WITH_RUNS)


class WarmCommand(WarmPopen):
    """The same for commands; only those that always ask torch have torch."""

    preloaded = _WITH_COMMANDS

    def _preloaded_for(self, asked: Mapping[str, Any]) -> tuple[str, ...]:
        asks_torch = _ASK_TORCH.intersection(asked["words"][2:4])  # after -m ckptmove [batch]
        return WarmRun.preloaded if asks_torch else self.preloaded


class WarmModels(WarmPopen):
    """The same for programs with models of transformers."""

    preloaded = (
        *_WITH_TORCH,
        "transformers.models.auto.modeling_auto",
        "transformers.modeling_utils",
    )


class WarmTest(WarmPopen):
    """The same for one test on a second device, which is there, as are pytest's plugins."""

    preloaded = (*_WITH_TORCH, *_WITH_TESTS)


def _asked(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request for the fork; None if it takes a new Python."""
    refused = ("executable", "preexec_fn", "pass_fds", "shell")
    words = [] if isinstance(said["args"], (str, bytes)) else [os.fspath(a) for a in said["args"]]
    if not sys.platform.startswith("linux") or any(said[name] for name in refused):
        return None
    if words[:1] != [sys.executable]:
        return None
    if words[1:2] == ["-B"]:
        del words[1]
    if len(words) < 2 or (words[1].startswith("-") and words[1] not in ("-c", "-m")):
        return None
    env = dict(os.environ if said["env"] is None else said["env"])
    at_start = {
        name: env.get(name)
        for name in {*env, *os.environ}
        if name.startswith(_READ_AT_START) and name not in _READ_LATER
        if env.get(name, _WITHOUT.get(name)) != os.environ.get(name, _WITHOUT.get(name))
    }
    if at_start:
        return None
    folder = os.fspath(said["cwd"] or Path.cwd())
    return {
        "words": words[1:],
        "env": env,
        "cwd": folder,
        "session": said["start_new_session"],
        "limits": {kind: resource.getrlimit(kind) for kind in _limits()},
        "umask": _umask(),
    }


def _limits() -> list[int]:
    """The kinds of limits that a process hands down."""
    return sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _umask() -> int:
    """The mask of this process, read without a moment at which it is another."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Umask:")[2].split(maxsplit=1)[0], 8)


class _Server:
    """The process that forks."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.ours, other = socket.socketpair()
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        env.pop("PYTHONPATH", None)
        # One with torch and more is itself a fork of that with torch.
        is_more = {*preloaded} > {*_WITH_TORCH}
        start: type[subprocess.Popen[Any]] = WarmPopen if is_more else _new_python
        with other:
            command = [sys.executable, "-B", __file__, *preloaded]
            self.process = start(command, stdin=other.fileno(), env=env, cwd="/")
        atexit.register(self.stop)

    def fork(self, asked: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Fork a process, and give its number.

        It forks twice and the first child ends, so the process becomes a child of the subreaper:
        us.
        """
        prctl, data = ctypes.CDLL(None).prctl, json.dumps(asked).encode()
        self.lock.acquire()
        prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.ours, [len(data).to_bytes(8, "little")], list(streams))
            self.ours.sendall(data)
            return int.from_bytes(_exactly(self.ours, 8), "little")
        finally:
            prctl(_SUBREAPER, 0, 0, 0, 0)
            self.lock.release()

    def stop(self) -> None:
        if os.getpid() == self.owner:
            self.ours.close()
            self.process.wait()


_servers: dict[tuple[int, tuple[str, ...]], _Server] = {}


def _server(preloaded: tuple[str, ...]) -> _Server:
    """The server of this process with these imports; started when it is first needed."""
    key = os.getpid(), preloaded
    if key not in _servers:
        _servers[key] = _Server(preloaded)
    return _servers[key]


def start_commands() -> None:
    """Start the server of commands now, so that its files are not taken for those of a test."""
    _server(_WITH_COMMANDS)


def _exactly(link: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = link.recv(nbytes - len(data))
        if not piece:
            raise EOFError("the process that forks has ended")
        data += piece
    return data


# -- in the process that forks ---------------------------------------------------------------------


def _forget_ends() -> None:
    """Have no fork end what modules began: torch would take each of its libraries apart."""
    for each in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False
    compiling: Any = sys.modules.get("torch._dynamo.utils")
    if hasattr(compiling, "dump_compile_times"):
        atexit.unregister(compiling.dump_compile_times)


def _serve(link: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns in the fork, with its request."""
    while True:
        header, streams, _, _ = socket.recv_fds(link, 8, 3)
        if not header:
            sys.exit()
        header += _exactly(link, 8 - len(header))
        asked: dict[str, Any] = json.loads(_exactly(link, int.from_bytes(header, "little")))
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            child = os.fork()
            if child:
                os.write(writing, child.to_bytes(8, "little"))
                os._exit(0)
            while os.getppid() == parent:  # until it has ended
                time.sleep(0.001)
            link.close()
            os.close(reading)
            os.close(writing)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for stream in streams:
                os.close(stream)
            return asked
        for stream in (*streams, writing):
            os.close(stream)
        os.waitpid(between, 0)
        link.sendall(os.read(reading, 8))
        os.close(reading)


def _become(asked: Mapping[str, Any]) -> None:
    """Set the folder, environment, streams and paths that Python would start with."""
    if asked["session"]:
        os.setsid()
    for kind, limits in asked["limits"].items():
        resource.setrlimit(int(kind), limits)
    os.umask(asked["umask"])
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.dont_write_bytecode = True
    random.seed()
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream: Any = None
        with contextlib.suppress(OSError):
            raw = io.FileIO(number, mode, closefd=False)
            buffered = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
            stream = io.TextIOWrapper(
                buffered,
                encoding=getattr(sys, f"__{name}__").encoding,
                errors="backslashreplace" if number == 2 else "strict",
                line_buffering=number == 2 or raw.isatty(),
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    paths = [os.fspath(p) for p in asked["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    first, rest = asked["words"][0], asked["words"][1:]
    begin = {"-c": "", "-m": asked["cwd"]}.get(first, os.fspath(Path(first).resolve().parent))
    sys.path[:] = [begin, *paths, *sys.path[1:]]
    importlib.invalidate_caches()
    sys.argv[:] = [first, *rest]
    sys.modules["__main__"] = types.ModuleType("__main__")


def _run() -> None:
    """Run the program that the arguments name, as Python does."""
    first = sys.argv[0]
    names = vars(sys.modules["__main__"])
    if first == "-m":
        runpy._run_module_as_main(sys.argv.pop(1))  # type: ignore[attr-defined]
    elif first == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), names)
    else:
        names["__file__"] = first
        exec(compile(Path(first).read_bytes(), first, "exec"), names)


def _end() -> int:
    """End the process as Python does, and give the exit code, or end by Ctrl-C.

    Python forgets that Ctrl-C ended it where a function that runs at the end compiles text, as one
    of torch._dynamo does if tabulate is installed. Only modules are not torn down: with torch that
    takes longer than most programs.
    """
    code: Any = 0
    interrupted = False
    try:
        _run()
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            sys.stderr.write(f"{code}\n")
            code = 1
    except (Exception, KeyboardInterrupt) as error:
        own = error.__traceback__
        sys.excepthook(type(error), error, own and own.tb_next and own.tb_next.tb_next)
        code = 1
        interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code or 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = os.fspath(ROOT)
    for _name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)
    _forget_ends()
    gc.freeze()
    with socket.socket(fileno=0) as _link:
        _become(_serve(_link))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(_end() & 0xFF)
