"""Change a file in place, so that it can always be restored.

The old bytes are first written to a journal beside the file, and synced. As long as the journal
exists, the change is not done; it can be undone, and undoing can be interrupted and started again.
A process that changes or undoes holds a lock on the file. So if the file is not locked, its journal
is left over from an interrupted change.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ...errors import CkptmoveError, CorruptError, InputError, RefusedError, StrPath, WriteError
from ...plans.plan import Plan
from ...reports.recover import Recovered
from ...sources import place_of
from ...sources.source import File
from ..copy import write_at
from ..final_name import failure_of
from .journal import SUFFIX, UNFINISHED, Journal, journal_name
from .locked_file import LockedFile, busy_error, is_held_here, is_locked, is_open_for_writing

_INSIST = "--force changes it anyway"
_PATIENCE = 1.0  # seconds to wait for who is changing or undoing: it takes a fraction of one


class InPlace:
    """A change in the making. Used as a context, it is undone at the end unless committed."""

    def __init__(self, source: File, plan: Plan, *, force: bool) -> None:
        self.path, self.source = source.path, source
        self.plan, self.force = plan, force
        self._journal: Journal | None = None
        self._begun = self._committing = False

    def __enter__(self) -> InPlace:
        """Lock the file. Raises as `check_in_place`, or InputError if somebody is changing it."""
        check_in_place(self.source, self.plan, force=self.force)
        try:
            self._held = LockedFile(self.path)
        except OSError as error:
            raise failure_of(error, self.path) from error
        try:
            if not self._held.locked and not self.force:
                raise RefusedError(
                    "its file system does not support locks", path=self.path, hint=_INSIST
                )
            if self._held.has_journal():
                raise self._has_journal()
            self._held.remove_unfinished()
        except OSError as error:
            self._held.close()
            raise failure_of(error, self.path) from error
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._held as held:
            if self._journal is None:
                return
            try:
                if self._committing and not held.has_journal():
                    return
                if self._begun:
                    held.put_back(list(self._journal.changes))
                held.remove_journal()
            except (OSError, WriteError) as failed:
                first = f"{error}; " if isinstance(error, CkptmoveError) else ""
                why = failed.strerror if isinstance(failed, OSError) else failed
                raise WriteError(
                    f"{first}undoing the change failed too: {why}",
                    path=self.path,
                    hint=f"ckptmove recover {self.path}",
                ) from error
            if self._begun and isinstance(error, CkptmoveError):
                error.hint = error.hint or "the file is again as it was"

    def write(self) -> int:
        """Journal what is to change, and change it; gives how many bytes of the file were written.

        Raises CorruptError if the file was changed since it was read.
        """
        held = self._held
        inode = os.fstat(held.fd).st_ino
        journal = Journal.of(self.source.nbytes, inode, self.plan.writes, self.source.read)
        self._journal = journal
        try:
            held.write_journal(journal.to_bytes())
            self._check_unchanged()
            self._begun = True
            for change in journal.changes:
                write_at(held.fd, change.at, change.new)
            os.fsync(held.fd)
            for change in journal.changes:
                held.check(change.at, change.new)
        except FileExistsError as error:
            self._journal = None  # it is not ours
            raise self._has_journal() from error
        except OSError as error:
            raise failure_of(error, self.path) from error
        return journal.changed_nbytes

    def _has_journal(self) -> RefusedError:
        return RefusedError(
            "already has a journal", path=self.path, hint=f"ckptmove recover {self.path}"
        )

    def _check_unchanged(self) -> None:
        """Raises CorruptError unless what we hold is what was read, and has its name still."""
        self.source.check_unchanged()
        held, source = os.fstat(self._held.fd), os.fstat(self.source.fd)
        if not os.path.samestat(held, source) or not self.source.same_file(self.path):
            raise CorruptError("the file was replaced while it was read", path=self.path)

    def open_written(self) -> File:
        """The file as it stands, to be read like any other."""
        try:
            return File(os.dup(self._held.fd), self.path)
        except OSError as error:
            raise failure_of(error, self.path) from error

    def commit(self) -> None:
        """Remove the journal: the change is done, and can't be undone any more."""
        self._committing = True
        try:
            os.unlink(self._held.journal, dir_fd=self._held.folder)
        except OSError as error:
            raise WriteError(f"committing failed: {error.strerror}", path=self.path) from error
        try:
            os.fsync(self._held.folder)
        except OSError as error:
            raise WriteError(
                "is changed and verified, but a power failure may undo the change: "
                f"{error.strerror}",
                path=self.path,
            ) from error


def check_in_place(source: File, plan: Plan, *, force: bool) -> None:
    """Raises RefusedError if the file can't or mustn't be changed in place, before anything is."""
    path = source.path
    if plan.method != "patch":
        raise RefusedError(
            "can't be changed in place: the new device tags do not fit into the "
            "space of the old ones",
            path=path,
            hint="without --in-place, ckptmove writes a relocated copy",
        )
    folder = os.path.dirname(os.path.realpath(path))
    if not os.access(path, os.W_OK) or not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedError("can't be changed in place: it or its folder is read-only", path=path)
    if force:
        return
    if os.path.islink(path):
        raise RefusedError("is a symbolic link", path=path, hint=_INSIST)
    links = os.fstat(source.fd).st_nlink
    if links > 1:
        raise RefusedError(f"has {links:,} hard links", path=path, hint=_INSIST)
    here = is_held_here(source.fd)
    if is_open_for_writing(source.fd):
        here = here or is_held_here(source.fd)  # gone since, or come since
        if here or is_locked(source.fd):
            raise busy_error(path, here=here)
        raise RefusedError("is open for writing elsewhere", path=path, hint=_INSIST)


def undo(path: StrPath) -> Recovered:
    """Undo an interrupted change of a file; without a journal it is only looked for.

    A journal that was not finished is removed, unless somebody is about to finish it.

    Raises InputError if the journal is not that of the file as it is now, or if another process
    holds the file; WriteError if undoing failed, and can be tried again.
    """
    path = os.fspath(path)
    if not place_of(path).changes_in_place:
        return Recovered(path, "nothing")
    real = os.path.realpath(path) if os.path.islink(path) else path
    folder, name = os.path.split(real)
    beside = os.path.join(folder, journal_name(name))
    if not name or not os.path.lexists(beside):
        if name and os.path.lexists(beside + UNFINISHED):
            _remove_unfinished(path)
        return Recovered(path, "nothing")
    try:
        with LockedFile(path, _PATIENCE) as held:
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
    with contextlib.suppress(OSError, InputError), LockedFile(path) as held:
        if held.locked:
            held.remove_unfinished()


def recover_if_interrupted(path: StrPath) -> tuple[str, ...]:
    """Undo an interrupted change before a file is read; gives notes for the user."""
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
    """Files in a folder and below that have a journal beside them, finished or not."""
    if not place_of(root).changes_in_place:
        return

    def unreadable(error: OSError) -> None:
        raise InputError(f"can't be read: {error.strerror}", path=error.filename)

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders.sort()
        journals = sorted(name for name in names if name.endswith(SUFFIX))
        unfinished = [name for name in names if name.endswith(SUFFIX + UNFINISHED)]
        files = {journal_name(name): name for name in names} if journals or unfinished else {}
        for journal in journals:  # without its file, it is named after the journal
            yield os.path.join(folder, files.get(journal, journal[1 : -len(SUFFIX)]))
        for name in unfinished:
            journal = name.removesuffix(UNFINISHED)
            if journal in files and journal not in journals:
                yield os.path.join(folder, files[journal])
