"""An audit hook that ends a process when code from a file does more than compute.

Python raises audit events before certain actions. Actions that reach outside the process end it at
once: starting a process, opening a socket, loading a library that is not installed, writing outside
the temporary folder. This is a second line of defense: C code raises no events, and code from a
pickle can bypass the hook. So the kernel refuses the same actions (`fence`). Before that,
`exported_programs`, `torchscript` and `configurations` refuse untrusted files with other code.

Source: the audit events table of the Python documentation.
"""

from __future__ import annotations

import errno
import os
import site
import stat
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from . import fence

#: The exit code of an ended process: EX_NOPERM of sysexits.h.
CODE = 77
ATTEMPT = "attempt.txt"  # a file in its folder that names the forbidden action
_LONGEST = 160  # bytes of that file

_PROCESS = "start a process"
_SOCKET = "open a socket"
_SIGNAL = "signal another process"
#: Forbidden event → its description, whatever its arguments are.
_ENDING = {
    **dict.fromkeys(
        (
            *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile"),
            *("os.startfile/2", "os.system", "pty.spawn", "subprocess.Popen", "webbrowser.open"),
            *("_winapi.CreateProcess",),
        ),
        _PROCESS,
    ),
    **dict.fromkeys(
        (
            *("socket.__new__", "socket.bind", "socket.connect", "socket.getaddrinfo"),
            *("socket.gethostbyaddr", "socket.gethostbyname", "socket.getnameinfo"),
            *("socket.sendmsg", "socket.sendto", "urllib.Request", "syslog.openlog"),
            *("syslog.syslog",),
        ),
        _SOCKET,
    ),
    **dict.fromkeys(("socket.sethostname", "os.chflags", "os.lchflags"), "change the system"),
    "os.chdir": "change its working directory",  # relative paths depend on it
}
#: Event → the positions of its arguments that are changed paths, each with that of its folder's fd.
_CHANGING: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.link": ((0, 2), (1, 3)),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.removexattr": ((0, None),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.setxattr": ((0, None),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
    "shutil.chown": ((0, None),),
    "shutil.copyfile": ((1, None),),
    "shutil.copymode": ((1, None),),
    "shutil.copystat": ((1, None),),
    "shutil.copytree": ((1, None),),
    "shutil.make_archive": ((0, None),),
    "shutil.move": ((0, None), (1, None)),
    "shutil.rmtree": ((0, None),),
    "shutil.unpack_archive": ((1, None),),
    "sqlite3.connect": ((0, None),),
    "tempfile.mkdtemp": ((0, None),),
    "tempfile.mkstemp": ((0, None),),
}
_QUIET = {"fork_exec": _PROCESS, "mkfifo": "change a file", "mknod": "change a file"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FREE = ("/dev/null", ":memory:", "")
#: Functions of the C library that ctypes may not look up.
_OF_C = frozenset(
    (
        *("execl", "execle", "execlp", "execv", "execve", "execvp", "execvpe", "fexecve", "fork"),
        *("vfork", "clone", "posix_spawn", "posix_spawnp", "popen", "system", "syscall", "dlopen"),
        *("socket", "connect", "bind", "open", "open64", "openat", "creat", "fopen", "fopen64"),
        *("rename", "renameat", "unlink", "unlinkat", "remove", "rmdir", "mkdir", "truncate"),
        *(
            "link",
            "linkat",
            "symlink",
            "symlinkat",
            "kill",
            "killpg",
            "ptrace",
            "process_vm_writev",
        ),
    )
)


def environment(folder: str) -> dict[str, str]:
    """Environment variables: libraries keep their files in a folder and don't use the network."""
    kept = {
        name: os.fspath(Path(folder, name.lower()))
        for name in (
            *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
            *("PYTORCH_KERNEL_CACHE_PATH", "CUDA_CACHE_PATH", "MPLCONFIGDIR", "NUMBA_CACHE_DIR"),
            *("HF_MODULES_CACHE", "XDG_CACHE_HOME"),
        )
    }
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # Without this, torch.compile would start compilers.
    eager = {"TORCHDYNAMO_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # Without this, importing numpy starts threads, too early for `fence`, and OpenMP may bind them.
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
    return {**kept, **offline, **eager, **single, "TMPDIR": folder}


def enforce(folder: str) -> tuple[str, ...]:
    """From now on, end this process when its code tries to do more than compute.

    It can't be undone. Before the process ends, it writes the attempted action to the folder.

    Args:
        folder: where the process may write.

    Returns:
        The kernel features that are missing to restrict C code too; see `fence.enclose`.
    """
    sys.dont_write_bytecode = True
    home = Path(folder).resolve()
    note = os.open(home / ATTEMPT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    libraries = _libraries()
    process = os.getpid()

    def end(what: str, which: object = None) -> NoReturn:
        shown = what if which is None else f"{what}, {which!r}"
        os.write(note, shown.encode(errors="replace")[:_LONGEST])
        os._exit(CODE)

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        what = _ENDING.get(event)
        if what is not None:
            end(what)
        elif event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITING and not _is_inside(path, None, home):
                end("write a file", _text(path))
        elif event in _CHANGING:
            for at, folder_at in _CHANGING[event]:
                path = args[at] if at < len(args) else None
                fd = args[folder_at] if folder_at is not None and folder_at < len(args) else None
                if not _is_inside(path, fd, home):
                    end("change a file", _text(path))
        elif event in ("os.kill", "os.killpg", "signal.pthread_kill"):
            if args[0] != process and event != "signal.pthread_kill":
                end(_SIGNAL)
        elif event == "ctypes.dlopen" or (event == "import" and args[1]):
            path = args[0] if event == "ctypes.dlopen" else args[1]
            if not _is_installed(path, libraries, home):
                end("load a library", _text(path))
        elif event == "ctypes.dlsym" and args[1] in _OF_C:
            end("call C's library", args[1])

    lacking = fence.enclose(os.fspath(home))
    _replace_quiet_ones(end)
    sys.addaudithook(on_event)
    return lacking


def _replace_quiet_ones(end: Callable[[str], NoReturn]) -> None:
    """Replace functions that start processes or make files without an audit event."""

    def ending(what: str) -> Callable[..., NoReturn]:
        def ended(*args: object, **kwargs: object) -> NoReturn:
            end(what)

        return ended

    for module in ("_posixsubprocess", "posix", "os"):
        for name, what in _QUIET.items():
            found = sys.modules.get(module)
            if hasattr(found, name):
                setattr(found, name, ending(what))


def _libraries() -> tuple[Path, ...]:
    """The folders of installed libraries."""
    paths = {
        *sysconfig.get_paths().values(),
        sys.prefix,
        sys.base_prefix,
        site.getusersitepackages(),
    }
    paths |= set(sys.path)
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local", "/opt", "/System"}
    return tuple(sorted({Path(path).resolve() for path in paths if path}))


def _is_inside(path: object, fd: object, home: Path) -> bool:
    """Whether a path that is about to change is in the folder."""
    if isinstance(path, int) or path is None:  # an open file
        return True
    if _text(path) in _FREE:
        return True
    said = Path(_text(path))
    if isinstance(fd, int) and fd >= 0 and not said.is_absolute():
        try:
            said = Path(f"/proc/self/fd/{fd}").readlink() / said
        except OSError:
            return False
    # A link in the folder may point outside: both the link and its target must be inside.
    places = (said.resolve(), said.parent.resolve() / said.name)
    return all(place.is_relative_to(home) for place in places)


def _is_installed(path: object, libraries: tuple[Path, ...], home: Path) -> bool:
    """Whether a library is installed on this machine, not brought by the program."""
    if path is None or isinstance(path, int) or os.sep not in _text(path):
        return True  # without a folder, the system searches its own folders
    place = Path(_text(path)).resolve()
    if place.is_relative_to(home):
        return False
    return place.suffix == ".py" or any(place.is_relative_to(each) for each in libraries)


def _text(path: object) -> str:
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        return str(path)


def read_attempt(folder: str, code: int | None) -> str | None:
    """The forbidden action that ended a process, or None; called in its parent process.

    Args:
        folder: where the process could write.
        code: its exit code.
    """
    if code is not None and code == fence.ENDING:
        return "start a process or open a socket"
    if code != CODE:
        return None
    try:
        return read_own(Path(folder, ATTEMPT), _LONGEST).decode(errors="replace") or None
    except OSError:
        return None


def read_own(path: Path, most: int) -> bytes:
    """Read a file that the process may have replaced, for example by a link or an endless file.

    Raises:
        OSError: it is not a regular file, or it is too large.
    """
    only = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, os.O_RDONLY | only), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise OSError(errno.EFBIG, "no file of ours", os.fspath(path))
        return file.read(most)
