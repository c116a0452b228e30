"""What code of a file may try, each done in a process that is guarded; without torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import posix
import resource
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckptmove.trial import subprocess_call

Act = Callable[[Path], object]


def _native(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name)


def _in_thread(path: Path) -> None:
    thread = threading.Thread(target=path.write_text, args=("x",))
    thread.start()
    thread.join()


def _by_descriptor(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    os.unlink("kept", dir_fd=folder)


def _by_link(path: Path) -> None:
    link = Path(os.environ["TMPDIR"], "link")
    link.symlink_to(path)
    link.write_text("x")


#: What ends it. Each would leave `path` behind, or change the file `kept` beside it.
ENDING: dict[str, Act] = {
    "write": lambda path: path.write_text("x"),
    "append": lambda path: path.with_name("kept").open("a"),
    "write low": lambda path: os.open(path, os.O_CREAT | os.O_WRONLY),
    "write in a thread": _in_thread,
    "write by a link": _by_link,
    "rename": lambda path: path.with_name("kept").rename(path),
    "remove": lambda path: path.with_name("kept").unlink(),
    "remove by a descriptor": _by_descriptor,
    "truncate": lambda path: os.truncate(path.with_name("kept"), 0),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: os.link(path.with_name("kept"), path),
    "link to write": lambda path: os.link(
        path.with_name("kept"), Path(os.environ["TMPDIR"], "link")
    ),
    "symlink": lambda path: path.symlink_to("kept"),
    "mode": lambda path: path.with_name("kept").chmod(0o777),
    "times": lambda path: os.utime(path.with_name("kept"), (0, 0)),
    "copy": lambda path: shutil.copyfile(path.with_name("kept"), path),
    "move": lambda path: shutil.move(path.with_name("kept"), path),
    "tree": lambda path: shutil.rmtree(path.parent),
    "fifo": lambda path: posix.mkfifo(path),
    "database": lambda path: sqlite3.connect(path).execute("create table t (a)"),
    "directory": lambda path: os.chdir(path.parent),
    "system": lambda path: os.system(f"touch {path}"),
    "popen": lambda path: os.popen(f"touch {path}").read(),
    "subprocess": lambda path: subprocess.run(["touch", path], check=True),
    "fork": lambda path: os.fork() or path.write_text("x"),
    "spawn": lambda path: os.posix_spawn("/usr/bin/touch", ["touch", str(path)], {}),
    "exec": lambda path: os.execv("/usr/bin/touch", ["touch", str(path)]),
    "fork and exec": lambda path: sys.modules["_posixsubprocess"].fork_exec(
        [b"touch"], [b"/usr/bin/touch"]
    ),
    "socket": lambda path: socket.socket(),
    "name": lambda path: socket.getaddrinfo("localhost", 80),
    "request": lambda path: urllib.request.urlopen("http://localhost:1/"),
    "kill": lambda path: os.kill(os.getppid(), 0),
    "library": lambda path: ctypes.CDLL(str(path.with_name("kept"))),
    "C's system": lambda path: _native("system")(f"touch {path}".encode()),
}


# -- in C, of which no hook hears ------------------------------------------------------------------

_C: Any = ctypes.CDLL(None, use_errno=True)
_C.execv.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
#: Looked up before anything is guarded.
_FUNCTIONS = {
    name: getattr(_C, name)
    for name in (
        *("open", "mkdir", "rename", "unlink", "rmdir", "link", "symlink", "truncate", "chmod"),
        *("setxattr", "mkfifo", "system", "fork", "execv", "socket", "socketpair", "sendto"),
        *("kill", "getpid", "shmget", "ptrace"),
    )
    if hasattr(_C, name)
}
_NEW = os.O_CREAT | os.O_WRONLY


def _call(name: str, *args: object) -> int:
    """Call a function of C's; a failure is an OSError."""
    sent = [os.fsencode(each) if isinstance(each, Path) else each for each in args]
    result: int = _FUNCTIONS[name](*sent)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _native_in_thread(path: Path) -> None:
    failed: list[OSError] = []

    def write() -> None:
        try:
            _call("open", path, _NEW, 0o600)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    for each in failed:
        raise each


def _send(path: Path) -> None:
    address = struct.pack("H", socket.AF_UNIX) + os.fsencode(path) + b"\0"
    datagrams = _call("socket", socket.AF_UNIX, socket.SOCK_DGRAM, 0)
    _call("sendto", datagrams, b"x", 1, 0, address, len(address))


