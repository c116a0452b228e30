"""The checkpoints in a tree, by their content, and what else is in it.

A folder of a model is one item, and so are an index and the files that it names. Links to files are
followed, links to folders are not. What ckptmove itself leaves beside files while it is at work is
no part of the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .. import formats
from ..destination import HIDDEN
from ..errors import InputError, UnsupportedError
from ..formats.model_folder import has_weights
from ..formats.shard_index import is_json, read_index
from ..journal import SUFFIX, UNFINISHED
from ..source import Source
from .items import Item
from .ledger import LEDGER

#: What is so called should be a checkpoint: if it can't be told to be one, that has to be said.
_NAMED = (".pt", ".pth", ".ckpt", ".safetensors", ".pt2", ".ptl", ".index.json")
_HEAD_NBYTES = 512
_OURS = (HIDDEN, SUFFIX, SUFFIX + UNFINISHED)


@dataclass
class Found:
    """What is in a tree.

    Attributes:
        items: checkpoints, and what can't be read.
        others: every other file.
        notes: what is in it and is neither, a sentence each.
    """

    items: list[Item] = field(default_factory=list)
    others: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Folder:
    """A directory that was listed."""

    name: str
    path: str
    above: int
    files: list[str] = field(default_factory=list)
    holds: bool = False  # whether items are in it, or below


class Wanted:
    """Which names in a tree are wanted."""

    def __init__(self, include: Iterable[str], exclude: Iterable[str]) -> None:
        """Args:
        include: globs, of which one must match; without any, all do.
        exclude: globs, of which none may.
        """
        self._include, self._exclude = tuple(include), tuple(exclude)

    def excludes(self, name: str) -> bool:
        """Whether a file is excluded, or a folder with all that is in it."""
        return _matches(name, self._exclude)

    def includes(self, *names: str) -> bool:
        """Whether what goes by any of these names is included."""
        return not self._include or any(_matches(name, self._include) for name in names)


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a glob matches the name; one without a slash may match its last part."""
    last = name.rpartition("/")[2]
    return any(
        fnmatchcase(name, glob) or ("/" not in glob and fnmatchcase(last, glob)) for glob in globs
    )


def find(root: str, wanted: Wanted, *, whole: bool) -> Found:
    """Look through a tree.

    Args:
        root: its folder.
        wanted: what of it.
        whole: whether a folder of a model, or an index with its files, is one item; if not, each
            file is one, and an index is another file.

    Raises:
        InputError: the root can't be read.
    """
    found = Found()
    folders = _listed(root, wanted, found)
    for folder in reversed(folders):  # those within come before those that they are in
        inside = f"{folder.name}/" if folder.name else ""
        if whole and folder.name and not folder.holds and has_weights(folder.files):
            names = [f"{inside}{each}" for each in folder.files]
            folder.holds = True
            if wanted.includes(folder.name, *names):
                found.items.append(_folder_item(folder.name, folder.path))
        else:
            _look_into(folder, wanted, found, whole=whole)
        if folder.holds and folder.above >= 0:
            folders[folder.above].holds = True
    covered = tuple(f"{each.name}/" for each in found.items if each.kind == "folder")
    if covered:  # what is in folders below a model's is a part of it
        found.others = [each for each in found.others if not each.name.startswith(covered)]
    found.items.sort()
    found.others.sort()
    return found


def _listed(root: str, wanted: Wanted, found: Found) -> list[_Folder]:
    """All folders, each before those in it."""
    folders = [_Folder("", root, -1)]
    for n, folder in enumerate(folders):
        try:
            with os.scandir(folder.path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if not folder.name:
                raise InputError(f"can't be read: {error.strerror}", path=root) from error
            found.items.append(Item(folder.name, folder.path, "unreadable", (), 0))
            continue
        for entry in entries:
            name = f"{folder.name}/{entry.name}" if folder.name else entry.name
            if _is_ours(entry.name) or wanted.excludes(name):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(_Folder(name, entry.path, n))
            elif entry.is_dir():
                found.notes.append(f"{name} is a link to a folder, and was not followed")
            elif entry.is_file():
                folder.files.append(entry.name)
            else:
                found.notes.append(f"{name} is no file, or a link that leads nowhere")
    return folders


def _is_ours(name: str) -> bool:
    return name == LEDGER or (name.startswith(".") and name.endswith(_OURS))


def _folder_item(name: str, path: str) -> Item:
    """A folder of a model, with all that is in it, as `convert` takes it."""
    files = []
    for folder, folders, names in os.walk(path, followlinks=True):
        folders.sort()
        files += [os.path.join(folder, each) for each in sorted(names) if not _is_ours(each)]
        if len(files) > 100_000:  # a link that leads up; the verb will say so
            break
    return Item(name, path, "folder", tuple(files), sum(_nbytes(each) for each in files))


def _look_into(folder: _Folder, wanted: Wanted, found: Found, *, whole: bool) -> None:
    """Tell the files in a folder apart."""
    items, others = list[Item](), list[Item]()
    parts: set[str] = set()
    for each in folder.files:
        name = f"{folder.name}/{each}" if folder.name else each
        path = os.path.join(folder.path, each)
        kind, files = _kind_of(path)
        nbytes = sum(map(_nbytes, files)) if kind == "index" and whole else _nbytes(path)
        if (kind == "index" and not whole) or kind == "other":
            others.append(Item(name, path, kind, (), nbytes))
        else:
            items.append(Item(name, path, kind, files, nbytes))
            parts.update(files[:-1])
    items = [each for each in items if each.path not in parts]
    folder.holds = folder.holds or bool(items)
    found.items += [each for each in items if wanted.includes(each.name)]
    found.others += [each for each in others if wanted.includes(each.name)]


def _kind_of(path: str) -> tuple[str, tuple[str, ...]]:
    """What a file is, as `Item.kind` has it; of an index also its files, itself the last."""
    named = path.endswith(_NAMED)
    try:
        source = Source.open(path)
    except InputError:
        return "unreadable", ()
    with source:
        head = source.read(0, min(source.nbytes, _HEAD_NBYTES))
        try:
            if is_json(head):
                names = read_index(source).files
                folder = os.path.dirname(path)
                return "index", (*(os.path.join(folder, each) for each in names), path)
            known = bool(head) and formats.sniffed(source) is not None
        except UnsupportedError:
            known = False
        except InputError:
            known = named or b"data.pkl" in head
    return ("file" if known or named else "other"), ()


def _nbytes(path: str) -> int:
    try:
        about = os.stat(path)
    except OSError:
        return 0
    return about.st_size if stat.S_ISREG(about.st_mode) else 0
