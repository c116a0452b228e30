"""A tree on the local disk, and the temporary files that killed runs left in it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

from ...errors import RefusedError
from ...plans.crc32 import combine_crc32, extend_crc32
from ...reports.batch.items import Item
from ...sources import place_of
from ...sources.place import EntryKind, FolderEntry, walk
from ...system.files import (
    AT_ONCE,
    NO_LINK,
    READ,
    allocated_nbytes,
    free_nbytes,
    is_read_only,
)
from ...system.locks import is_open_for_writing
from ...system.names import folds_case, one_case, without_slash
from ...writing.final_name import HIDDEN, failure_of, hidden_name, is_hidden
from ...writing.staged_folder import lock_folder, remove_tree
from .ledger import FileLedger
from .tree import LEDGER, Ledger, Tree, is_own_name

_T = TypeVar("_T")
_R = TypeVar("_R")
_LONGEST_NAME = 255  # bytes
_ENDING = 200  # bytes of a name that still fit behind a temporary name


class LocalTree(Tree):
    """A tree at a local path."""

    def map_items(self, call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
        return map(call, given)

    def prepare_calls(self, call: Callable[[str], _R], paths: Iterable[str]) -> Callable[[str], _R]:
        return cache(call)

    def remember(self) -> None:
        """As `Tree.remember`: does nothing, because looking again is cheap."""

    def listings(self) -> Callable[[str], list[FolderEntry]]:
        return lambda path: [
            each for each in place_of(path).entries() if not is_own_name(each.name)
        ]

    def files(self) -> list[FolderEntry]:
        if not self.place.is_folder():
            return [FolderEntry("", self.path, EntryKind.FILE, *self.place.size_and_stamp())]
        found = self.place.files_below(is_own_name)
        folders = (EntryKind.FOLDER, EntryKind.FOLDER_LINK)
        return sorted(each for each in found if each.kind not in folders)

    def sums(
        self, files: Sequence[FolderEntry], *, digests: bool, known: Mapping[str, int]
    ) -> tuple[int, dict[str, str]]:
        crc32, found = 0, dict[str, str]()
        for each in files:
            name, sha256 = each.path[len(self.path) :].replace(os.sep, "/"), hashlib.sha256()
            crc32 = zlib.crc32(os.fsencode(name), crc32)
            if each.stamp in known and not digests:
                crc32 = combine_crc32(crc32, known[each.stamp], each.nbytes)
                continue
            with place_of(each.path).open() as source:
                for _, data in source.chunks(0, source.nbytes):
                    crc32 = extend_crc32(crc32, data)
                    if digests:
                        sha256.update(data)
            if digests:
                found[name.lstrip("/")] = sha256.hexdigest()
        return crc32, found

    def copied_nbytes(self, nbytes: int) -> int:
        """As `Tree.copied_nbytes`, or raise OSError."""
        files = [each.path for each in self.files()]
        return min(nbytes, sum(allocated_nbytes(os.stat(each)) for each in files))

    def check_root(self) -> None:
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise RefusedError("exists, and is not a directory", path=self.path)

    def check_name(self) -> None:
        nbytes = len(os.fsencode(os.path.basename(self.path)))
        if nbytes > _LONGEST_NAME:
            raise RefusedError(
                f"its name would have {nbytes} bytes in the destination, and {_LONGEST_NAME} is "
                "the most"
            )

    def obstacle(self) -> str:
        try:
            self._check_writable()
        except OSError as error:
            return str(failure_of(error, self.path))
        return ""

    def free_nbytes(self) -> int | None:
        try:
            self._check_writable()
            return free_nbytes(existing_parent(self.path))
        except OSError as error:
            raise failure_of(error, self.path) from error

    def _check_writable(self) -> None:
        """Raises OSError if no new file can be made in the folder."""
        existing = existing_parent(self.path)
        if not os.path.isdir(existing):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), existing)
        if not os.access(existing, os.W_OK | os.X_OK):
            number = errno.EROFS if is_read_only(existing) else errno.EACCES
            raise OSError(number, os.strerror(number), existing)

    def file_of(self) -> Callable[[str], str]:
        return one_case if folds_case(existing_parent(self.path)) else str

    def is_taken(self) -> bool:
        try:
            about = os.lstat(self.path)
        except (OSError, ValueError):
            return False
        return not stat.S_ISDIR(about.st_mode) or bool(os.listdir(self.path))

    def make_folder(self) -> None:
        if not os.path.isdir(self.path):
            try:
                os.makedirs(self.path, exist_ok=True)
            except FileExistsError as error:  # not a folder
                number = errno.ENOTDIR
                raise NotADirectoryError(number, os.strerror(number), error.filename) from error

    @contextlib.contextmanager
    def beside(self) -> Iterator[str]:
        folder, name = os.path.split(without_slash(self.path))
        hidden, lock = os.path.join(folder, hidden_name(name)), -1
        try:
            os.mkdir(hidden, 0o700)
            lock = lock_folder(hidden)
            yield os.path.join(hidden, name)
        finally:
            remove_tree(hidden)
            if lock >= 0:
                os.close(lock)

    def remove_leftovers(self, items: Iterable[Item], ledger: str = "") -> list[str]:
        left = _leftovers(self.path)
        if not left:
            return []
        book = FileLedger(ledger or os.path.join(self.path, LEDGER))
        for hidden, whose in _whose(left, items):
            with book.lock([each.name for each in whose], patient=False) as held:
                if len(held) == len(whose):
                    _clear(hidden, whose[0].output)
        return []

    def open_ledger(self) -> Ledger:
        return FileLedger(os.path.join(self.path, LEDGER))


def existing_parent(path: str) -> str:
    """Return the nearest existing folder above a path, or the entry that is in its place."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def free_path_near(path: str) -> str:
    """Return a path with the same suffix that nothing has, in the nearest existing folder."""
    folder, name = os.path.split(path)
    ending = os.fsdecode(os.fsencode(name)[-_ENDING:])
    return os.path.join(existing_parent(folder), hidden_name("") + ending)


def _leftovers(folder: str) -> list[str]:
    """Yield the temporary files and folders in a folder, at any depth."""
    found = list[str]()
    for inside, folders, names in walk(folder):
        hidden = [name for name in folders if name.endswith(HIDDEN)]
        found += [os.path.join(inside, name) for name in (*names, *hidden) if name.endswith(HIDDEN)]
        folders[:] = [name for name in folders if name not in hidden]
    return found


def _whose(left: Iterable[str], items: Iterable[Item]) -> Iterator[tuple[str, list[Item]]]:
    """Return the items that a leftover may belong to: several, if long names begin alike."""
    inside: dict[str, list[Item]] = {}
    for item in items:
        inside.setdefault(os.path.dirname(item.output), []).append(item)
    for hidden in left:
        folder, name = os.path.split(hidden)
        whose = [
            item
            for item in inside.get(folder, ())
            if is_hidden(name, os.path.basename(item.output))
        ]
        if whose:
            yield hidden, whose


def _clear(hidden: str, output: str) -> None:
    """Remove temporary files, unless another process still writes them.

    Without an output, a temporary folder stays: it may be the old output.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(hidden).st_mode):
            if os.path.lexists(output):
                remove_tree(hidden)
        elif not _is_written(hidden):
            os.unlink(hidden)


def _is_written(path: str) -> bool:
    fd = os.open(path, READ | NO_LINK | AT_ONCE)
    try:
        return is_open_for_writing(fd)
    finally:
        os.close(fd)
