"""Find the journal of an interrupted change in place, beside a file or in a folder above it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ...errors import CorruptError, InputError, UnsupportedError
from ...sources import place_of
from ...system.files import AT_ONCE, NO_LINK, READ, user
from .journal_name import FOLDER_JOURNAL, UNFINISHED, journal_name

if TYPE_CHECKING:
    from ...errors import StrPath

_KNOWN: ContextVar[FoldersWithoutJournal | None] = ContextVar("_KNOWN", default=None)


def is_journaled(path: StrPath) -> bool:
    """Whether a file or folder has a journal, finished or not; raises as `journaled_folder`."""
    path = os.fspath(path)
    if not place_of(path).changes_in_place:
        return False
    if os.path.isdir(path):
        return _is_there(os.path.join(path, FOLDER_JOURNAL))
    if journaled_folder(path) is not None:
        return True
    folder, name = os.path.split(real_path(path))
    return bool(name) and _is_there(os.path.join(folder, journal_name(name)))


def real_path(path: str) -> str:
    """Return the real path of a file, which is where its journal would be."""
    return os.path.realpath(path) if os.path.islink(path) else path


def _is_there(journal: str) -> bool:
    return os.path.lexists(journal) or os.path.lexists(journal + UNFINISHED)


def name_folder(error: InputError, folder: str) -> None:
    """Add to an error the name of the folder, and what to do about its journal."""
    error.about(folder)
    if isinstance(error, CorruptError):
        error.hint = f"if the files are whole, remove {os.path.join(folder, FOLDER_JOURNAL)}"


def journaled_folder(path: str) -> str | None:
    """Return the folder above a file, at any level, whose journal covers this file.

    Raises CorruptError or UnsupportedError if a journal of ours, or of root, can't be read.
    """
    if "\0" in path:  # no such file; opening it reports that
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
    """Folders that have no journal, neither in them nor in any folder above them.

    Many small files that are read at about the same time mostly lie in few folders.
    """

    def __init__(self) -> None:
        self.clear = set[str]()  #: their absolute paths

    def are_clear(self) -> bool:
        """Whether the folders still have no journal."""
        each_way = {way for each in self.clear for way in (each, os.path.realpath(each))}
        return not any(any(_with_journal_above(f"{each}/_")) for each in each_way)


@contextlib.contextmanager
def looking_once() -> Iterator[FoldersWithoutJournal]:
    """A context that checks a folder for a journal once, not again for each file."""
    known = FoldersWithoutJournal()
    token = _KNOWN.set(known)
    try:
        yield known
    finally:
        _KNOWN.reset(token)


def _with_journal_above(path: str) -> Iterator[str]:
    """Yield the folders above a path that have a journal."""
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
    except OSError:  # removed meanwhile, or not ours
        return False
    from ..copy import read_at
    from .folder_journal import names_in

    try:
        about = os.fstat(fd)
        ours = about.st_uid in (0, user())
        if not ours and not _is_owned_by(os.path.join(folder, name), about.st_uid):
            return False  # a trap: never undone
        return stat.S_ISREG(about.st_mode) and name in names_in(
            lambda at, nbytes: read_at(fd, at, nbytes), about.st_size
        )
    except (CorruptError, UnsupportedError) as error:
        if ours:  # it is unknown whether it covers this file
            name_folder(error, folder)
            raise
        return False
    finally:
        os.close(fd)
