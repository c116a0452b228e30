"""Remove temporary files and folders of processes that were killed while they wrote.

The writing process holds a lock on its file, which ends with the process. A file whose lock can't
be checked is kept and reported, and so is a folder that may hold the previous content of the
destination.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from ..reports.recover import Recovered
from ..sources.place import walk
from ..system.files import AT_ONCE, NO_LINK, READ, user
from ..system.locks import is_open_for_writing, lock_file
from ..system.names import without_slash
from .final_name import HIDDEN, is_hidden
from .staged_folder import remove_tree

_OURS = re.compile(r"\.(?P<stem>.*)\.[0-9a-f]{8}" + re.escape(HIDDEN), re.DOTALL)


def remove_abandoned(path: str) -> list[Recovered]:
    """Remove abandoned temporary files of a file or folder, and in the folder; yield each.

    `path` may also be such a temporary file or folder itself.
    """
    return [_remove(each) for each in _abandoned(without_slash(path))]


def _abandoned(path: str) -> Iterator[str]:
    """Yield the temporary files and folders of a path."""
    folder, name = os.path.split(path)
    if _OURS.fullmatch(name):
        if os.path.lexists(path):
            yield path
        return
    try:
        beside = sorted(os.listdir(folder or "."))
    except OSError:
        beside = []
    yield from (os.path.join(folder, each) for each in beside if is_hidden(each, name))
    for inside, folders, names in walk(path):
        hidden = [each for each in folders if _OURS.fullmatch(each)]
        folders[:] = [each for each in folders if each not in hidden]
        for each in sorted((*hidden, *filter(_OURS.fullmatch, names))):
            yield os.path.join(inside, each)


def _remove(hidden: str) -> Recovered:
    """Remove a temporary file or folder, if certainly no process uses it."""
    try:
        return Recovered(hidden, "removed" if _is_removed(hidden) else "kept")
    except OSError:
        return Recovered(hidden, "kept")


def _is_removed(hidden: str) -> bool:
    """Remove it. Raises OSError if a process uses it, or it can't be removed."""
    fd = os.open(hidden, READ | NO_LINK | AT_ONCE)
    try:
        about = os.fstat(fd)
        if about.st_uid != user() or not lock_file(fd):
            return False
        if stat.S_ISDIR(about.st_mode):
            if not _is_there(hidden):
                return False
            remove_tree(hidden)
        elif not stat.S_ISREG(about.st_mode) or is_open_for_writing(fd):
            return False
        else:
            os.unlink(hidden)
    finally:
        os.close(fd)
    return not os.path.lexists(hidden)


def _is_there(hidden: str) -> bool:
    """Whether the final name of a folder is taken.

    If not, the folder may be the old one, moved aside just before the new one got the name.
    """
    folder, name = os.path.split(hidden)
    return any(is_hidden(name, each) for each in os.listdir(folder or "."))
