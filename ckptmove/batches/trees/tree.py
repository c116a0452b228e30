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
from ...reports.batch.items import Item, LedgerEntry
from ...sources import Place, place_of
from ...sources.place import EntryKind, FolderEntry
from ...writing.final_name import HIDDEN
from ...writing.in_place.journal_name import SUFFIX, UNFINISHED

_T = TypeVar("_T")
_R = TypeVar("_R")
LEDGER = ".ckptmove-batch.jsonl"  # the name of the ledger
OBJECT_LEDGER = ".ckptmove-batch"  # the name of the folder that replaces it in a store
_OWN = (HIDDEN, SUFFIX, SUFFIX + UNFINISHED)


class Ledger(Protocol):
    """The record of finished items, in the destination of a batch."""

    path: str  #: of the file, or of the folder of objects
    #: Whether all machines that see the path see the same ledger.
    is_shared: ClassVar[bool]

    @property
    def nbytes(self) -> int:
        """The number of bytes read of it."""

    def entry(self, name: str) -> LedgerEntry | None:
        """Return the present entry of an item; None if there is none."""

    def entries_of(self, names: Iterable[str]) -> dict[str, LedgerEntry]:
        """Return the present entries of several items, without items that have none."""

    def every(self) -> list[LedgerEntry]:
        """Return the entries of all items in the ledger."""

    def add(self, *entries: LedgerEntry, synced: bool = False) -> None:
        """Add entries, by one write or one request; with `synced`, they are on disk afterwards."""

    def lock(
        self, names: Iterable[str], *, patient: bool
    ) -> contextlib.AbstractContextManager[list[str]]:
        """Lock items; yield those locked: all, or without `patient` those that no other run has."""


class Output(NamedTuple):
    """An output as the ledger records it."""

    nbytes: int  #: of all files together
    stamp: str  #: changes with any of its files, or when it is moved; does not identify the content
    crc32: int = 0  #: of its bytes, and of a folder's names; 0 if not requested
    #: name of each file in it (empty for a single file) → SHA-256, if requested
    digests: Mapping[str, str] = {}


