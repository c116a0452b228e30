"""Find the checkpoints in a tree by their content, and the other files in it.

The folder of a model or a trainer is one item, and so is an index with the files that it names, but
not to relocate. If separate checkpoints lie below a model, as in the folder of a training run, each
of these is an item, and so is each file of the model; other files in its folder go with the model.
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
from ..display.phrases import join_names
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
from ..reports.batch.items import Item, LedgerEntry
from ..sources import place_of
from ..sources.place import BLOBS, EntryKind, FolderEntry, folders_above, has_blobs_of_hub
from .selection import ItemFilter
from .trees import tree_at

#: Suffixes of checkpoints: a file with one that is not recognized must be reported.
_NAMED = (".pt", ".pth", ".ckpt", ".safetensors", ".pt2", ".ptl", INDEX)
#: Folders with parts of a checkpoint: universal ones of DeepSpeed, Megatron-LM, torchtune.
_OF_PARTS = re.compile(r"zero|mp_rank_\d+(_\d+)?|recipe_state")
_JSON = ".json"  # name of an index that lists files beside it
_LEFT_OUT = {
    EntryKind.FOLDER_LINK: "is a link to a folder and was not followed",
    EntryKind.BROKEN_LINK: "is a broken link",
    EntryKind.SPECIAL: "is not a regular file",
}
_ITEMS = ("file", "index", "unreadable")
_HEAD_NBYTES = 512


@dataclass
class Discovery:
    """The contents of a tree."""

    items: list[Item] = field(default_factory=list)  #: checkpoints, and files that can't be read
    others: list[Item] = field(default_factory=list)  #: every other file
    #: names among `others` that belong to a model whose folder is not one item
    companions: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  #: entries that are neither, a sentence each
    #: possible checkpoints that were not opened: in another share, or not to be retried
    unopened: list[Item] = field(default_factory=list)


class _Kind(NamedTuple):
    """The kind of a file."""

    kind: str  #: as `Item.kind`
    files: tuple[str, ...] = ()  #: for an index, all its files, with itself last
    format: str = ""  #: as `Item.format`; for other files, what they are


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
        """When a file directly in it was last changed; without such files, a file further below."""
        folders = [self]
        for each in folders:
            if each.files:
                return max(file.mtime for file in each.files)
            folders += each.inside
        return 0.0

    def takes(self, below: _Folder) -> bool:
        """Whether a folder below belongs to it, regardless of its content."""
        if self.format is None or not self.format.takes_folders:
            return False
        beside = (f"{each.name}/".removeprefix(self.named("")) for each in (*self.inside, below))
        return below.name.removeprefix(self.named("")) not in own_folders(beside)

    @property
    def in_parts(self) -> bool:
        """Whether no file in it or below is a separate checkpoint."""
        return self.format is not None and self.format.in_parts


def discover(
    root: str,
    wanted: ItemFilter,
    *,
    whole: bool,
    finished: Callable[[str, str], LedgerEntry | None] = lambda name, stamp: None,
) -> Discovery:
    """Find the `wanted` checkpoints and other files in a tree.

    `finished` returns the entry of a file by its name and stamp if an earlier run has done it; then
    the file is not opened.

    The folder of a model, a trainer or ranks is one item. With `whole`, an index with its files is
    one item too; otherwise, each of these files is one.
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
    if covered:  # folders below a model's folder are parts of it
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
    """Return the other files in and below folders of models that are not items."""
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
    """Whether a tree is just the folder of one training run."""
    named = (each.name for folder in below for each in folder.files)
    takes = root.format is not None and root.format.takes_folders
    return takes and not any(name.endswith(_NAMED) for name in named)


