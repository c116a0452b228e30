"""What code of a file may try, each done in a process that is guarded; without torch."""

from __future__ import annotations

import ctypes
import os
import posix
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckptmove.rehearsal import apart

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
}


def act(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """In that process: be guarded, then act."""
    apart.enforce()
    {**ENDING, **HARMLESS}[asked["act"]](Path(asked["path"]))
    return {"did": asked["act"]}