class Tree(ABC):
    """A tree, a folder in it, or a file in it."""

    def __init__(self, path: str) -> None:
        self.path = path  #: a path, or a URL
        self.place: Place = place_of(path)

    # -- reading -------------------------------------------------------------------------------

    @abstractmethod
    def map_items(self, call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
        """Call a function for each, in order; concurrently if answers are slow."""

    @abstractmethod
    def prepare_calls(self, call: Callable[[str], _R], paths: Iterable[str]) -> Callable[[str], _R]:
        """Return a function that calls this one once per path; it may do these in advance."""

    @abstractmethod
    def remember(self) -> None:
        """Look up everything below in one go, if that is remembered and cheaper."""

    @abstractmethod
    def listings(self) -> Callable[[str], list[FolderEntry]]:
        """Return a function that lists a folder of the tree, sorted. It raises InputError."""

    @abstractmethod
    def files(self) -> list[FolderEntry]:
        """Return the file itself, with an empty name, or all files below the folder, sorted."""

    @abstractmethod
    def sums(
        self, files: Sequence[FolderEntry], *, digests: bool, known: Mapping[str, int]
    ) -> tuple[int, dict[str, str]]:
        """Return a checksum of all `files` and their names; 0 if the stamp changes with the bytes.

        Files with a `known` CRC-32, by their stamps, are not read. Also returns their `digests`, as
        in `Output`, if these are wanted and the files are read.
        """

    @abstractmethod
    def copied_nbytes(self, nbytes: int) -> int:
        """Return the least space that a copy of a file of this size takes, without its holes."""

    def stamp_of(self, files: Sequence[str]) -> str:
        """Return a text that changes with any of these files. Raises InputError if one is gone."""
        stamps = self.map_items(lambda path: place_of(path).size_and_stamp()[1], files)
        return self._one_stamp(zip(files, stamps, strict=True))

    def nbytes_of(self, files: Iterable[str]) -> int:
        """Return the total size of files, without missing ones."""
        return sum(self.map_items(lambda path: place_of(path).nbytes(), files))

    def output(
        self, *, summed: bool, digests: bool = False, known: Mapping[str, int] | None = None
    ) -> Output:
        """Return the existing file or folder; with `summed`, compute its CRC-32 as in `sums`."""
        files = self.files()
        if any(each.kind is not EntryKind.FILE for each in files):
            raise InputError("can't be read: not all in it are files", path=self.path)
        stamp = self._one_stamp((each.path, each.stamp) for each in files)
        nbytes = sum(each.nbytes for each in files)
        return Output(
            nbytes, stamp, *(self.sums(files, digests=digests, known=known or {}) if summed else ())
        )

    def _one_stamp(self, stamps: Iterable[tuple[str, str]]) -> str:
        """Combine the stamps of files, with their paths, into one."""
        stamps = list(stamps)
        if len(stamps) == 1:
            return stamps[0][1]
        lines = [f"{path[len(self.path) :]}:{stamp}" for path, stamp in stamps]
        return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:32]

    def sizes(self) -> dict[str, int]:
        """Return the size of each file, by its relative name; -1 for entries that are not files."""
        return {
            each.name: each.nbytes if each.kind is EntryKind.FILE else -1 for each in self.files()
        }

    def same(self, other: Tree) -> bool:
        """Whether two files, or two folders with their contents, are equal byte for byte."""
        if self.sizes() != other.sizes():
            return False
        pairs = zip(self.files(), other.files(), strict=True)
        return all(_same_bytes(mine.path, theirs.path) for mine, theirs in pairs)

    def holds(self, data: bytes) -> bool:
        """Whether the file has exactly these bytes. Raises InputError if it can't be read."""
        if self.sizes() != {"": len(data)}:
            return False
        with self.place.open() as source:
            return source.nbytes == len(data) and source.read(0, len(data)) == data

    # -- writing -------------------------------------------------------------------------------

    @abstractmethod
    def check_root(self) -> None:
        """Raises RefusedError if outputs can't be written to this folder."""

    @abstractmethod
    def check_name(self) -> None:
        """Raises RefusedError if no file can have this name."""

    @abstractmethod
    def obstacle(self) -> str:
        """Return why no file can be made in this folder, which may be new; empty if it can."""

    @abstractmethod
    def free_nbytes(self) -> int | None:
        """Return the free bytes at the place of the folder; None if there is no limit."""

    def file_of(self) -> Callable[[str], str]:
        """Return a function that maps different paths of one file to the same value."""
        return str

    @abstractmethod
    def is_taken(self) -> bool:
        """Whether an entry exists there that would have to be replaced."""

    @abstractmethod
    def make_folder(self) -> None:
        """Make a folder and its parents, unless they exist. Raises OSError."""

    @abstractmethod
    def beside(self) -> contextlib.AbstractContextManager[str]:
        """Make a temporary folder near this path; yield a path with the same name in it."""

    @abstractmethod
    def remove_leftovers(self, items: Iterable[Item], ledger: str = "") -> list[str]:
        """Remove leftovers of killed runs in a folder, but not files still being written.

        `ledger` is the path of the ledger, if it is not in this folder. Returns a sentence for each
        leftover that may not be removed.
        """

    @abstractmethod
    def open_ledger(self) -> Ledger:
        """Open the ledger of a tree, to plan a batch."""


def is_own_name(name: str) -> bool:
    """Whether a name is that of a ledger, a journal or a temporary file of ckptmove."""
    return name in (LEDGER, OBJECT_LEDGER) or (name.startswith(".") and name.endswith(_OWN))


def _same_bytes(one: str, other: str) -> bool:
    with place_of(one).open() as first, place_of(other).open() as second:
        if first.nbytes != second.nbytes:
            return False
        return all(data == second.read(at, len(data)) for at, data in first.chunks(0, first.nbytes))