def _kept(path: Path) -> Path:
    return path.with_name("kept")


#: What fails, as the kernel has it.
FAILING: dict[str, Act] = {
    "write": lambda path: _call("open", path, _NEW, 0o600),
    "append": lambda path: _call("open", _kept(path), os.O_WRONLY | os.O_APPEND),
    "write in a thread": _native_in_thread,
    "write to memory by name": lambda path: _call("open", Path("/dev/shm/it"), _NEW, 0o600),
    "folder": lambda path: _call("mkdir", path, 0o700),
    "fifo": lambda path: _call("mkfifo", path, 0o600),
    "rename": lambda path: _call("rename", _kept(path), path),
    "remove": lambda path: _call("unlink", _kept(path)),
    "link": lambda path: _call("link", _kept(path), path),
    "link to write": lambda path: _call("link", _kept(path), Path(os.environ["TMPDIR"], "link")),
    "symlink": lambda path: _call("symlink", b"kept", path),
    "truncate": lambda path: _call("truncate", _kept(path), 0),
    "mode": lambda path: _call("chmod", _kept(path), 0o777),
    "attribute": lambda path: _call("setxattr", _kept(path), b"user.it", b"x", 1, 0),
    "kill": lambda path: _call("kill", os.getppid(), 0),
    "kill the group": lambda path: _call("kill", 0, 0),
    "send": _send,
    "shared memory": lambda path: _call("shmget", 1, 4096, 0o1600),
}
#: What ends the process, as the kernel has it.
ENDED: dict[str, Act] = {
    "system": lambda path: _call("system", f"touch {path}".encode()),
    "exec": lambda path: _call("execv", b"/usr/bin/touch", None),
    "fork": lambda path: _call("fork"),
    "socket": lambda path: _call("socket", socket.AF_INET, socket.SOCK_STREAM, 0),
    "socket of version 6": lambda path: _call("socket", socket.AF_INET6, socket.SOCK_DGRAM, 0),
    "ptrace": lambda path: _call("ptrace", 0, 0, None, None),
}


def _native_scratch(path: Path) -> None:
    own = Path(os.environ["TMPDIR"])
    _call("mkdir", own / "a", 0o700)
    os.close(_call("open", own / "a" / "b", _NEW, 0o600))
    _call("rename", own / "a" / "b", own / "c")
    _call("truncate", own / "c", 8)
    _call("unlink", own / "c")
    _call("rmdir", own / "a")


def _limits(path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    if sys.platform == "linux":
        assert Path("/proc/self/oom_score_adj").read_text() == "1000\n"
    endless = _call("open", Path(os.environ["TMPDIR"], "endless"), _NEW, 0o600)
    with contextlib.suppress(OSError):
        os.pwrite(endless, b"x", 1 << 40)
    assert os.fstat(endless).st_size == 0


def _pair(path: Path) -> None:
    ends = (ctypes.c_int * 2)()
    _call("socketpair", socket.AF_UNIX, socket.SOCK_STREAM, 0, ends)
    _call("sendto", ends[0], b"x", 1, 0, None, 0)


def _scratch(path: Path) -> None:
    own = Path(os.environ["TMPDIR"])
    (own / "a").mkdir()
    (own / "a" / "b").write_text("x")
    (own / "a" / "b").rename(own / "c")
    shutil.rmtree(own / "a")


#: What does not.
HARMLESS: dict[str, Act] = {
    "read": lambda path: path.with_name("kept").read_text(),
    "scratch": _scratch,
    "null": lambda path: Path("/dev/null").write_text("x"),
    "printed": lambda path: sys.stdout.write("x"),
    "own host": lambda path: socket.gethostname(),
    "C": lambda path: _native("getpid")(),
    "scratch in C": _native_scratch,
    "null in C": lambda path: _call("open", Path("/dev/null"), os.O_WRONLY),
    "pair in C": _pair,
    "own signal in C": lambda path: _call("kill", _call("getpid"), 0),
    "limits": _limits,
    "thread": lambda path: threading.Thread(target=int).start(),
}


def act(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """In that process: be guarded, then act."""
    subprocess_call.enforce()
    of_kind = {"ending": ENDING, "harmless": HARMLESS, "failing": FAILING, "ended": ENDED}
    of_kind[asked["kind"]][asked["act"]](Path(asked["path"]))
    return {"did": asked["act"]}
