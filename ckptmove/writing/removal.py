"""Remove a folder with all that is in it, however deep."""

from __future__ import annotations

import contextlib
import os
import shutil

from ..sources.place import walk


def remove_tree(path: str) -> None:
    """Remove a folder, links in it and not what they lead to; what can't be removed stays.

    `shutil.rmtree` calls itself for each level, and holds a folder of each open: too many of them
    are removed from below.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return
    emptied = list[str]()
    for folder, folders, names in walk(path):
        emptied.append(folder)
        links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
        for name in (*names, *links):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    for folder in reversed(emptied):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
