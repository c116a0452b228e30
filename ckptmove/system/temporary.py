"""Temporary folders. The folder of a killed process is removed by the next process that makes one.

A process holds a lock on its folder; the lock ends with the process. Users do not use such folder
names. Each machine removes only its own folders, because machines may not share locks.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator

from .files import NO_LINK, READ, user
from .locks import lock_file

_RANDOM_NBYTES = 16
_SOON = 10.0  # seconds after which a folder's maker has surely locked it


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Make a folder that is removed at the end, even if it holds very deep folders.

    Raises OSError.
    """
    machine = zlib.crc32(platform.node().encode(errors="replace"))
    above, start = tempfile.gettempdir(), f"ckptmove-run-{machine:08x}-"
    _remove_abandoned(above, start)
    folder = os.path.join(above, start + secrets.token_hex(_RANDOM_NBYTES))
    os.mkdir(folder, 0o700)
    with contextlib.ExitStack() as held:
        held.callback(_remove, folder)
        with contextlib.suppress(OSError):  # a system without locks on folders
            fd = os.open(folder, READ)
            held.callback(os.close, fd)
            lock_file(fd)
        yield folder


def _remove_abandoned(above: str, start: str) -> None:
    """Remove folders of this user's killed processes, as far as locks show."""
    ours = re.compile(re.escape(start) + f"[0-9a-f]{{{2 * _RANDOM_NBYTES}}}")
    with contextlib.suppress(OSError), os.scandir(above) as found:
        for each in found:
            if ours.fullmatch(each.name) and each.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(each.path)


def _remove_if_abandoned(folder: str) -> None:
    """Remove a folder if no process uses it. Raises OSError if a process or another user has it."""
    fd = os.open(folder, READ | NO_LINK)
    try:
        about = os.fstat(fd)
        is_old = time.time() - about.st_mtime > _SOON
        if about.st_uid == user() and is_old and lock_file(fd):
            _remove(folder)
    finally:
        os.close(fd)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        if os.rename in os.supports_dir_fd:
            _flatten(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: str) -> None:
    """Move nested folders up into this folder, until no folder contains another."""
    top = os.open(folder, os.O_RDONLY | NO_LINK)
    try:
        todo = _folders(top)
        for name in todo:  # the list grows meanwhile
            os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, os.O_RDONLY | NO_LINK, dir_fd=top)
            try:
                for each in _folders(inner):
                    todo.append(secrets.token_hex())  # a name that is surely free
                    os.rename(each, todo[-1], src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
    finally:
        os.close(top)


def _folders(descriptor: int) -> list[str]:
    with os.scandir(descriptor) as found:
        return [each.name for each in found if each.is_dir(follow_symlinks=False)]
