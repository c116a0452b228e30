"""A process on a system that lacks something: what it makes of checkpoints with every verb.

    python -m tests.system.lacking FOLDER SYSTEM...     prints JSON: system → what came out

FOLDER holds `run.pt` and `tree/`. torch is imported once; a fork for each system loses what that
system lacks, then imports ckptmove. The last is Windows as far as its rules are known: what is open
or mapped can't be renamed, replaced or removed, no name is taken from anything, folders can't be
opened, and a file that is opened without O_BINARY is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What a system may lack: attributes by their modules, or a module.
LACKS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "locks": ("fcntl",),
    "locks of open files": ("fcntl.F_OFD_SETLK", "fcntl.F_OFD_GETLK", "fcntl.F_SETLEASE"),
    "vectors": ("os.preadv", "os.pwritev"),
    "offsets": ("os.pread", "os.preadv", "os.pwrite", "os.pwritev"),
    "copies": ("os.copy_file_range", "os.sendfile"),
    "open folders": ("dir_fd", "os.O_DIRECTORY"),
    "flags": ("os.O_CLOEXEC", "os.O_NOFOLLOW", "os.O_NONBLOCK", "os.O_TMPFILE", "os.O_PATH"),
    "links": ("os.link",),
    "users": ("os.geteuid", "os.getuid", "os.fchmod", "os.fchown", "os.chown", "pwd", "resource"),
    "rooms": ("os.statvfs", "os.fstatvfs", "os.ST_RDONLY"),
    "advice": ("os.posix_fadvise", "os.SEEK_DATA", "os.SEEK_HOLE"),
    "mappings": ("mmap.MAP_PRIVATE", "mmap.PROT_READ", "mmap.PROT_WRITE", "mmap.MAP_NORESERVE"),
    "signals": (
        *(f"signal.{name}" for name in ("SIGHUP", "SIGPIPE", "SIGALRM", "SIGKILL", "SIGURG")),
        *("signal.setitimer", "os.fork", "os.killpg", "os.sched_getaffinity"),
    ),
}
LACKS["all"] = tuple(dict.fromkeys(each for group in LACKS.values() for each in group))
LACKS["darwin"] = (*LACKS["vectors"], *LACKS["copies"], "os.O_TMPFILE", "fcntl.F_OFD_SETLK")
LACKS["win32"] = tuple(each for each in LACKS["all"] if each != "os.link")


def take_away(missing: str) -> None:
    """Have this process lack one thing."""
    module, _, name = missing.partition(".")
    if missing == "dir_fd":
        for each in ("open", "mkdir", "rename", "replace", "stat", "unlink", "rmdir", "link"):
            if hasattr(os, each):
                setattr(os, each, _without_dir_fd(getattr(os, each)))
        os.supports_dir_fd.clear()
        shutil._use_fd_functions = False  # type: ignore[attr-defined]
    elif not name:
        sys.modules[module] = None  # type: ignore[assignment]
    elif hasattr(__import__(module), name):
        if missing == "os.statvfs":  # where that is missing, shutil asks the system itself
            free = shutil.disk_usage(".").free
            usage: Any = lambda _: types.SimpleNamespace(free=free)  # noqa: E731
            shutil.disk_usage = usage
        delattr(sys.modules[module], name)


def _without_dir_fd(call: Callable[..., Any]) -> Callable[..., Any]:
    def instead(*args: Any, **options: Any) -> Any:
        for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
            if options.pop(name, None) is not None:
                raise NotImplementedError(f"{name} unavailable on this platform")
        return call(*args, **options)

    return instead


# -- Windows ---------------------------------------------------------------------------------------


def be_windows() -> None:
    """Have calls of `os` act as on Windows."""
    import fcntl
    import struct

    binary = 1 << 30
    os.O_BINARY = binary  # type: ignore[attr-defined, unused-ignore]
    opened, fsync, lock = os.open, os.fsync, fcntl.F_OFD_SETLK
    rename, replace, unlink, rmdir = os.rename, os.replace, os.unlink, os.rmdir

    def open_(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        ours = "ckptmove" in sys._getframe(1).f_globals.get("__name__", "")
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        if ours and not flags & binary:
            raise AssertionError(f"{path} is opened as text")
        return opened(path, flags & ~binary, mode)

    def sync(fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        fsync(fd)

    def renamed(old: Any, new: Any, **options: Any) -> None:
        if os.path.lexists(new):
            raise FileExistsError(17, "File exists")
        _refuse_open(old)
        rename(old, new)

    def replaced(old: Any, new: Any, **options: Any) -> None:
        _refuse_open(old, new)
        replace(old, new)

    def removed(path: Any, **options: Any) -> None:
        _refuse_open(path)
        unlink(path)

    def locking(fd: int, mode: int, nbytes: int) -> None:
        at = os.lseek(fd, 0, os.SEEK_CUR)
        assert at + nbytes < 1 << 31
        request = struct.pack("hh4xqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, nbytes, 0)
        fcntl.fcntl(fd, lock, request)

    msvcrt: Any = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = 2, locking
    sys.modules["msvcrt"] = msvcrt
    named: dict[str, Any] = {"open": open_, "fsync": sync, "rename": renamed, "replace": replaced}
    for name, call in {**named, "unlink": removed, "remove": removed, "rmdir": rmdir}.items():
        setattr(os, name, call)


def _refuse_open(*paths: Any) -> None:
    """What a process has open or mapped, or what holds that, can't be renamed or removed."""
    held = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            held.append(str(fd.readlink()))
    for path in map(os.path.realpath, paths):
        if any(f"{each.strip()}/".startswith(f"{path}/") for each in held):
            raise PermissionError(13, "Permission denied")


