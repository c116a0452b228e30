"""Destinations in object stores."""

from __future__ import annotations

from collections.abc import Sequence

from ...plans.plan import Plan
from ...sources.filesystem import open_store
from ...sources.source import Source
from ..destination import Destination, StagedFile, StagedFolder
from .errors import with_write_retries
from .staged_object import StagedObject, check_object, kind_at, open_to_write
from .staged_prefix import StagedPrefix, check_prefix, names_below


class RemoteDestination(Destination):
    """The destination of a URL."""

    def check_file(self, sources: Sequence[Source], *, force: bool) -> None:
        check_object(self.path, sources, force=force)

    def check_folder(self, sources: Sequence[Source], *, force: bool) -> None:
        check_prefix(self.path, sources, force=force)

    def check_room(
        self, plans: Sequence[Plan], sources: Sequence[Source], besides: int = 0
    ) -> None:
        """As `Destination.check_room`: a store always has room."""

    def is_folder(self) -> bool:
        return kind_at(open_to_write(self.path)) == "directory"

    def write_small(self, data: bytes) -> None:
        """Write a small object at once, replacing any old one. Raises as `with_write_retries`."""

        def put() -> None:
            store = open_store(self.path)
            store.fs.pipe_file(store.path, data)

        with_write_retries(put, self.path)

    def names_below(self) -> list[str]:
        """As `Destination.names_below`. Raises RefusedError if the store can't tell."""
        return names_below(self.path)

    def new_file(self, sources: Sequence[Source], *, force: bool) -> StagedFile:
        return StagedObject(self.path, sources, force=force)

    def new_folder(
        self, sources: Sequence[Source], *, force: bool, like: str | None = None
    ) -> StagedFolder:
        del like  # folders in a store have no permissions
        return StagedPrefix(self.path, sources, force=force)
