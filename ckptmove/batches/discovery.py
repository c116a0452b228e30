"""Find the checkpoints in a tree by their content, and the other files in it.

A model folder is one item, and so is an index with the files that it names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .. import formats
from ..errors import InputError, UnsupportedError
from ..reports.batch_items import Item
from ..sources import place_of
from ..sources.place import EntryKind, FolderEntry
from .selection import ItemFilter
from .trees import tree_at

#: What is so called should be a checkpoint: if it can't be told to be one, that has to be said.
_NAMED = (".pt", ".pth", ".ckpt", ".safetensors", ".pt2", ".ptl", ".index.json")
_HEAD_NBYTES = 512
_Kind = tuple[str, tuple[str, ...]]


@dataclass
class Discovery:
    """What is in a tree."""

    items: list[Item] = field(default_factory=list)  #: checkpoints, and what can't be read
    others: list[Item] = field(default_factory=list)  #: every other file
    notes: list[str] = field(default_factory=list)  #: what is in it and is neither, a sentence each


@dataclass
class _Folder:
    """A directory that was listed."""

    name: str
    path: str
    above: int
    files: list[FolderEntry] = field(default_factory=list)
    holds: bool = False  # whether items are in it, or below

    def named(self, name: str) -> str:
        """The name in the tree of an entry of this folder."""
        return f"{self.name}/{name}" if self.name else name


def discover(root: str, wanted: ItemFilter, *, whole: bool) -> Discovery:
    """Find what is `wanted` in a tree: checkpoints, and other files.

    `whole`: a model folder, or an index with its files, is one item; if not, each file is one.
    """
    found = Discovery()
    folders = _folders(root, wanted, found)
    kind_of = tree_at(root).prepared(
        _kind_of, [each.path for folder in folders for each in folder.files]
    )
    for folder in reversed(folders):  # those within come before those that they are in
        format = formats.folder_format(folder.path, [each.name for each in folder.files])
        in_parts = format is not None and format.in_parts
        if in_parts and not folder.name:
            raise UnsupportedError(
                "is one checkpoint, not a tree of them",
                path=root,
                hint="run it without batch",
            )
        if in_parts and not whole:
            found.notes.append(
                f"{folder.name} is one checkpoint in many files, which are treated one by one"
            )
        if format is not None and whole and folder.name and (in_parts or not folder.holds):
            names = [each.name for each in folder.files]
            folder.holds = True
            if in_parts:  # and so is what is below it
                found.items = [each for each in found.items if folder.name not in _above(each.name)]
            if wanted.includes(folder.name, *map(folder.named, names)):
                found.items.append(_item(folder.name, folder.path, "folder"))
        else:
            _look_into(folder, wanted, found, kind_of, whole=whole)
        if folder.holds and folder.above >= 0:
            folders[folder.above].holds = True
    covered = {each.name for each in found.items if each.kind == "folder"}
    if covered:  # what is in folders below a model's is a part of it
        found.others = [each for each in found.others if covered.isdisjoint(_above(each.name))]
    found.items.sort()
    found.others.sort()
    return found


def _above(name: str) -> Iterable[str]:
    """The folders that it is in."""
    while name := name.rpartition("/")[0]:
        yield name


def _folders(root: str, wanted: ItemFilter, found: Discovery) -> list[_Folder]:
    """All folders, each before those in it."""
    folders, listing = [_Folder("", root, -1)], tree_at(root).listings()
    for n, folder in enumerate(folders):
        try:
            entries = listing(folder.path)
        except InputError:
            if not folder.name:
                raise
            if wanted.may_include_in(folder.name):
                found.items.append(Item(folder.name, folder.path, "unreadable", (), 0))
            continue
        for entry in entries:
            name = folder.named(entry.name)
            if wanted.excludes(name):
                continue
            if entry.kind is EntryKind.FOLDER:
                folders.append(_Folder(name, entry.path, n))
            elif entry.kind is EntryKind.FOLDER_LINK:
                found.notes.append(f"{name} is a link to a folder and was not followed")
            elif entry.kind is EntryKind.BAD_NAME:
                found.notes.append(
                    f"{name!r} has a name that is not valid for a file, and was left out"
                )
            elif entry.kind in (EntryKind.FILE, EntryKind.UNREADABLE):
                folder.files.append(entry)
            else:
                found.notes.append(f"{name} is not a regular file, or is a broken link")
    return folders


def _look_into(
    folder: _Folder,
    wanted: ItemFilter,
    found: Discovery,
    kind_of: Callable[[str], _Kind],
    *,
    whole: bool,
) -> None:
    """Tell the files in a folder apart."""
    items, others = list[Item](), list[Item]()
    parts: set[str] = set()
    for each in folder.files:
        name = folder.named(each.name)
        kind, files = kind_of(each.path) if each.kind is EntryKind.FILE else ("unreadable", ())
        if kind == "index" and whole:
            items.append(_item(name, each.path, kind, files))
            parts.update(files[:-1])
        else:
            to = others if kind in ("index", "other") else items
            to.append(Item(name, each.path, kind, (), each.nbytes, each.stamp))
    items = [each for each in items if each.path not in parts]
    folder.holds = folder.holds or bool(items)
    found.items += [each for each in items if wanted.includes(each.name)]
    found.others += [each for each in others if wanted.includes(each.name)]


def _item(name: str, path: str, kind: str, files: Iterable[str] = ()) -> Item:
    """An item of several files: those given, or all in a folder."""
    tree = tree_at(path)
    try:
        files = tuple(files or (each.path for each in tree.files()))
        return Item(name, path, kind, files, tree.nbytes_of(files), tree.stamp_of(files))
    except InputError:  # the verb will say so
        return Item(name, path, kind, tuple(files), tree.nbytes_of(files))


def checkpoint_files(path: str) -> tuple[str, ...]:
    """All files of a checkpoint, be it a file, an index, or a folder."""
    if place_of(path).is_folder():
        return tuple(each.path for each in tree_at(path).files())
    return _kind_of(path)[1] or (path,)


def _kind_of(path: str) -> _Kind:
    """The kind of a file, as `Item.kind`; for an index also its files, itself the last."""
    named, head = path.endswith(_NAMED), b""
    try:
        with place_of(path).open() as source:
            head = source.read(0, min(source.nbytes, _HEAD_NBYTES))
            found = formats.sniffed(source)
        if found is not None and found.files:
            folder = place_of(path).parent
            return "index", (*(folder.child(each).path for each in found.files), path)
        known = found is not None
    except UnsupportedError:
        known = False
    except InputError as error:
        if isinstance(error.__cause__, OSError):
            return "unreadable", ()
        known = b"data.pkl" in head
    except Exception:  # a fault of ours: the verb will meet it, and only this file fail
        known = True
    return ("file" if known or named else "other"), ()


def dedupe_hard_links(items: Iterable[Item], notes: list[str]) -> list[Item]:
    """Keep one name of each file, preferably no link; `notes` tells of the others."""
    found: dict[tuple[int, int], Item] = {}
    rest = list[Item]()
    for item in sorted(items, key=lambda item: (os.path.islink(item.path), item.name)):
        try:
            about = os.stat(item.path)
        except OSError:
            rest.append(item)
            continue
        first = found.setdefault((about.st_dev, about.st_ino), item)
        if first is not item:
            notes.append(f"{item.name} is the same file as {first.name} and changes with it")
    return sorted([*found.values(), *rest])
