"""Execute a plan so that the destination file appears complete and verified, or not at all.

A temporary file beside the destination is written. It gets the final name in one step, after every
byte is verified and synced. For thousands of tiny files, syncing takes most of the time. So several
can be synced together (`naming_later`): write n, sync once, then name n.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar

from ..errors import StrPath, WriteError
from ..sources.source import Source
from ..system.files import RENAMES_OPEN, sync_all
from .execute import PlanFile
from .final_name import FinalName, announce_commit, check_file, exists_error, failure_of

_LATER: ContextVar[list[LocalFile] | None] = ContextVar("_LATER", default=None)


class LocalFile(PlanFile):
    """A file that is being written. As a context manager, it is removed unless committed."""

    def __init__(self, destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
        """Create the file under a temporary name. Raises as `check_file`."""
        path = os.fspath(destination)
        check_file(path, sources, force=force)
        self.force = force
        self.committed = False
        self._name = FinalName(path)
        self._later = _LATER.get()
        try:
            super().__init__(self._name.hidden, self._name.folder, path, sources)
        except BaseException as error:  # a signal may arrive after the file was made
            self._remove()
            self._name.close()
            if isinstance(error, OSError):
                raise failure_of(error, path) from error
            raise

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._name.folder.unlink(self._name.hidden)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._later is not None and self in self._later:  # the caller goes on
            return
        if not self.committed:
            if not RENAMES_OPEN:
                with contextlib.suppress(OSError):
                    super().close()
            self._remove()
        super().__exit__(kind, error, trace)

    def close(self) -> None:
        """Close the file and its directory."""
        try:
            super().close()
        finally:
            self._name.close()

    def _sync(self) -> None:
        if self._later is None:
            super()._sync()

    def commit(self) -> None:
        """Give the file its name, or leave that to the caller of `naming_later`.

        Raises RefusedError if the name was taken meanwhile.
        """
        if self._later is None:
            self._take_name()
        else:
            self._later.append(self)

    def _take_name(self) -> None:
        announce_commit()
        try:
            if not RENAMES_OPEN:
                super().close()
            if self.force:
                self._name.folder.replace(self._name.hidden, self._name.name)
            else:
                self._name.folder.take_name(self._name.hidden, self._name.name)
            self.committed = True
        except OSError as error:
            if error.errno == errno.EEXIST:
                raise exists_error(self.path) from error
            raise WriteError(f"committing failed: {error.strerror}", path=self.path) from error
        self._name.sync_in_time()

    def name_now(self) -> None:
        """Name a file of `naming_later` that `sync_together` has synced. Raises as `commit`."""
        self._end_waiting(self._take_name)

    def drop(self) -> None:
        """Remove a file of `naming_later` instead of naming it."""
        self._end_waiting(lambda: None)

    def _end_waiting(self, do: Callable[[], None]) -> None:
        assert self._later is not None
        self._later.remove(self)
        with self:
            do()


@contextlib.contextmanager
def naming_later(files: list[LocalFile] | None) -> Iterator[None]:
    """A context in which files are written and verified, and appended to a list instead of named.

    The caller must then sync and name them, or drop them. With None, files are named at once.
    """
    token = _LATER.set(files)
    try:
        yield
    finally:
        _LATER.reset(token)


def sync_together(files: Iterable[LocalFile]) -> None:
    """Sync files that wait for their names: with one call for all, if the system has it.

    Raises OSError.
    """
    sync_all([each.fd for each in files])
