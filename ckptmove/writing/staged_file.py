"""Execute a plan so that the destination file appears complete and verified, or not at all.

A temporary file beside the destination is written. It gets the final name in one step, after every
byte is verified and synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from ..errors import StrPath, WriteError
from ..sources.source import Source
from ..system.files import RENAMES_OPEN
from .execute import PlanFile
from .final_name import FinalName, check_file, exists_error, failure_of


class LocalFile(PlanFile):
    """A file in the making. Used as a context, it is gone at the end unless it was committed."""

    def __init__(self, destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
        """Create the file under a temporary name. Raises as `check_file`."""
        path = os.fspath(destination)
        check_file(path, sources, force=force)
        self.force = force
        self.committed = False
        self._name = FinalName(path)
        try:
            super().__init__(self._name.hidden, self._name.folder, path, sources)
        except BaseException as error:  # a signal may come after the file did
            self._remove()
            self._name.close()
            if isinstance(error, OSError):
                raise failure_of(error, path) from error
            raise

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._name.folder.unlink(self._name.hidden)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.committed:
            if not RENAMES_OPEN:
                with contextlib.suppress(OSError):
                    super().close()
            self._remove()
        super().__exit__(kind, error, trace)

    def close(self) -> None:
        """Close the file, and the directory that it is in."""
        try:
            super().close()
        finally:
            self._name.close()

    def commit(self) -> None:
        """Give the file its name. Raises RefusedError if the name was taken meanwhile."""
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
