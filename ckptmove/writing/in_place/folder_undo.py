"""Undo an interrupted change of several files in a folder: of all of them, or of none."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import ContextVar

from ...errors import CorruptError, InputError, RefusedError, UnsupportedError
from ...reports.recover import Recovered
from ...system.files import AT_ONCE, NO_LINK, READ, user
from ..copy import read_at
from ..final_name import failure_of
from .folder_journal import FOLDER_JOURNAL, journals_in, names_in
from .journal import UNFINISHED, Change, Read
from .locked_file import PATIENCE, LockedFile, LockedFolder, may_change

_IN_USE = (OSError, InputError, RefusedError)
_KNOWN: ContextVar[FoldersWithoutJournal | None] = ContextVar("_KNOWN", default=None)


def undo_in_folder(folder: str) -> Recovered:
    """Undo an interrupted change of files in a folder; without a journal it is only looked for.

    A journal that was not finished is removed, unless somebody is about to finish it. Raises as
    `undo`.
    """
    journal = os.path.join(folder, FOLDER_JOURNAL)
    if not os.path.lexists(journal):
        if os.path.lexists(journal + UNFINISHED):
            with contextlib.suppress(*_IN_USE), LockedFolder(folder) as held:
                if held.locked:
                    held.remove_unfinished()
        return Recovered(folder, "nothing")
    try:
        with LockedFolder(folder, PATIENCE) as held, held.opened_journal() as opened:
            if opened is None:
                return Recovered(folder, "nothing")
            return _undo(held, *opened)
    except OSError as error:
        raise failure_of(error, folder) from error
    except InputError as error:
        _name(error, folder)
        raise


def _name(error: InputError, folder: str) -> None:
    """Have an error say which folder it is of, and what to do about its journal."""
    error.about(folder)
    if isinstance(error, CorruptError):
        error.hint = f"if the files are whole, remove {os.path.join(folder, FOLDER_JOURNAL)}"


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
        for file, changes in files:  # now that all are known to be what they are said to be
            file.put_back(changes)
        held.remove_journal()
    written = sum(len(change.old) for _, changes in files for change in changes)
    return Recovered(held.path, "rolled-back" if written else "unchanged", written)


def _stat(folder: str, name: str) -> os.stat_result:
    """What the file of this name is; CorruptError if it is a link, or below one, as in a trap."""
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


def journaled_folder(path: str) -> str | None:
    """The folder that a file is in, however deep, if its journal is of this file among others.

    Raises CorruptError or UnsupportedError if a journal of ours, or of root, can't be read.
    """
    if "\0" in path:  # nothing is called so; whoever opens it says it
        return None
    path, known = os.path.abspath(path), _KNOWN.get()
    above = os.path.dirname(path)
    if known is not None and above in known.clear and not os.path.islink(path):
        return None
    found = False
    for each in dict.fromkeys((path, os.path.realpath(path))):
        for folder in _with_journal_above(each):
            found = True
            if _is_of(folder, os.path.relpath(each, folder)):
                return folder
    if known is not None and not found and not os.path.islink(path):
        known.clear.add(above)
    return None


class FoldersWithoutJournal:
    """Folders in which no journal was found, nor in those above them, by any way that leads there.

    Of many small files that are read within a moment, most lie in few folders.
    """

    def __init__(self) -> None:
        self.clear = set[str]()  #: their absolute paths

    def are_clear(self) -> bool:
        """Whether there is no journal now either: no process was killed there meanwhile."""
        each_way = {way for each in self.clear for way in (each, os.path.realpath(each))}
        return not any(any(_with_journal_above(f"{each}/_")) for each in each_way)


@contextlib.contextmanager
def looking_once() -> Iterator[FoldersWithoutJournal]:
    """A context in which a folder that had no journal is not looked at again for each file."""
    known = FoldersWithoutJournal()
    token = _KNOWN.set(known)
    try:
        yield known
    finally:
        _KNOWN.reset(token)


def _with_journal_above(path: str) -> Iterator[str]:
    """The folders above it that have a journal."""
    while True:
        path, before = os.path.dirname(path), path
        if path == before:
            return
        if os.path.lexists(os.path.join(path, FOLDER_JOURNAL)):
            yield path


def _is_owned_by(path: str, user: int) -> bool:
    try:
        return os.lstat(path).st_uid == user
    except OSError:
        return False


def _is_of(folder: str, name: str) -> bool:
    try:
        fd = os.open(os.path.join(folder, FOLDER_JOURNAL), READ | AT_ONCE | NO_LINK)
    except OSError:  # gone meanwhile, or none of ours
        return False
    try:
        about = os.fstat(fd)
        ours = about.st_uid in (0, user())
        if not ours and not _is_owned_by(os.path.join(folder, name), about.st_uid):
            return False  # a trap, which nobody undoes
        return stat.S_ISREG(about.st_mode) and name in names_in(
            lambda at, nbytes: read_at(fd, at, nbytes), about.st_size
        )
    except (CorruptError, UnsupportedError) as error:
        if ours:  # nobody knows whether it is of this file
            _name(error, folder)
            raise
        return False
    finally:
        os.close(fd)
