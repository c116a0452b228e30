"""The destination of a batch: whether there is room, its folders, and what killed runs left."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator

from ..destination import failure_of, hidden_name
from .items import Item
from .ledger import LEDGER, Ledger
from .outputs import clear, is_left_of, leftovers

_FICLONE = 0x40049409  # linux/fs.h


def _existing(path: str) -> str:
    """The folder that is there, of those that a path leads through."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def free_nbytes(dst: str) -> int:
    """What is free where the destination is, or will be.

    Raises:
        RefusedError, WriteError: that can't be told.
    """
    try:
        room = os.statvfs(_existing(dst))
    except OSError as error:
        raise failure_of(error, dst) from error
    return room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)


def shares_blocks(source: str, dst: str) -> bool:
    """Whether files of one can share their blocks with those of the other."""
    folder = _existing(dst)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    paths = [os.path.join(folder, hidden_name("probe")) for _ in range(2)]
    opened = list[int]()
    try:
        if os.stat(source).st_dev != os.stat(folder).st_dev:
            return False
        for path in paths:
            opened.append(os.open(path, flags, 0o600))
        os.write(opened[0], bytes(1 << 16))
        fcntl.ioctl(opened[1], _FICLONE, opened[0])
    except OSError:
        return False
    finally:
        for fd, path in zip(opened, paths, strict=False):
            os.close(fd)
            os.unlink(path)
    return True


def prepare(dst: str, items: Iterable[Item], done: Iterable[Item]) -> None:
    """Make the folders of what is to be written, and remove what killed runs left.

    Raises:
        RefusedError, WriteError: the folders can't be made.
    """
    items = list(items)
    try:
        os.makedirs(dst, exist_ok=True)
        for folder in sorted({os.path.dirname(item.output) for item in items}):
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise failure_of(error, error.filename or dst) from error
    remove_leftovers(dst, [*items, *done])


def remove_leftovers(folder: str, items: Iterable[Item], ledger: str = "") -> None:
    """Remove what killed runs left of these items, but not of those that others are at.

    Args:
        folder: where to look, and below.
        items: of which to remove it.
        ledger: the path of the ledger, if it is not in this folder.
    """
    left = leftovers(folder)
    if not left:
        return
    book = Ledger(ledger or os.path.join(folder, LEDGER))
    for hidden, item in _whose(left, items):
        with book.held(item.name, patient=False) as held:
            if held:
                clear(hidden, item.output)


def _whose(left: Iterable[str], items: Iterable[Item]) -> Iterator[tuple[str, Item]]:
    inside: dict[str, list[Item]] = {}
    for item in items:
        inside.setdefault(os.path.dirname(item.output), []).append(item)
    for hidden in left:
        for item in inside.get(os.path.dirname(hidden), ()):
            if is_left_of(hidden, item.output):
                yield hidden, item
                break
