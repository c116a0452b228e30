"""Find the checkpoints in a tree by their content, and the other files in it.

The folder of a model or a trainer is one item, and so is an index with the files that it names, but
not to relocate. Where there are checkpoints of their own below a model, as in the folder of a run,
each of these is an item, and so is each file of the model; what else is in its folder goes with it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .. import formats
from ..errors import InputError, UnsupportedError
from ..formats.base import Format
from ..formats.checkpoint import Checkpoint
from ..formats.distributed.deepspeed.folder import BESIDE, DeepSpeed
from ..formats.distributed.deepspeed.universal import Universal
from ..formats.folders.model_folder import ModelFolder
from ..formats.folders.run_folders import own_folders
from ..formats.folders.weight_names import INDEX
from ..formats.pickle import PROTO, PlainPickle
from ..formats.unread_formats import kind_of_weights
from ..reports.batch.items import Entry, Item
from ..reports.display.phrases import join_names
from ..sources import place_of
from ..sources.place import BLOBS, EntryKind, FolderEntry, folders_above, has_blobs_of_hub
from .selection import ItemFilter
from .trees import tree_at

#: What is so called should be a checkpoint: if it can't be told to be one, that has to be said.
_NAMED = (".pt", ".pth", ".ckpt", ".safetensors", ".pt2", ".ptl", INDEX)
#: Folders in which parts of a checkpoint are: universal ones of DeepSpeed, Megatron-LM, torchtune.
_OF_PARTS = re.compile(r"zero|mp_rank_\d+(_\d+)?|recipe_state")
_JSON = ".json"  # how an index is called that names others of the files beside it
_ITEMS = ("file", "index", "unreadable")
_HEAD_NBYTES = 512


@dataclass
class Discovery:
    """What is in a tree."""

    items: list[Item] = field(default_factory=list)  #: checkpoints, and what can't be read
    others: list[Item] = field(default_factory=list)  #: every other file
    #: names of those among them that belong to a model that is no item as a whole
    companions: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  #: what is in it and is neither, a sentence each
    #: what may be checkpoints, and was not opened: they are in another share, or not to be retried
    unopened: list[Item] = field(default_factory=list)


class _Kind(NamedTuple):
    """What a file is."""

    kind: str  #: as `Item.kind`
    files: tuple[str, ...] = ()  #: of an index, all its files, itself the last
    format: str = ""  #: as `Item.format`; of what is no checkpoint, what else it is


@dataclass
class _Folder:
    """A directory that was listed."""

    name: str
    path: str
    files: list[FolderEntry] = field(default_factory=list)
    inside: list[_Folder] = field(default_factory=list)

    def named(self, name: str) -> str:
        """The name in the tree of an entry of this folder."""
        return f"{self.name}/{name}" if self.name else name

    @cached_property
    def format(self) -> Format | None:
        """The format of the folder, if its files make it one checkpoint."""
        parts = (
            FolderEntry(name, below.path, EntryKind.FOLDER)
            for below in self.inside
            if _OF_PARTS.fullmatch(name := below.name.rpartition("/")[2])
        )
        return formats.folder_format(self.path, [*self.files, *parts])

    @property
    def mtime(self) -> float:
        """When a file right in it was last changed; if there is none, one further below."""
        folders = [self]
        for each in folders:
            if each.files:
                return max(file.mtime for file in each.files)
            folders += each.inside
        return 0.0

    def takes(self, below: _Folder) -> bool:
        """Whether a folder below it belongs to it, whatever is in that."""
        if self.format is None or not self.format.takes_folders:
            return False
        beside = (f"{each.name}/".removeprefix(self.named("")) for each in (*self.inside, below))
        return below.name.removeprefix(self.named("")) not in own_folders(beside)

    @property
    def in_parts(self) -> bool:
        """Whether none of the files in it, and below, is a checkpoint of its own."""
        return self.format is not None and self.format.in_parts


def discover(
    root: str,
    wanted: ItemFilter,
    *,
    whole: bool,
    finished: Callable[[str, str], Entry | None] = lambda name, stamp: None,
) -> Discovery:
    """Find what is `wanted` in a tree: checkpoints, and other files.

    `finished` gives the entry of a file by its name and stamp, if an earlier run has done it; then
    it is not opened.

    The folder of a model, a trainer or ranks is one item. `whole`: so is an index with its files;
    if not, each of these is one.
    """
    found = Discovery()
    listed = _folders(root, wanted, found)
    if listed[0].in_parts or _is_all_of(listed[0], listed[1:]):
        raise UnsupportedError(
            "is one checkpoint, not a tree of them", path=root, hint="run it without batch"
        )
    listed = _without_parts(listed)
    search = _Search(root, listed, wanted, finished, whole=whole)
    covered, whole_below, divided = set[str](), set[str](), set[str]()
    for folder in listed:
        if not whole_below.isdisjoint(folders_above(folder.name)):
            continue
        if not search.is_one(folder):
            search.look_into(folder, found)
            if folder.format is not None and not folder.in_parts:
                divided.add(folder.name)
            continue
        if folder.format is not None and folder.format.takes_folders:
            whole_below.add(folder.name)
        if wanted.includes(folder.name, *(folder.named(each.name) for each in folder.files)):
            covered.add(folder.name)
            search.add_folder(folder, found)
    if covered:  # what is in folders below a model's is a part of it
        found.others = [
            each for each in found.others if covered.isdisjoint(folders_above(each.name))
        ]
    found.items.sort()
    found.others.sort()
    for what in sorted({each.format for each in found.others if each.kind == "other"} - {""}):
        names = [each.name for each in found.others if each.format == what]
        found.notes.append(f"left out, since each {what}: {join_names(names)}")
    found.companions = set(_companions(found, divided))
    if not whole:  # what tells of the folders of DeepSpeed beside them stays true
        found.companions.update(
            "".join((*each.name.rpartition("/")[:2], beside))
            for each in found.items
            if each.format in (DeepSpeed.name, Universal.name)
            for beside in BESIDE
        )
    return found


def _companions(found: Discovery, divided: Collection[str]) -> Iterator[str]:
    """The other files in folders of models that are no items, and below, apart from items."""
    apart = {each.name for each in found.items}
    apart.update(above for each in found.items for above in folders_above(each.name))
    for each in found.others:
        for folder in (*folders_above(each.name), ""):
            if folder in divided:
                yield each.name
                break
            if folder in apart:
                break


def _is_all_of(root: _Folder, below: Sequence[_Folder]) -> bool:
    """Whether a tree is nothing but the folder of one training."""
    named = (each.name for folder in below for each in folder.files)
    takes = root.format is not None and root.format.takes_folders
    return takes and not any(name.endswith(_NAMED) for name in named)


def _folders(root: str, wanted: ItemFilter, found: Discovery) -> list[_Folder]:
    """All folders, each before those in it."""
    folders, listing = [_Folder("", root)], tree_at(root).listings()
    blobs = list[str]()  # folders of the cache of the Hub
    for folder in folders:
        try:
            entries = listing(folder.path)
        except InputError:
            if not folder.name:
                raise
            if wanted.may_include_in(folder.name):
                found.items.append(Item(folder.name, folder.path, "unreadable", (), 0))
            continue
        has_blobs = has_blobs_of_hub(folder.path, [entry.name for entry in entries])
        for entry in entries:
            name = folder.named(entry.name)
            if wanted.excludes(name):
                continue
            if has_blobs and entry.name == BLOBS:
                blobs.append(name)
                continue
            if entry.kind is EntryKind.FOLDER:
                folder.inside.append(_Folder(name, entry.path))
                folders.append(folder.inside[-1])
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
    if blobs:
        found.notes.append(
            f"left out, since snapshots link to what is in it: {join_names(blobs, 1)}"
        )
    return folders


def _without_parts(folders: Iterable[_Folder]) -> list[_Folder]:
    """All folders but those below one that is a single checkpoint whatever is in it."""
    kept, gone = list[_Folder](), set[str]()
    for folder in folders:
        if folder.name not in gone:
            kept.append(folder)
        if folder.name in gone or folder.in_parts:
            gone.update(each.name for each in folder.inside)
    return kept


class _Search:
    """Tells what is in listed folders apart, and opens no more files than it must."""

    def __init__(
        self,
        root: str,
        listed: Sequence[_Folder],
        wanted: ItemFilter,
        finished: Callable[[str, str], Entry | None],
        *,
        whole: bool,
    ) -> None:
        self._wanted, self._whole = wanted, whole
        self._finished = dict[str, _Kind]()
        for folder in listed:
            for each in folder.files:
                entry = finished(folder.named(each.name), each.stamp)
                if entry is not None and entry.kind in ("file", "other"):
                    self._finished[each.path] = _Kind(entry.kind, (), entry.format)
        self._look = tree_at(root).prepared(
            _kind_of,
            [
                each.path
                for folder in listed
                if not self._may_be_one(folder)
                for each in self._to_open(folder)
                if each.kind is EntryKind.FILE and each.path not in self._finished
            ],
        )

    def is_one(self, folder: _Folder) -> bool:
        """Whether a folder is one item, or would be one if it was wanted."""
        if not self._may_be_one(folder):
            return False
        todo = [] if folder.in_parts else [*folder.inside]
        while todo:
            below = todo.pop()
            if folder.takes(below):
                todo += below.inside
                continue
            if below.format is not None or any(
                self._kind(each).kind in _ITEMS for each in below.files
            ):
                return False
            todo += below.inside
        return True

    def _may_be_one(self, folder: _Folder) -> bool:
        """Whether a folder is one item, unless there are others below it."""
        return bool(folder.name) and folder.format is not None

    def add_folder(self, folder: _Folder, found: Discovery) -> None:
        """Add a folder that is one item."""
        if not self._wanted.selects(folder.name):
            found.unopened.append(Item(folder.name, folder.path, "folder", (), 0))
            return
        format = "" if folder.format is None else folder.format.name
        if self._wanted.accepts_format(format):
            item = _item(folder.name, folder.path, _Kind("folder", (), format))
            if self._wanted.fits(item.nbytes, folder.mtime):
                found.items.append(item)

    def look_into(self, folder: _Folder, found: Discovery) -> None:
        """Add what is in a folder that is no item itself."""
        opened, wanted = self._to_open(folder), self._wanted
        parts = set[str]()
        if self._whole:
            for each in opened:
                parts.update(self._kind(each).files[:-1])
        mtimes = {each.path: each.mtime for each in folder.files}
        for each in folder.files:
            name = folder.named(each.name)
            if each.path in parts or not wanted.includes(name):
                continue
            fits = wanted.fits(each.nbytes, each.mtime)
            item = Item(name, each.path, "file", (), each.nbytes, each.stamp)
            if not wanted.selects(name):
                found.unopened += [item] if fits else []
            elif self._may_be(each, name):
                kind = self._kind(each)
                item = item._replace(kind=kind.kind, format=kind.format)
                if kind.kind == "index" and self._whole:
                    item = _item(name, each.path, kind)
                    newest = max(mtimes.get(path, 0.0) for path in kind.files)
                    fits = wanted.fits(item.nbytes, newest)
                elif kind.kind in ("index", "other"):
                    found.others += [item] if fits else []
                    continue
                if fits and wanted.accepts_format(kind.format):
                    found.items.append(item)

    def _to_open(self, folder: _Folder) -> list[FolderEntry]:
        """The files of a folder that have to be opened: those wanted, and what may name these."""
        chosen = [each for each in folder.files if self._may_be(each, folder.named(each.name))]
        if not chosen or not self._whole:
            return chosen
        names = {each.name for each in chosen}
        return [each for each in folder.files if each.name in names or each.name.endswith(_JSON)]

    def _may_be(self, file: FolderEntry, name: str) -> bool:
        """Whether a file is wanted, unless its content says otherwise."""
        wanted = self._wanted
        if not wanted.includes(name) or not wanted.selects(name):
            return False
        fits = wanted.fits(file.nbytes, file.mtime)
        return fits or (self._whole and name.endswith(_JSON))  # that counts with its files

    def _kind(self, file: FolderEntry) -> _Kind:
        if file.path in self._finished:
            return self._finished[file.path]
        return self._look(file.path) if file.kind is EntryKind.FILE else _Kind("unreadable")


def is_item(unopened: Item, wanted: ItemFilter) -> bool:
    """Whether what was not opened when the tree was searched is an item, as the others are."""
    if unopened.kind == "folder":
        return True
    kind = _kind_of(unopened.path)
    return kind.kind in _ITEMS and wanted.accepts_format(kind.format)


def _item(name: str, path: str, kind: _Kind) -> Item:
    """An item of several files: those of its kind, or all in a folder."""
    tree, files = tree_at(path), kind.files
    stamp = ""
    with contextlib.suppress(InputError):  # the verb will say so
        files = files or tuple(each.path for each in tree.files())
        stamp = tree.stamp_of(files)
    return Item(name, path, kind.kind, files, tree.nbytes_of(files), stamp, format=kind.format)


def item_checkpoint(
    item: Item, *, follow_links: bool = False
) -> AbstractContextManager[Checkpoint]:
    """Open an item, as a context manager; of the folder of a model all that is in it."""
    if item.kind == "folder" and item.format == ModelFolder.name:
        return formats.open_whole_folder(item.path, follow_links=follow_links)
    return formats.open_checkpoint(item.path, follow_links=follow_links)


def checkpoint_files(path: str) -> tuple[str, ...]:
    """All files of a checkpoint, be it a file, an index, or a folder."""
    if place_of(path).is_folder():
        return tuple(each.path for each in tree_at(path).files())
    return _kind_of(path).files or (path,)


def _kind_of(path: str) -> _Kind:
    """What a file is, by its content."""
    named, head, format = path.endswith(_NAMED), b"", ""
    try:
        with place_of(path).open() as source:
            head = source.read(0, min(source.nbytes, _HEAD_NBYTES))
            found = formats.sniff_format(source)
        unread = "" if named else kind_of_weights(head)
        format = unread if found is None else found.format.name
        if found is not None and found.files:
            folder = place_of(path).parent
            files = (*(folder.child(each).path for each in found.files), path)
            return _Kind("index", files, format)
        known = found is not None
    except UnsupportedError:
        known = False
    except InputError as error:
        if isinstance(error.__cause__, OSError):
            return _Kind("unreadable")
        known = b"data.pkl" in head or (path.endswith(PlainPickle.suffixes) and head[:1] == PROTO)
    except Exception:  # a fault of ours: the verb will meet it, and only this file fail
        known = True
    return _Kind("file" if known or named else "other", (), format)


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
