"""Check the destination of a batch: is there enough space, is anything in the way? Read-only."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence

from ..errors import RefusedError
from ..reports.batch_items import Task
from ..writing.execute import FICLONE
from ..writing.final_name import NO_ROOM
from .trees import tree_at
from .trees.local_tree import existing_parent


def obstacles(outputs: Iterable[str]) -> list[str]:
    """Why outputs cannot be written, as far as known; empty if no reason is known."""
    folders: dict[str, str] = {}
    found = list[str]()
    for output in outputs:
        folder = os.path.dirname(output)
        if folder not in folders:
            folders[folder] = tree_at(folder).obstacle()
        try:
            tree_at(output).check_name()
            found.append(folders[folder])
        except RefusedError as error:
            found.append(str(error))
    return found


def check_outputs_fit(
    source: str, dst: str, tasks: Sequence[Task], free: int | None, written: Callable[[Task], int]
) -> None:
    """Raises RefusedError if the outputs that are missing do not fit into `free` bytes.

    `written` gives how much will be written for an item; it is asked where there may be too little.
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
    folder = existing_parent(dst)
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
