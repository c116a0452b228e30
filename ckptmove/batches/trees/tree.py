"""Trees: where a batch finds items and writes outputs. Folders here and in stores are alike.

`local_tree` and `remote_tree` implement the interface, and `ledger` and `object_ledger` that of the
ledger. Links to files are followed, links to folders are not. Temporary files of ckptmove itself
are not part of a tree.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from ...errors import InputError
from ...reports.batch.items import Entry, Item
from ...sources import Place, place_of
from ...sources.place import EntryKind, FolderEntry
from ...writing.final_name import HIDDEN
from ...writing.in_place.journal import SUFFIX, UNFINISHED

_T = TypeVar("_T")
_R = TypeVar("_R")
LEDGER = ".ckptmove-batch.jsonl"  # the name of the ledger
OBJECT_LEDGER = ".ckptmove-batch"  # that of the folder which is in its place in a store
_OWN = (HIDDEN, SUFFIX, SUFFIX + UNFINISHED)


class Ledger(Protocol):
    """The record of finished items, in the destination of a batch."""

    path: str  #: of the file, or of the folder of objects
    #: Whether all machines that see the path see the same ledger.
    is_shared: ClassVar[bool]

    @property
    def nbytes(self) -> int:
        """How many bytes of it were read."""

    def entry(self, name: str) -> Entry | None:
        """The entry of an item as it is now; None if there is none."""

    def entries_of(self, names: Iterable[str]) -> dict[str, Entry]:
        """Likewise of several items, without those that have none."""

    def every(self) -> list[Entry]:
        """The entries of all items that it knows."""

    def add(self, *entries: Entry, synced: bool = False) -> None:
        """Add entries, by one write or one request; if `synced`, they are on disk then."""

    def lock(
        self, names: Iterable[str], *, patient: bool
    ) -> contextlib.AbstractContextManager[list[str]]:
        """The locks on items; gives those that are held: all, or if we are not `patient`, those
        that no other run has."""


class Output(NamedTuple):
    """An output as the ledger records it."""

    nbytes: int  #: of all files together
    stamp: str  #: changes with any file of it, or when it is moved; says nothing of the content
    crc32: int = 0  #: of its bytes, and of a folder's names; 0 where it was not asked for
    #: from the name of each file within, empty for the file itself, to its SHA-256, if asked for
    digests: Mapping[str, str] = {}


class Tree(ABC):
    """A tree, a folder in it, or a file in it."""

    def __init__(self, path: str) -> None:
        self.path = path  #: a path, or a URL
        self.place: Place = place_of(path)

    # -- reading -------------------------------------------------------------------------------

    @abstractmethod
    def map_items(self, call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
        """Call a function for each, in order; where answers take long, several at once."""

    @abstractmethod
    def prepared(self, call: Callable[[str], _R], paths: Iterable[str]) -> Callable[[str], _R]:
        """The same function, called once a path; it may have been called already for these."""

    @abstractmethod
    def remember(self) -> None:
        """Look at all that is below at once, where something is remembered and that is cheaper."""

    @abstractmethod
    def listings(self) -> Callable[[str], list[FolderEntry]]:
        """A function that lists a folder of the tree, sorted. It raises InputError."""

    @abstractmethod
    def files(self) -> list[FolderEntry]:
        """The file itself, without a name, or all files in the folder and below, sorted."""

    @abstractmethod
    def sums(
        self, files: Sequence[FolderEntry], *, digests: bool, known: Mapping[str, int]
    ) -> tuple[int, dict[str, str]]:
        """A sum over all `files`, and over their names; 0 where the stamp changes with the bytes.

        Files with a `known` CRC-32, by their stamps, are not read for it. With it come their
        `digests`, as `Output` has them, if they are wanted and the files are read.
        """

    @abstractmethod
    def copied_nbytes(self, nbytes: int) -> int:
        """The least that a copy of a file of this size takes, without its holes."""

    def stamp_of(self, files: Sequence[str]) -> str:
        """A text that changes if one of these files changes. Raises InputError if one is gone."""
        stamps = self.map_items(lambda path: place_of(path).size_and_stamp()[1], files)
        return self._one_stamp(zip(files, stamps, strict=True))

    def nbytes_of(self, files: Iterable[str]) -> int:
        """The size of files together, without those that can't be found."""
        return sum(self.map_items(lambda path: place_of(path).nbytes(), files))

    def output(
        self, *, summed: bool, digests: bool = False, known: Mapping[str, int] | None = None
    ) -> Output:
        """The file or folder that is there; its CRC-32 is computed if `summed`, as `sums` does."""
        files = self.files()
        if any(each.kind is not EntryKind.FILE for each in files):
            raise InputError("can't be read: not all in it are files", path=self.path)
        stamp = self._one_stamp((each.path, each.stamp) for each in files)
        nbytes = sum(each.nbytes for each in files)
        return Output(
            nbytes, stamp, *(self.sums(files, digests=digests, known=known or {}) if summed else ())
        )

    def _one_stamp(self, stamps: Iterable[tuple[str, str]]) -> str:
        """One stamp of those of files, with their paths."""
        stamps = list(stamps)
        if len(stamps) == 1:
            return stamps[0][1]
        lines = [f"{path[len(self.path) :]}:{stamp}" for path, stamp in stamps]
        return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:32]

    def sizes(self) -> dict[str, int]:
        """The size of each file, by its name within; -1 of what is none."""
        return {
            each.name: each.nbytes if each.kind is EntryKind.FILE else -1 for each in self.files()
        }

    def same(self, other: Tree) -> bool:
        """Whether two files, or two folders with all that is in them, are equal byte for byte."""
        if self.sizes() != other.sizes():
            return False
        pairs = zip(self.files(), other.files(), strict=True)
        return all(_same_bytes(mine.path, theirs.path) for mine, theirs in pairs)

    def holds(self, data: bytes) -> bool:
        """Whether there is a file with just these bytes. Raises InputError if it can't be read."""
        if self.sizes() != {"": len(data)}:
            return False
        with self.place.open() as source:
            return source.nbytes == len(data) and source.read(0, len(data)) == data

    # -- writing -------------------------------------------------------------------------------

    @abstractmethod
    def check_root(self) -> None:
        """Raises RefusedError if outputs can't be in a folder of this name."""

    @abstractmethod
    def check_name(self) -> None:
        """Raises RefusedError if no file can have this name."""

    @abstractmethod
    def obstacle(self) -> str:
        """Why nothing new can be in this folder, which may have to be made; empty if it can."""

    @abstractmethod
    def free_nbytes(self) -> int | None:
        """The bytes that are free where the folder is, or will be; None if there is no limit."""

    def file_of(self) -> Callable[[str], str]:
        """What gives the same for paths below it that are one file, though they differ."""
        return str

    @abstractmethod
    def is_taken(self) -> bool:
        """Whether something is there that would have to be replaced."""

    @abstractmethod
    def make_folder(self) -> None:
        """Make a folder, unless it is there, and those above it; or raise OSError."""

    @abstractmethod
    def beside(self) -> contextlib.AbstractContextManager[str]:
        """A folder near this path, that is gone at the end; gives the same name within."""

    @abstractmethod
    def remove_leftovers(self, items: Iterable[Item], ledger: str = "") -> list[str]:
        """Remove what killed runs left of items in a folder, but not what others are writing.

        `ledger` is the path of the ledger, if it is not in this folder. Gives what may not be
        removed, a sentence each.
        """

    @abstractmethod
    def open_ledger(self) -> Ledger:
        """The ledger of a tree, as a batch is planned."""


def is_own_name(name: str) -> bool:
    """Whether a name is that of a ledger, a journal or a temporary file of ckptmove."""
    return name in (LEDGER, OBJECT_LEDGER) or (name.startswith(".") and name.endswith(_OWN))


def _same_bytes(one: str, other: str) -> bool:
    with place_of(one).open() as first, place_of(other).open() as second:
        if first.nbytes != second.nbytes:
            return False
        return all(data == second.read(at, len(data)) for at, data in first.chunks(0, first.nbytes))
