"""Change a file in place, so that it can always be restored.

The old bytes are first written to a journal beside the file, and synced. As long as the journal
exists, the change is not done; it can be undone, and undoing can be interrupted and started again.
A process that changes or undoes holds a lock on the file. So if the file is not locked, its journal
is left over from an interrupted change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from ...errors import CkptmoveError, CorruptError, RefusedError, WriteError
from ...plans.plan import Plan
from ...sources.file import File
from ...system.locks import is_locked, is_open_for_writing
from ..copy import write_at
from ..final_name import announce_commit, failure_of
from .folder_journal import folder_journal
from .journal import Journal
from .locked_file import (
    LockedFile,
    LockedFolder,
    LockedPlace,
    busy_error,
    check_system,
    is_held_here,
)

_INSIST = "--force changes it anyway"
_GLANCES = 5  # a file that is open for writing each time is not just opened to be locked


class FileChange:
    """A locked file, and the changes to make in it."""

    def __init__(self, source: File, plan: Plan, *, force: bool) -> None:
        """Lock the file. Raises as `check_in_place`, or InputError if a process is changing it."""
        self.path, self.source = source.path, source
        check_in_place(source, plan, force=force)
        try:
            self.held = LockedFile(self.path)
        except OSError as error:
            raise failure_of(error, self.path) from error
        try:
            if not self.held.locked and not force:
                raise RefusedError(
                    "its file system does not support locks", path=self.path, hint=_INSIST
                )
            if self.held.has_journal():
                raise has_journal(self.path)
            self.held.remove_unfinished()
            inode = os.fstat(self.held.fd).st_ino
            self.journal = Journal.of(source.nbytes, inode, plan.writes, source.read)
        except OSError as error:
            self.held.close()
            raise failure_of(error, self.path) from error
        except BaseException:
            self.held.close()
            raise

    def check_unchanged(self) -> None:
        """Raises CorruptError unless this is the file that was read, still under its name."""
        self.source.check_unchanged()
        held, source = os.fstat(self.held.fd), os.fstat(self.source.fd)
        if not os.path.samestat(held, source) or not self.source.same_file(self.path):
            raise CorruptError("the file was replaced while it was read", path=self.path)

    def write(self) -> None:
        """Make the changes, sync them and read them back. Raises OSError or WriteError."""
        for change in self.journal.changes:
            write_at(self.held.fd, change.at, change.new)
        self.held.sync_written()
        for change in self.journal.changes:
            self.held.check(change.at, change.new)

    def put_back(self) -> None:
        """Undo the changes, as far as they were made. Raises OSError or WriteError."""
        self.held.put_back(self.journal.changes)

    def open_written(self) -> File:
        """Open the changed file for reading, like any other source."""
        try:
            return File(os.dup(self.held.fd), self.path)
        except OSError as error:
            raise failure_of(error, self.path) from error


class UndoableChange:
    """Changes in progress. As a context manager, they are undone at the end unless committed."""

    def __init__(self, path: str) -> None:
        self.path = path  #: of the file or folder that changes
        self.changes: list[FileChange] = []
        self._began = self._begun = self._committing = False

    def _write(self, held: LockedPlace, journal: Iterable[bytes]) -> int:
        """Write and sync the journal, then make the changes; return how many bytes they have.

        Raises CorruptError if a file was changed since it was read.
        """
        self._began = True
        try:
            held.write_journal(journal)
            for change in self.changes:
                change.check_unchanged()
            self._begun = True
            for change in self.changes:
                change.write()
        except FileExistsError as error:
            self._began = False  # the journal is not ours
            raise has_journal(self.path) from error
        except OSError as error:
            raise failure_of(error, self.path) from error
        return sum(change.journal.changed_nbytes for change in self.changes)

    def _commit(self, held: LockedPlace) -> None:
        """Remove the journal: the change is final."""
        announce_commit()
        self._committing = True
        try:
            held.folder.unlink(held.journal)
        except OSError as error:
            raise WriteError(f"committing failed: {error.strerror}", path=self.path) from error
        try:
            held.folder.sync()
        except OSError as error:
            raise WriteError(
                "is changed and verified, but a power failure may undo the change: "
                f"{error.strerror}",
                path=self.path,
            ) from error

    def _end(self, held: LockedPlace, error: BaseException | None, again: str) -> None:
        """Undo the changes unless they are committed; `again` names what is restored."""
        if not self._began:
            return
        try:
            if self._committing and not held.has_journal():
                return
            if self._begun:
                for change in self.changes:
                    change.put_back()
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
            error.hint = error.hint or again


class InPlace(UndoableChange):
    """A change of one file in place."""

    def __init__(self, source: File, plan: Plan, *, force: bool) -> None:
        super().__init__(source.path)
        self.source, self.plan, self.force = source, plan, force

    def __enter__(self) -> InPlace:
        """Lock the file. Raises as `FileChange`."""
        self._file = FileChange(self.source, self.plan, force=self.force)
        self.changes = [self._file]
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._file.held as held:
            self._end(held, error, "the file is again as it was")

    def write(self) -> int:
        """Write the journal, then change the file; return how many bytes of the file were written.

        Raises CorruptError if the file was changed since it was read.
        """
        return self._write(self._file.held, self._file.journal.parts())

    def open_written(self) -> File:
        """Open the changed file for reading, like any other source."""
        return self._file.open_written()

    def commit(self) -> None:
        """Remove the journal: the change is final."""
        self._commit(self._file.held)


class InPlaceFolder(UndoableChange):
    """A change of several files in a folder: all of them change, or none."""

    def __init__(self, folder: str, files: Mapping[str, tuple[File, Plan]], *, force: bool) -> None:
        """`files` are the files to change, by their names in the folder."""
        super().__init__(folder)
        self._files, self._force = files, force

    def __enter__(self) -> InPlaceFolder:
        """Lock the files. Raises as `check_folder_in_place`, or as `FileChange`."""
        check_folder_in_place(self.path, self._files, force=self._force)
        with ExitStack() as stack:
            try:
                self._held = stack.enter_context(LockedFolder(self.path))
                if self._held.has_journal():
                    raise has_journal(self.path)
                self._held.remove_unfinished()
            except OSError as error:
                raise failure_of(error, self.path) from error
            for _, (source, plan) in sorted(self._files.items()):
                change = FileChange(source, plan, force=self._force)
                stack.enter_context(change.held)
                self.changes.append(change)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._stack:
            self._end(self._held, error, "all files are again as they were")

    def write(self) -> int:
        """As `InPlace.write`, for all files."""
        journals = [change.journal for change in self.changes]
        found = dict(zip(sorted(self._files), journals, strict=True))
        return self._write(self._held, [folder_journal(found)])

    def open_written(self, name: str) -> File:
        """Open a changed file for reading, like any other source."""
        return self.changes[sorted(self._files).index(name)].open_written()

    def commit(self) -> None:
        """Remove the journal: all changes are final."""
        self._commit(self._held)


def has_journal(path: str) -> RefusedError:
    """Return the error for a change of a file or folder that already has a journal."""
    return RefusedError("already has a journal", path=path, hint=f"ckptmove recover {path}")


def check_folder_in_place(
    folder: str, files: Mapping[str, tuple[File, Plan]], *, force: bool
) -> None:
    """Raises RefusedError if a file in a folder can't or must not be changed in place."""
    for name, (source, plan) in files.items():
        if os.path.realpath(source.path) != os.path.join(os.path.realpath(folder), name):
            raise RefusedError(
                "is a link, or in a linked folder, which is not changed with the folder",
                path=source.path,
                hint="without --in-place, ckptmove writes a relocated copy",
            )
        check_in_place(source, plan, force=force)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedError("can't be changed in place: it is read-only", path=folder)


def check_in_place(source: File, plan: Plan, *, force: bool) -> None:
    """Raises RefusedError if the file can't or must not be changed in place."""
    path = source.path
    check_system(path)
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
    for _ in range(_GLANCES):
        here = is_held_here(source.fd)
        if not is_open_for_writing(source.fd):
            return
        here = here or is_held_here(source.fd)  # removed or created meanwhile
        if here or is_locked(source.fd):
            raise busy_error(path, here=here)
        time.sleep(0.01)
    raise RefusedError("is open for writing elsewhere", path=path, hint=_INSIST)
