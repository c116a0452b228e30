"""Check the destination of a batch: is there enough space, is anything in the way? Read-only."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence

from ..errors import RefusedError
from ..reports.data.batch_items import Task
from ..sources import place_of
from ..writing.execute import FICLONE
from ..writing.final_name import NO_ROOM, failure_of, free_nbytes

_LONGEST_NAME = 255  # bytes


def existing_of(path: str) -> str:
    """The folder that is there, of those that a path leads through; or what is in its place."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def free_in(dst: str) -> int | None:
    """What is free where the destination is, or will be; None in a store, which has room for all.

    Raises:
        RefusedError, WriteError: that can't be told, or it can't be written at all.
    """
    if not place_of(dst).opens_by_path:
        return None
    try:
        _check_writable(dst)
        room = os.statvfs(existing_of(dst))
    except OSError as error:
        raise failure_of(error, dst) from error
    return free_nbytes(room)


def _check_writable(folder: str) -> None:
    """Raises OSError if nothing new can be in a folder, which may have to be made."""
    existing = existing_of(folder)
    if not os.path.isdir(existing):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), existing)
    if not os.access(existing, os.W_OK | os.X_OK):
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), existing)


def refuse_long_name(output: str) -> None:
    """Raises RefusedError if no file system has such names."""
    nbytes = len(os.fsencode(os.path.basename(output)))
    if nbytes > _LONGEST_NAME and place_of(output).opens_by_path:
        raise RefusedError(
            f"its name would have {nbytes} bytes in the destination, and {_LONGEST_NAME} is the "
            "most"
        )


def obstacles(outputs: Iterable[str]) -> list[str]:
    """Why outputs cannot be written, as far as known; empty if no reason is known."""
    folders: dict[str, str] = {}
    found = list[str]()
    for output in outputs:
        folder = os.path.dirname(output)
        if folder not in folders:
            folders[folder] = _folder_obstacle(folder)
        try:
            refuse_long_name(output)
            found.append(folders[folder])
        except RefusedError as error:
            found.append(str(error))
    return found


def _folder_obstacle(folder: str) -> str:
    if not place_of(folder).opens_by_path:
        return ""
    try:
        _check_writable(folder)
    except OSError as error:
        return str(failure_of(error, folder))
    return ""


def refuse_if_full(
    source: str,
    dst: str,
    tasks: Sequence[Task],
    free: int | None,
    written: Callable[[Task], int],
) -> None:
    """Raises RefusedError if there can't be room for all that is not there yet.

    Args:
        source, dst: the trees.
        tasks: what there is to do.
        free: bytes.
        written: how much will be written for an item; asked where there may be too little room.
    """
    if free is None:
        return
    new = [task for task in tasks if not task.there and not task.obstacle]
    if sum(task.item.nbytes for task in new) <= free or _shares_blocks(source, dst):
        return
    nbytes = sum(map(written, new))
    if nbytes > free:
        raise RefusedError(f"{NO_ROOM}: {nbytes:,} bytes are needed, {free:,} are free", path=dst)


def _shares_blocks(source: str, dst: str) -> bool:
    """Whether files of one can share their blocks with those of the other; tried without names."""
    folder = existing_of(dst)
    opened = list[int]()
    try:
        if os.stat(source).st_dev != os.stat(folder).st_dev:
            return False
        for _ in range(2):
            opened.append(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600))
        os.write(opened[0], bytes(1 << 16))
        fcntl.ioctl(opened[1], FICLONE, opened[0])
    except (OSError, AttributeError):  # O_TMPFILE is Linux's
        return False
    finally:
        for fd in opened:
            os.close(fd)
    return True
