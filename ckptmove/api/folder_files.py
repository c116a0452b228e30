"""Find the files beside the weights in a model folder, which are copied unchanged."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from ..errors import CorruptError, InputError, RefusedError, UnsupportedError
from ..plans.plan import Copy, Plan
from ..sources import place_of
from ..sources.place import EntryKind, FolderEntry
from ..writing import StagedFolder
from ..writing.in_place.change import journaled_files, recover_if_interrupted
from ..writing.verify import Progress

_MOST = 100_000  # files, and folders


class Companion(NamedTuple):
    """A file or an empty folder beside the weights."""

    name: str  #: within the folder, with `/` between its parts; it ends in one if it is a folder
    path: str
    nbytes: int
    within: str | None = None  #: the folder that it may not lead out of, if it is a link

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, in which nothing is."""
        return self.name.endswith("/")

    def copy_into(self, folder: StagedFolder, progress: Progress | None) -> None:
        """Write a copy of it, and verify that; raises CorruptError if its size has changed."""
        if self.is_folder:
            folder.make(self.name.rstrip("/"))
            return
        place = place_of(self.path)
        with place.open() as source, folder.file(self.name, [source]) as file:
            if self.within is not None:
                place.check_link(place_of(self.within), source)
            if source.nbytes != self.nbytes:
                raise CorruptError("the file was changed while it was read", path=self.path)
            copies = (Copy(0, self.nbytes, 0),) if self.nbytes else ()
            file.write(Plan("clone", self.nbytes, copies, ()), progress)


def companions_of(
    folder: str, weights: Collection[str], warnings: list[str], *, follow_links: bool = False
) -> list[Companion]:
    """Everything in a folder but the weights, however deep; adds to the warnings.

    Links to files are followed, links to folders are not. Interrupted changes in place are undone
    first. Raises UnsupportedError for what is no file, or a link that leads out of the folder.
    """
    place, found = place_of(folder), list[Companion]()
    for path in filter(os.path.lexists, journaled_files(folder)):
        notes = recover_if_interrupted(path)
        warnings += (f"{os.path.relpath(path, folder)}: {note}" for note in notes)
    for each in place.files_below():
        if each.name in weights:
            continue
        if each.kind is EntryKind.FOLDER_LINK:
            warnings.append(f"{each.name} is a link to a folder and was not followed")
            continue
        if each.kind is EntryKind.FILE:
            if not follow_links:
                place_of(each.path).check_link(place)
        elif each.kind is not EntryKind.FOLDER:
            raise _not_copied(each)
        found.append(Companion(each.name, each.path, each.nbytes, None if follow_links else folder))
        if len(found) > _MOST:
            raise RefusedError(f"there are more than {_MOST:,} files in it", path=folder)
    return sorted(found)


def _not_copied(entry: FolderEntry) -> InputError:
    try:
        place_of(entry.path).size_and_stamp()
    except InputError as error:  # such as a link that leads nowhere
        return error
    return UnsupportedError("is no file, and can't be copied", path=entry.path)


def check_apart(source: str, destination: str) -> None:
    """Raises RefusedError if one of two folders is, or lies in, the other."""
    ours, theirs = (place_of(each).folder_identity() for each in (source, destination))
    if ours == theirs:
        raise RefusedError("the destination is the source itself", path=destination)
    if theirs.startswith(ours):
        raise RefusedError("the destination is inside the source", path=destination)
    if ours.startswith(theirs):
        raise RefusedError("the source is inside the destination", path=destination)
