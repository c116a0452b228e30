"""Undo an interrupted change of several files in a folder: in all of them, or in none."""

from __future__ import annotations

import contextlib
import os
import stat
from contextlib import ExitStack

from ...errors import CorruptError, InputError, RefusedError
from ...reports.recover import Recovered
from ..final_name import failure_of
from .find_journal import name_folder
from .folder_journal import journals_in
from .journal import Change, Read
from .journal_name import FOLDER_JOURNAL, UNFINISHED
from .locked_file import PATIENCE, LockedFile, LockedFolder, may_change

_IN_USE = (OSError, InputError, RefusedError)


def undo_in_folder(folder: str) -> Recovered:
    """Undo an interrupted change of files in a folder; do nothing without a journal.

    An unfinished journal is removed, unless a process is still writing it. Raises as `undo`.
    """
    journal = os.path.join(folder, FOLDER_JOURNAL)
    if not os.path.lexists(journal):
        if os.path.lexists(journal + UNFINISHED):
            with contextlib.suppress(*_IN_USE), LockedFolder(folder) as held:
                if held.locked:
                    held.remove_unfinished()
        return Recovered(folder, "nothing")
    try:
        with LockedFolder(folder, PATIENCE) as held, held.open_journal() as opened:
            if opened is None:
                return Recovered(folder, "nothing")
            return _undo(held, *opened)
    except OSError as error:
        raise failure_of(error, folder) from error
    except InputError as error:
        name_folder(error, folder)
        raise


def _undo(held: LockedFolder, read: Read, nbytes: int, owner: int) -> Recovered:
    with ExitStack() as stack:
        files = list[tuple[LockedFile, list[Change]]]()
        for name, journal in journals_in(read, nbytes, lambda name: _stat(held.path, name)):
            path = os.path.join(held.path, name)
            file = stack.enter_context(LockedFile(path, PATIENCE))
            about = os.fstat(file.fd)
            try:
                if about.st_ino != journal.inode:
                    raise CorruptError("is not the file that its journal belongs to")
                if not may_change(owner, about):
                    raise InputError("the journal in its folder belongs to another user")
                files.append((file, journal.to_undo(about.st_size, file.read)))
            except InputError as error:
                error.about(path)
                raise
        for file, changes in files:  # now all files are known to match their journals
            file.put_back(changes)
        held.remove_journal()
    written = sum(len(change.old) for _, changes in files for change in changes)
    return Recovered(held.path, "rolled-back" if written else "unchanged", written)


def _stat(folder: str, name: str) -> os.stat_result:
    """Return the state of a file; CorruptError if it is a link or below one, as in a trap."""
    path = os.path.join(folder, name)
    try:
        about = os.lstat(path)
    except FileNotFoundError as error:
        raise InputError(
            "is missing, but the journal of an interrupted in-place change is there",
            path=path,
            hint=f"put the file back, or remove {os.path.join(folder, FOLDER_JOURNAL)}",
        ) from error
    if not stat.S_ISREG(about.st_mode) or os.path.realpath(path) != os.path.join(
        os.path.realpath(folder), name
    ):
        raise CorruptError("is not the file that its journal belongs to", path=path)
    return about