# -- what every verb makes of it -------------------------------------------------------------------


def outcomes(folder: Path, out: Path) -> dict[str, str]:
    """What the verbs give, as text or digests."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    import ckptmove

    run = folder / "run.pt"
    found: dict[str, str] = {}

    def wrote(name: str) -> None:
        path = out / name
        files = sorted(each for each in path.rglob("*") if each.is_file()) or [path]
        files = [each for each in files if not each.name.startswith(".ckptmove")]
        digests = [(each.name, hashlib.sha256(each.read_bytes()).hexdigest()) for each in files]
        found[name] = repr(digests)

    found["inspect"] = ckptmove.inspect(run).verdict
    ckptmove.relocate(run, out / "moved.pt", to="cuda:0")
    wrote("moved.pt")
    ckptmove.relocate(run, out / "moved.pt", to="cuda:1", force=True)
    wrote("moved.pt")
    ckptmove.convert(run, out / "run.safetensors")
    wrote("run.safetensors")
    ckptmove.convert(out / "run.safetensors", out / "again.pt", dtype="bf16", drop="rng")
    wrote("again.pt")
    for _ in range(2):
        ckptmove.convert(run, out / "shards", select="model", max_shard_size=400, force=True)
    wrote("shards")
    (out / "empty").mkdir()
    ckptmove.convert(run, out / "empty", select="model", max_shard_size=400)
    wrote("empty")
    state = ckptmove.load(run, map_location="cpu")
    found["load"] = hashlib.sha256(state["model"]["w"].numpy().tobytes()).hexdigest()
    state["model"]["w"].zero_()  # changes memory, never the file
    ckptmove.save({"w": torch.arange(6.0).reshape(2, 3).T}, out / "saved.safetensors")
    wrote("saved.safetensors")
    diff = ckptmove.diff(run, out / "moved.pt", ignore_devices=True)
    found["diff"] = str(diff).splitlines()[0].replace(str(out), "")
    checked = ckptmove.validate(out / "moved.pt", against=run)
    found["validate"] = "True" if checked.ok else str(checked)
    with ThreadPoolExecutor(4) as executor:
        batch = ckptmove.batch("convert", folder / "tree", out / "tree", executor=executor)
        found["batch"] = repr(sorted((each.name, each.outcome, each.reason) for each in batch))
    again = ckptmove.batch("convert", folder / "tree", out / "tree", executor=ThreadPoolExecutor(2))
    found["again"] = repr(sorted((each.name, each.outcome) for each in again))
    wrote("tree")
    names = [each.name for each in out.rglob("*") if each.name.endswith(".ckptmove-tmp")]
    found["left"] = repr(names)
    try:
        ckptmove.relocate(out / "moved.pt", to="cpu", in_place=True)
        found["in place"] = "changed"
    except ckptmove.CkptmoveError as error:
        found["in place"] = str(error)
    return found


def main() -> None:
    """Print what comes out on each system."""
    import ctypes  # torch needs it before it is taken away
    import subprocess
    import sysconfig
    import threading

    import numpy
    import safetensors
    import torch

    sysconfig.get_config_vars()  # which it looks up once, by the name of the system
    del ctypes, subprocess, sysconfig, threading, numpy, safetensors, torch
    folder, fork = Path(sys.argv[1]), os.fork
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as out:
            target = Path(out, "said.json")
            child = fork()
            if child == 0:
                try:
                    Path(out, "out").mkdir()
                    if name == "win32":
                        be_windows()
                    for each in sorted(LACKS[name], key=lambda each: "." not in each):
                        take_away(each)
                    if name in ("darwin", "win32"):
                        sys.platform = name
                    target.write_text(json.dumps(outcomes(folder, Path(out, "out"))))
                except BaseException:
                    import traceback

                    target.write_text(json.dumps({"error": traceback.format_exc()}))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            found[name] = json.loads(target.read_text())
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
