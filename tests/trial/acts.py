"""What code of a file may try, each done in a process that is guarded; without torch."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import platform
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
from ckptmove.trial.sandbox import system_calls

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


_C.syscall.restype = ctypes.c_long
_AT = 0 if platform.machine() == "x86_64" else 1


def _asked(numbers: tuple[int, int], *args: object) -> int:
    """Make a system call by its number, of x86-64 and of 64-bit ARM; a failure is an OSError."""
    sent = [os.fsencode(each) if isinstance(each, Path) else each for each in args]
    longs = [ctypes.c_long(each) if isinstance(each, int) else each for each in sent]
    result: int = _C.syscall(ctypes.c_long(numbers[_AT]), *longs)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(numbers[_AT]))
    return result


def _flags(path: Path) -> None:
    """Have backups leave a file out, by a descriptor that only reads."""
    file, flags = os.open(_kept(path), os.O_RDONLY), ctypes.c_long()
    _asked((16, 29), file, 0x80086601, ctypes.byref(flags))
    flags.value ^= 0x40
    _asked((16, 29), file, 0x40086602, ctypes.byref(flags))


def _owner(path: Path) -> None:
    read, _ = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, os.getppid())


def _every_other_call(path: Path) -> None:
    """Make all calls that are not on the list; each must fail as the filter has it."""
    machine = platform.machine()
    known = {*system_calls.allowed_calls(machine), *system_calls.ending(machine)}
    known |= set(system_calls.calls_by_arguments(machine).values())
    known |= {
        335,
        336,
    }  # the kernel's own, of probes: it asks no filter, and ends who else calls it
    for number in range(1024):
        if number not in known:
            assert _C.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6) == -1
            assert ctypes.get_errno() == (1 if number < 424 else 38), number


_SIGNAL = struct.pack("iii", 9, 0, 0) + bytes(116)
#: What fails by a system call that no function of C's library makes.
CALLS: dict[str, Act] = {
    "limits of the parent": lambda path: _asked((302, 261), os.getppid(), 4, bytes(16), None),
    "limits of its own": lambda path: _asked((302, 261), 0, 4, bytes(16), None),
    "priority of the parent": lambda path: _asked((141, 140), 0, os.getppid(), 19),
    "processors of the parent": lambda path: _asked((203, 122), os.getppid(), 8, b"\1" + bytes(7)),
    "scheduling of the parent": lambda path: _asked((144, 119), os.getppid(), 0, bytes(4)),
    "memory of the parent": lambda path: _asked((310, 270), os.getppid(), 0, 0, 0, 0, 0),
    "a signal to the parent": lambda path: _asked((129, 138), os.getppid(), 9, _SIGNAL),
    "signals of a descriptor": _owner,
    "attach shared memory": lambda path: _asked((30, 196), 0, None, 0),
    "remove shared memory": lambda path: _asked((31, 195), 0, 0, None),
    "change a semaphore": lambda path: _asked((66, 191), 0, 0, 0, 0),
    "send a message": lambda path: _asked((69, 189), 0, bytes(16), 8, 0),
    "flags of a file": _flags,
    "make empty by reading": lambda path: _asked(
        (257, 56), -100, _kept(path), os.O_RDONLY | os.O_TRUNC, 0
    ),
    "make empty by neither": lambda path: _asked((257, 56), -100, _kept(path), 3 | os.O_TRUNC, 0),
    "owner": lambda path: _asked((260, 54), -100, _kept(path), 1, 1, 0),
    "times": lambda path: _asked((280, 88), -100, _kept(path), None, 0),
    "listen by a name": lambda path: _asked(
        (49, 200), _call("socketpair", 1, 1, 0, bytes(8)), b"", 3
    ),
    "type into the terminal": lambda path: _asked((16, 29), 2, 0x5412, b"x"),
    "mount": lambda path: _asked((165, 40), b"x", path.parent, b"tmpfs", 0, None),
    "root": lambda path: _asked((161, 51), path.parent),
    "namespace": lambda path: _asked((272, 97), 0x10000000),
    "events": lambda path: _asked((298, 241), bytes(128), 0, -1, -1, 0),
    "faults": lambda path: _asked((323, 282), 1),
    "keys": lambda path: _asked((250, 219), 0, -1, 0),
    "accounts": lambda path: _asked((163, 89), 0),
    "the clock": lambda path: _asked((305, 266), 0, bytes(208)),
    "user": lambda path: _asked((105, 146), os.getuid()),
    "dumps": lambda path: _asked((157, 167), 4, 1, 0, 0, 0),
}
#: As `CALLS`; as if the kernel had never heard of it, so that libraries do without.
NEWER: dict[str, Act] = {
    "open otherwise": lambda path: _asked(
        (437, 437), -100, path, struct.pack("QQQ", _NEW, 384, 0), 24
    ),
    "rings": lambda path: _asked((425, 425), 8, bytes(120)),
    "start otherwise": lambda path: _asked(
        (435, 435), struct.pack("11Q", *[0] * 4, 17, *[0] * 6), 88
    ),
    "mount otherwise": lambda path: _asked((430, 430), b"tmpfs", 0),
    "memory of another": lambda path: _asked((434, 434), os.getppid(), 0),
}


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
    "exec what is in memory": lambda path: _asked((322, 281), 0, b"", None, None, 0x1000),
    "fork otherwise": lambda path: _asked((56, 220), 17, 0, 0, 0, 0),
    "write memory": lambda path: _asked((311, 271), os.getppid(), 0, 0, 0, 0, 0),
}


def _native_scratch(path: Path) -> None:
    own = Path(os.environ["TMPDIR"])
    _call("mkdir", own / "a", 0o700)
    os.close(_call("open", own / "a" / "b", _NEW, 0o600))
    _call("rename", own / "a" / "b", own / "c")
    file = os.open(own / "c", os.O_RDWR | os.O_TRUNC)
    os.ftruncate(file, 8)
    os.close(file)
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
    "limits in C": lambda path: resource.getrlimit(resource.RLIMIT_NOFILE),
    "processors": lambda path: os.sched_setaffinity(0, os.sched_getaffinity(0)),
}
if sys.platform == "linux":
    HARMLESS["every other call"] = _every_other_call


# -- to deceive who waits for it -------------------------------------------------------------------


def _tell(result: str) -> None:
    path = Path(os.environ["TMPDIR"]).with_name("told.json")
    path.write_text(f'{{"done": true, "result": {result}}}')
    os._exit(0)


def _linked(name: str, target: str) -> None:
    link = Path(os.environ["TMPDIR"]).with_name(name)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    os._exit(77)


def _huge(path: Path) -> None:
    told = Path(os.environ["TMPDIR"]).with_name("told.json")
    told.touch()
    os.truncate(told, 1 << 29)
    os._exit(0)


def _deep(path: Path) -> None:
    above = os.open(os.environ["TMPDIR"], os.O_RDONLY)
    for _ in range(3000):
        _asked((258, 34), above, b"d", 0o700)
        below = os.open("d", os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below


#: What it may leave behind, and tell.
TELLING: dict[str, Act] = {
    "a link to what never ends": lambda path: _linked("told.json", "/dev/zero"),
    "an attempt that never ends": lambda path: _linked("attempt.txt", "/dev/zero"),
    "what is huge": _huge,
    "what is deep": lambda path: _tell("[" * 100_000),
    "no error": lambda path: _tell('{"error": "annotations"}'),
    "an error without words": lambda path: _tell('{"error": "InputError"}'),
    "an error of another kind": lambda path: _tell('{"error": "os", "message": "x"}'),
    "an error with numbers": lambda path: _tell(
        '{"error": "UsageError", "message": "", "path": 1}'
    ),
    "no result": lambda path: _tell("null"),
    "folders in folders": _deep,
}


def act(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """In that process: be guarded, then act."""
    subprocess_call.enforce()
    of_kind = {
        **{"ending": ENDING, "harmless": HARMLESS, "failing": FAILING, "ended": ENDED},
        **{"calls": CALLS, "newer": NEWER, "telling": TELLING},
    }
    of_kind[asked["kind"]][asked["act"]](Path(asked["path"]))
    return {"did": asked["act"]}


def threads(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """In that process: be guarded, and tell how many threads there were already."""
    importlib.import_module("numpy")
    found = len(list(Path("/proc/self/task").iterdir()))
    subprocess_call.enforce()
    return {"threads": found}


#: Code that runs a command of ours as on a kernel that lacks system calls.
WITHOUT = """
import ctypes, json, struct, sys
numbers = json.loads(sys.argv[1])
steps = [struct.pack("=HBBI", 0x20, 0, 0, 0)]
for number in numbers:
    steps += [struct.pack("=HBBI", 0x15, 0, 1, number), struct.pack("=HBBI", 6, 0, 0, 0x50026)]
code = b"".join([*steps, struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)])
kept = ctypes.create_string_buffer(code, len(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
program = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))
assert libc.prctl(22, ctypes.c_ulong(2), program) == 0
from ckptmove.cli import main
del sys.argv[1]
main()
"""
