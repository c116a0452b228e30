"""Destinations: where new files and folders are written, on this machine or in a store.

`RemoteDestination` of `upload.destination` is the implementation for URLs.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

from ..plans.plan import Plan
from ..sources.place import walk
from ..sources.source import Source
from .final_name import check_file, check_room
from .staged_file import LocalFile
from .verify import Progress

_Self = TypeVar("_Self")


class _Context(Protocol):
    def __enter__(self: _Self) -> _Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class StagedPart(_Context, Protocol):
    """A file in the making, in a folder in the making."""

    def write(self, plan: Plan, progress: Progress | None = None) -> str:
        """Carry out the plan and verify every byte; see `execute.PlanFile.write`."""

    def open_written(self) -> Source:
        """Open the written file for reading, like any other source."""


class StagedFile(StagedPart, Protocol):
    """A file that is being written. As a context manager, it is removed unless committed."""

    def commit(self) -> None:
        """Give the file its name. Raises RefusedError if the name was taken meanwhile."""


class StagedFolder(_Context, Protocol):
    """A folder that is being written. As a context manager, it is removed unless committed."""

    def file(self, name: str, sources: Sequence[Source] | None = None) -> StagedPart:
        """Create a file in the folder; its plan copies from `sources`, or from those of the folder.

        Raises RefusedError if the name leads out of the folder, WriteError if it is taken.
        """

    def make(self, name: str) -> None:
        """Make a folder in it. Raises as `file`."""

    def commit(self) -> None:
        """Make all files visible. Raises as `StagedFile.commit`."""


class Destination(ABC):
    """The place where a file or folder will be written."""

    def __init__(self, path: str) -> None:
        self.path = path  #: as it was given: a path, or a URL

    @abstractmethod
    def check_file(self, sources: Sequence[Source], *, force: bool) -> None:
        """Raises RefusedError if a file must not be written, before anything is."""

    @abstractmethod
    def check_folder(self, sources: Sequence[Source], *, force: bool) -> None:
        """Raises RefusedError if a folder must not be written, before anything is."""

    @abstractmethod
    def check_room(
        self, plans: Sequence[Plan], sources: Sequence[Source], besides: int = 0
    ) -> None:
        """Raises RefusedError if the plans, and `besides` bytes, do not fit on the disk."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Whether a folder exists there. Raises RefusedError if a store can't tell."""

    @abstractmethod
    def names_below(self) -> list[str]:
        """The relative names of all files in the folder, at any depth; empty without a folder."""

    @abstractmethod
    def new_file(self, sources: Sequence[Source], *, force: bool) -> StagedFile:
        """Create a file whose plans copy from these sources. Raises as `check_file`."""

    @abstractmethod
    def new_folder(
        self, sources: Sequence[Source], *, force: bool, like: str | None = None
    ) -> StagedFolder:
        """Create a folder. Raises as `check_folder`.

        It gets the permissions of the folder `like`; without `like`, those common to all sources.
        """


class LocalDestination(Destination):
    """A path on this machine."""

    def check_file(self, sources: Sequence[Source], *, force: bool) -> None:
        check_file(self.path, sources, force=force)

    def check_folder(self, sources: Sequence[Source], *, force: bool) -> None:
        from .staged_folder import check_folder  # here and below: not needed for a file

        check_folder(self.path, sources, force=force)

    def check_room(
        self, plans: Sequence[Plan], sources: Sequence[Source], besides: int = 0
    ) -> None:
        check_room(self.path, plans, sources, besides)

    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    def names_below(self) -> list[str]:
        found = list[str]()
        for folder, _, names in walk(self.path):
            found += [os.path.relpath(os.path.join(folder, name), self.path) for name in names]
        return sorted(found)

    def new_file(self, sources: Sequence[Source], *, force: bool) -> StagedFile:
        return LocalFile(self.path, sources, force=force)

    def new_folder(
        self, sources: Sequence[Source], *, force: bool, like: str | None = None
    ) -> StagedFolder:
        from .staged_folder import LocalFolder

        return LocalFolder(self.path, sources, force=force, like=like)