def _folders(root: str, wanted: ItemFilter, found: Discovery) -> list[_Folder]:
    """Yield all folders, each before its subfolders."""
    folders, listing = [_Folder("", root)], tree_at(root).listings()
    blobs = list[str]()  # folders of the Hub's cache
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
            elif entry.kind is EntryKind.BAD_NAME:
                found.notes.append(
                    f"{name!r} has a name that is not valid for a file, and was left out"
                )
            elif entry.kind in (EntryKind.FILE, EntryKind.UNREADABLE):
                folder.files.append(entry)
            elif wanted.includes(name, *folders_above(name)) and wanted.selects(name):
                found.notes.append(f"{name} {_LEFT_OUT[entry.kind]}")
    if blobs:
        found.notes.append(
            f"left out, since snapshots link to what is in it: {join_names(blobs, 1)}"
        )
    return folders


def _without_parts(folders: Iterable[_Folder]) -> list[_Folder]:
    """Yield all folders, except those below a folder that is certainly one checkpoint."""
    kept, gone = list[_Folder](), set[str]()
    for folder in folders:
        if folder.name not in gone:
            kept.append(folder)
        if folder.name in gone or folder.in_parts:
            gone.update(each.name for each in folder.inside)
    return kept


class _Search:
    """Sorts the contents of listed folders, and opens as few files as possible."""

    def __init__(
        self,
        root: str,
        listed: Sequence[_Folder],
        wanted: ItemFilter,
        finished: Callable[[str, str], LedgerEntry | None],
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
        self._look = tree_at(root).prepare_calls(
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
        """Whether a folder is one item, or would be if it was wanted."""
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
        """Whether a folder is one item, unless other items lie below it."""
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
        """Add the contents of a folder that is not an item itself."""
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
        """Return the files of a folder to open: wanted files, and indexes that may name them."""
        chosen = [each for each in folder.files if self._may_be(each, folder.named(each.name))]
        if not chosen or not self._whole:
            return chosen
        names = {each.name for each in chosen}
        return [each for each in folder.files if each.name in names or each.name.endswith(_JSON)]

    def _may_be(self, file: FolderEntry, name: str) -> bool:
        """Whether a file may be wanted, judged without its content."""
        wanted = self._wanted
        if not wanted.includes(name) or not wanted.selects(name):
            return False
        fits = wanted.fits(file.nbytes, file.mtime)
        return fits or (self._whole and name.endswith(_JSON))  # decided with its files

    def _kind(self, file: FolderEntry) -> _Kind:
        if file.path in self._finished:
            return self._finished[file.path]
        return self._look(file.path) if file.kind is EntryKind.FILE else _Kind("unreadable")


def is_item(unopened: Item, wanted: ItemFilter) -> bool:
    """Whether a file that was not opened during the search is an item."""
    if unopened.kind == "folder":
        return True
    kind = _kind_of(unopened.path)
    return kind.kind in _ITEMS and wanted.accepts_format(kind.format)


def _item(name: str, path: str, kind: _Kind) -> Item:
    """Make an item of several files: the files of an index, or all in a folder."""
    tree, files = tree_at(path), kind.files
    stamp = ""
    with contextlib.suppress(InputError):  # the verb will report that
        files = files or tuple(each.path for each in tree.files())
        stamp = tree.stamp_of(files)
    return Item(name, path, kind.kind, files, tree.nbytes_of(files), stamp, format=kind.format)


def item_checkpoint(
    item: Item, *, follow_links: bool = False
) -> AbstractContextManager[Checkpoint]:
    """Open an item, as a context manager; for the folder of a model, with all its files."""
    if item.kind == "folder" and item.format == ModelFolder.name:
        return formats.open_whole_folder(item.path, follow_links=follow_links)
    return formats.open_checkpoint(item.path, follow_links=follow_links)


def checkpoint_files(path: str) -> tuple[str, ...]:
    """Return all files of a checkpoint: of a file, an index, or a folder."""
    if place_of(path).is_folder():
        return tuple(each.path for each in tree_at(path).files())
    return _kind_of(path).files or (path,)


def _kind_of(path: str) -> _Kind:
    """Return the kind of a file, by its content."""
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
    except Exception:  # a bug of ours: it recurs in the verb, where only this file fails
        known = True
    return _Kind("file" if known or named else "other", (), format)


def dedupe_hard_links(items: Iterable[Item], notes: list[str]) -> list[Item]:
    """Keep one name of each file, preferably not a link; add notes about the other names."""
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
