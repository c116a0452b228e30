"""Write a folder that appears complete, with all its files verified, or not at all.

The files are written into a temporary folder beside it, which gets the final name in one step after
everything in it is synced. If a folder with that name exists and is not empty, two steps are
needed: the old folder is renamed, and removed once the new one is in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

from ..errors import RefusedError, StrPath, WriteError
from ..sources.place import walk
from ..sources.source import Source
from ..system.files import READ, RENAMES_OPEN
from ..system.locks import lock_file
from ..system.names import why_no_name, without_slash
from .execute import PlanFile
from .final_name import (
    FinalName,
    announce_commit,
    exists_error,
    failure_of,
    hidden_name,
    mode_from,
    mode_of,
)

_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}
_TAKEN = {*_NOT_EMPTY, errno.ENOTDIR}


class LocalFolder:
    """A directory that is being written. As a context manager, it is removed unless committed."""

    def __init__(
        self,
        destination: StrPath,
        sources: Sequence[Source],
        *,
        force: bool,
        like: str | None = None,
    ) -> None:
        """Create the directory under a temporary name. Raises as `check_folder`."""
        check_folder(destination, sources, force=force)
        self._mode = _permissions_of(like)
        self.path = without_slash(os.fspath(destination))  #: its final path
        self.sources = sources
        self.force = force
        self._name = FinalName(self.path)
        self._aside = hidden_name(self._name.name)
        self._beside = os.path.dirname(os.path.abspath(self.path))
        self.hidden = os.path.join(self._beside, self._name.hidden)  #: its temporary path
        self._folders = [self._name.hidden]
        self._files: list[PlanFile] = []
        self._lock = -1
        try:
            self._mkdir(self._name.hidden)
            self._lock = lock_folder(self.hidden)
        except BaseException as error:  # a signal may arrive after the directory was made
            self._remove(self._name.hidden)
            self._name.close()
            if isinstance(error, OSError):
                raise failure_of(error, self.path) from error
            raise

    def _mkdir(self, name: str) -> None:
        mode = self._mode
        if mode is None:
            mode = mode_from(self.sources)
            mode |= (mode & 0o444) >> 2
        self._name.folder.mkdir(name, mode | 0o700)

    def _remove(self, name: str) -> None:
        remove_tree(os.path.join(self._beside, name))

    def _has(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self._beside, name))

    def __enter__(self) -> LocalFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            for file in self._files:
                with contextlib.suppress(OSError):
                    file.close()
            if self._has(self._aside):
                self._put_back(error)
        finally:
            self._remove(self._name.hidden)
            self._name.close()
            if self._lock >= 0:
                os.close(self._lock)

    def _put_back(self, error: BaseException | None) -> None:
        """Rename the old directory back, or remove it if the new one has the name."""
        if not self._has(self._name.hidden):
            self._remove(self._aside)
            return
        try:
            self._name.folder.rename(self._aside, self._name.name)
        except OSError as failed:
            raise WriteError(
                f"{error}; restoring the old folder failed too: {failed.strerror}",
                path=self.path,
                hint=f"it is in {os.path.join(self._beside, self._aside)}",
            ) from error

    # -- writing -------------------------------------------------------------------------------

    def file(self, name: str, sources: Sequence[Source] | None = None) -> PlanFile:
        """As `StagedFolder.file`; directories in its name are made."""
        path = os.path.join(self.path, name)
        try:
            *folders, own = self._parts(name)
            inside = os.path.join(self._made(folders), own)
            given = self.sources if sources is None else sources
            file = PlanFile(inside, self._name.folder, path, given)
        except (OSError, ValueError) as error:
            raise failure_of(error, path) from error
        self._files.append(file)
        return file

    def make(self, name: str) -> None:
        """Make a directory in it. Raises as `file`."""
        try:
            self._made(self._parts(name))
        except (OSError, ValueError) as error:
            raise failure_of(error, os.path.join(self.path, name)) from error

    def _parts(self, name: str) -> list[str]:
        why = "" if "\0" in name else why_no_name(name)  # the system refuses it
        if why:
            raise RefusedError(f"{name!r} is not a valid file name: it {why}", path=self.path)
        return name.split("/")

    def _made(self, parts: Sequence[str]) -> str:
        """Return the path of a subdirectory; make it if it is missing."""
        folder = self._folders[0]
        for part in parts:
            folder = os.path.join(folder, part)
            if folder not in self._folders:
                self._mkdir(folder)
                self._folders.append(folder)
        return folder

    # -- committing ----------------------------------------------------------------------------

    def commit(self) -> None:
        """Give the directory its name. Raises RefusedError if the name was taken meanwhile."""
        try:
            for folder in reversed(self._folders):
                self._name.folder.sync_inside(folder)
            if not RENAMES_OPEN:
                for file in self._files:
                    file.close()
            announce_commit()
            self._take_name()
        except OSError as error:
            if error.errno in _TAKEN:
                raise exists_error(self.path) from error
            raise WriteError(f"committing failed: {error.strerror}", path=self.path) from error
        self._name.sync()
        if self._has(self._aside):
            self._remove(self._aside)

    def _take_name(self) -> None:
        """Rename; this replaces an empty directory, and nothing else."""
        hidden, name = self._name.hidden, self._name.name
        try:
            self._name.folder.rename(hidden, name)
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise
            if RENAMES_OPEN or not self._remove_empty():  # Windows never replaces
                if not self.force:
                    raise
                self._name.folder.rename(name, self._aside)
            self._name.folder.rename(hidden, name)

    def _remove_empty(self) -> bool:
        with contextlib.suppress(OSError):
            self._name.folder.rmdir(self._name.name)
            return True
        return False


def _permissions_of(folder: str | None) -> int | None:
    """Return the permission bits of a local directory; None if it is not one."""
    try:
        mode = os.stat(folder).st_mode if folder is not None else 0
    except (OSError, ValueError):
        return None
    return stat.S_IMODE(mode) & 0o777 if stat.S_ISDIR(mode) else None


def check_folder(destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
    """Raises RefusedError if the directory must not be written, before anything is."""
    path = without_slash(os.fspath(destination))
    if os.path.basename(path) in ("", ".", ".."):
        raise RefusedError("the destination is not a valid name for a directory", path=path)
    mode = mode_of(path, sources)
    if mode is None:
        return
    if not stat.S_ISDIR(mode):
        raise RefusedError("the destination exists and is not a directory", path=path)
    inside = os.path.join(os.path.realpath(path), "")
    if any(os.path.realpath(source.path).startswith(inside) for source in sources):
        raise RefusedError("the source is inside the destination", path=path)
    try:
        taken = bool(os.listdir(path))
    except OSError as error:
        raise failure_of(error, path) from error
    if taken and not force:
        raise exists_error(path)


def lock_folder(folder: str) -> int:
    """Return a descriptor of a locked folder, for `abandoned`; -1 if folders have no locks."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.open(folder, READ)
        lock_file(fd)
    return fd


def remove_tree(path: str) -> None:
    """Remove a folder, without following links; entries that can't be removed stay.

    `shutil.rmtree` recurses and keeps one folder open per level, so very deep folders are removed
    from the bottom.
    """
    with contextlib.suppress(RecursionError):
        import shutil

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
