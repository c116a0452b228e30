"""Find the files beside the weights in a model folder, which are copied unchanged."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CorruptError, InputError, RefusedError, UnsupportedError
from ..plans.plan import Copy, Plan
from ..sources import check_link, is_url, open_source
from ..writing.in_place.change import recover_if_interrupted
from ..writing.staged_folder import StagedFolder
from ..writing.verify import Progress

if TYPE_CHECKING:
    from ..writing.upload.staged_prefix import StagedPrefix

_MOST = 100_000  # files, and folders


class Companion(NamedTuple):
    """A file.

    Attributes:
        name: within the folder, with `/` between its parts; it ends in one if it is a folder.
        path: of the file.
        nbytes: its size.
        within: the folder that it may not lead out of, if it is a link.
    """

    name: str
    path: str
    nbytes: int
    within: str | None = None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, in which nothing is."""
        return self.name.endswith("/")

    def copy_into(self, folder: StagedFolder | StagedPrefix, progress: Progress | None) -> None:
        """Write a copy of it, and verify that.

        Raises:
            CorruptError: it is not what it was.
            RefusedError, WriteError: as `execute.PlanFile.write`.
        """
        if self.is_folder:
            folder.make(self.name.rstrip("/"))
            return
        with open_source(self.path) as source, folder.file(self.name, [source]) as file:
            if self.within is not None:
                check_link(self.path, self.within, source)
            if source.nbytes != self.nbytes:
                raise CorruptError("the file was changed while it was read", path=self.path)
            copies = (Copy(0, self.nbytes, 0),) if self.nbytes else ()
            file.write(Plan("clone", self.nbytes, copies, ()), progress)


def companions_of(
    folder: str, weights: Collection[str], warnings: list[str], *, follow_links: bool = False
) -> list[Companion]:
    """Everything in a folder but the weights, however deep.

    Links to files are followed, links to folders are not. Changes in place that were interrupted
    are undone first.

    Args:
        folder: the folder.
        weights: names of files in it that are left out.
        warnings: what the user should know is added to these.
        follow_links: whether links to files may lead out of the folder.

    Raises:
        InputError: something can't be read.
        UnsupportedError: something is no file, or a link that leads out of the folder.
        RefusedError: there is too much.
    """
    if is_url(folder):
        return _in_store(folder, weights)
    found, todo = list[Companion](), [""]
    while todo:
        inside = todo.pop()
        names = _settled(folder, inside, warnings)
        if inside and not names:
            found.append(Companion(inside, os.path.join(folder, inside), 0))
        for name in names:
            if not inside and name in weights:
                continue
            within = inside + name
            path = os.path.join(folder, within)
            about = _about(path)
            if stat.S_ISDIR(about.st_mode) and os.path.islink(path):
                warnings.append(f"{within} is a link to a folder and was not followed")
            elif stat.S_ISDIR(about.st_mode):
                todo.append(f"{within}/")
            elif stat.S_ISREG(about.st_mode):
                if not follow_links:
                    check_link(path, folder)
                stays = None if follow_links else folder
                found.append(Companion(within, path, about.st_size, stays))
            else:
                raise UnsupportedError("is no file, and can't be copied", path=path)
            if len(found) + len(todo) > _MOST:
                raise RefusedError(f"there are more than {_MOST:,} files in it", path=folder)
    return sorted(found)


def _in_store(folder: str, weights: Collection[str]) -> list[Companion]:
    from ..sources.listing import tree

    found = [
        Companion(each.name, each.path, each.nbytes)
        for each in tree(folder)
        if each.name not in weights
    ]
    if len(found) > _MOST:
        raise RefusedError(f"there are more than {_MOST:,} files in it", path=folder)
    return found


def _settled(folder: str, inside: str, warnings: list[str]) -> list[str]:
    """The names in a folder, once no journal is among them."""
    path = os.path.join(folder, inside)
    for name in _names(path):
        for note in recover_if_interrupted(os.path.join(path, name)):
            warnings.append(f"{inside}{name}: {note}")
    return _names(path)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"can't be read: {error.strerror}", path=folder) from error


def _about(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise InputError(f"can't be read: {error.strerror}", path=path) from error


def _where(folder: str) -> str:
    """Where a folder is, however it was named, with a slash at its end."""
    if not is_url(folder):
        return os.path.join(os.path.realpath(folder), "")
    from ..sources.filesystem import place_of  # what has no URL needs none of this

    place = place_of(folder)
    return f"{place.fs.protocol}:{place.path.strip('/')}/"


def check_apart(source: str, destination: str) -> None:
    """Raises RefusedError if one of two folders is, or lies in, the other."""
    ours, theirs = (_where(each) for each in (source, destination))
    if ours == theirs:
        raise RefusedError("the destination is the source itself", path=destination)
    if theirs.startswith(ours):
        raise RefusedError("the destination is inside the source", path=destination)
    if ours.startswith(theirs):
        raise RefusedError("the source is inside the destination", path=destination)
