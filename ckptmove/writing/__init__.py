"""Write new files, folders and objects: copy, verify, commit; and change files in place.

What is written to an object store is streamed in parts, in bounded memory and without a local copy.
It appears only after all of it is verified.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import StrPath
from ..plans.plan import Plan
from ..sources import is_url
from ..sources.source import Source
from .destination import check_destination as check_file
from .destination import check_room as check_room_here
from .staged_file import Staged
from .staged_folder import StagedFolder
from .staged_folder import check_folder as check_folder_here

if TYPE_CHECKING:  # what has no URL needs none of this
    from .upload.staged_object import StagedObject
    from .upload.staged_prefix import StagedPrefix

__all__ = [
    "check_destination",
    "check_folder",
    "check_room",
    "check_store",
    "is_folder_there",
    "names_in",
    "staged",
    "staged_folder",
]


def staged(
    destination: StrPath, sources: Sequence[Source], *, force: bool
) -> Staged | StagedObject:
    """A file in the making, here or in a store. Raises as these say."""
    if is_url(destination):
        from .upload.staged_object import StagedObject

        return StagedObject(destination, sources, force=force)
    return Staged(destination, sources, force=force)


def staged_folder(
    destination: StrPath, sources: Sequence[Source], *, force: bool
) -> StagedFolder | StagedPrefix:
    """A folder in the making, here or in a store. Raises as these say."""
    if is_url(destination):
        from .upload.staged_prefix import StagedPrefix

        return StagedPrefix(destination, sources, force=force)
    return StagedFolder(destination, sources, force=force)


def check_destination(destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
    """Raises RefusedError if the file must not be written, before anything is."""
    if is_url(destination):
        from .upload.staged_object import check_object

        check_object(str(destination), sources, force=force)
    else:
        check_file(destination, sources, force=force)


def check_folder(destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
    """Raises RefusedError if the folder must not be written, before anything is."""
    if is_url(destination):
        from .upload.staged_prefix import check_prefix

        check_prefix(str(destination), sources, force=force)
    else:
        check_folder_here(destination, sources, force=force)


def check_store(destination: StrPath) -> None:
    """Raises RefusedError if nothing can be written to the store that a URL names."""
    if is_url(destination):
        from .upload.fsspec import check_writable
        from .upload.staged_object import place_to

        check_writable(place_to(str(destination)))


def check_room(
    destination: StrPath, plans: Sequence[Plan], sources: Sequence[Source], besides: int = 0
) -> None:
    """Raises RefusedError where writing would fail for want of room: stores have that."""
    if not is_url(destination):
        check_room_here(destination, plans, sources, besides)


def is_folder_there(destination: StrPath) -> bool:
    """Whether a folder is there already. Raises RefusedError if a store can't tell."""
    if is_url(destination):
        from .upload.staged_object import about, place_to

        return about(place_to(str(destination))) == "directory"
    return os.path.isdir(destination)


def names_in(folder: StrPath) -> list[str]:
    """What is in a folder, however deep, by names relative to it; nothing if there is none."""
    if is_url(folder):
        from .upload.staged_prefix import names_below

        return names_below(str(folder))
    found = list[str]()
    for inside, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(inside, name), folder) for name in names]
    return sorted(found)
