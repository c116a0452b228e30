"""Undo interrupted changes in place, of a file or of several files in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ...errors import CorruptError, InputError, RefusedError, StrPath, WriteError
from ...reports.recover import Recovered
from ...sources import place_of
from ...sources.place import walk
from ..final_name import failure_of
from .find_journal import is_journaled, journaled_folder, real_path
from .folder_undo import undo_in_folder
from .journal import Journal
from .journal_name import FOLDER_JOURNAL, SUFFIX, UNFINISHED, journal_name
from .locked_file import PATIENCE, LockedFile


def undo(path: StrPath) -> Recovered:
    """Undo an interrupted change of a file or folder; do nothing without a journal.

    A change of several files in a folder is undone in all of them.

    An unfinished journal is removed, unless a process is still writing it.

    Raises InputError if the journal does not belong to the present file, or if another process has
    locked the file; WriteError if undoing failed, and can be tried again.
    """
    path = os.fspath(path)
    if not is_journaled(path):
        return Recovered(path, "nothing")
    folder = path if os.path.isdir(path) else journaled_folder(path)
    if folder is not None:
        return undo_in_folder(folder)
    folder, name = os.path.split(real_path(path))
    beside = os.path.join(folder, journal_name(name))
    if not os.path.lexists(beside):
        _remove_unfinished(path)
        return Recovered(path, "nothing")
    try:
        with LockedFile(path, PATIENCE) as held:
            return _undo(held)
    except FileNotFoundError as error:
        raise InputError(
            "is missing, but the journal of an interrupted in-place change is there",
            path=path,
            hint=f"put the file back, or remove {beside}",
        ) from error
    except OSError as error:
        raise failure_of(error, path) from error
    except InputError as error:
        error.about(path)
        if isinstance(error, CorruptError):
            error.hint = f"if the file is whole, remove {beside}"
        raise


def _undo(held: LockedFile) -> Recovered:
    data = held.read_journal()
    if data is None:
        return Recovered(held.path, "nothing")
    made = Journal.from_bytes(data).to_undo(os.fstat(held.fd).st_size, held.read)
    held.put_back(made)
    held.remove_journal()
    if not made:
        return Recovered(held.path, "unchanged")
    return Recovered(held.path, "rolled-back", sum(len(change.old) for change in made))


def _remove_unfinished(path: str) -> None:
    with contextlib.suppress(OSError, InputError, RefusedError), LockedFile(path) as held:
        if held.locked:
            held.remove_unfinished()


def notes_of_undoing(path: StrPath) -> tuple[str, ...]:
    """Undo an interrupted change before a file is read; return notes for the user."""
    try:
        outcome = undo(path).outcome
    except (RefusedError, WriteError) as error:
        raise InputError(
            f"an interrupted in-place change can't be undone: {error}",
            path=path,
            hint=f"ckptmove recover {os.fspath(path)}",
        ) from error
    if outcome == "rolled-back":
        return ("an interrupted in-place change was undone first",)
    if outcome == "unchanged":
        return ("an interrupted in-place change had not changed the file; removed its journal",)
    return ()


def journaled_files(root: str) -> Iterator[str]:
    """Yield the files in a folder and below that have a journal beside them, finished or not.

    Also yields the folder itself and folders below it that have a journal in them.
    """
    if not place_of(root).changes_in_place:
        return

    def unreadable(error: OSError) -> None:
        raise InputError(f"can't be read: {error.strerror}", path=error.filename)

    for folder, folders, names in walk(root, unreadable):
        folders.sort()
        if not {FOLDER_JOURNAL, FOLDER_JOURNAL + UNFINISHED}.isdisjoint(names):
            yield folder
        names = [name for name in names if not name.startswith(FOLDER_JOURNAL)]
        journals = sorted(name for name in names if name.endswith(SUFFIX))
        unfinished = [name for name in names if name.endswith(SUFFIX + UNFINISHED)]
        files = {journal_name(name): name for name in names} if journals or unfinished else {}
        for journal in journals:  # its file is missing: report the journal's own name
            yield os.path.join(folder, files.get(journal, journal[1 : -len(SUFFIX)]))
        for name in unfinished:
            journal = name.removesuffix(UNFINISHED)
            if journal in files and journal not in journals:
                yield os.path.join(folder, files[journal])
