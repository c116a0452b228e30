"""A tree in an object store; requests run in parallel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

from ...reports.batch.items import Item
from ...sources.fetch_pool import map_parallel
from ...sources.filesystem import info_of, open_store, size_in, stamp_of
from ...sources.known_objects import known_about, known_objects
from ...sources.place import EntryKind, FolderEntry
from ...sources.remote_place import RemotePlace
from ...system.temporary import temporary_folder
from ...writing.upload.fsspec import check_writable
from ...writing.upload.staged_object import open_to_write
from ...writing.upload.unfinished import abort_dead
from .object_ledger import ObjectLedger
from .tree import OBJECT_LEDGER, Ledger, Tree, is_own_name

_T = TypeVar("_T")
_R = TypeVar("_R")


class RemoteTree(Tree):
    """A tree at a URL."""

    def map_items(self, call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
        """As `Tree.map_items`: several at once."""
        return map_parallel(call, given)

    def prepare_calls(self, call: Callable[[str], _R], paths: Iterable[str]) -> Callable[[str], _R]:
        paths = list(dict.fromkeys(paths))
        known = dict(zip(paths, map_parallel(call, paths), strict=True))
        return cache(lambda path: known[path] if path in known else call(path))

    def listings(self) -> Callable[[str], list[FolderEntry]]:
        """As `Tree.listings`: the whole tree is listed at once."""
        base = self.path.rstrip("/")
        self.remember()
        found: dict[str, list[FolderEntry]] = {base: []}
        for each in RemotePlace(self.path).files_below(is_own_name):
            parts = each.name.split("/")
            if not all(map(_is_name, parts)):
                found[base].append(each._replace(kind=EntryKind.BAD_NAME))
                continue
            above = base
            for part in parts[:-1]:
                folder = RemotePlace(above).child(part).path
                if folder not in found:
                    found[folder] = []
                    found[above].append(FolderEntry(part, folder, EntryKind.FOLDER))
                above = folder
            found[above].append(each._replace(name=parts[-1]))
        return lambda folder: sorted(found[base if folder == self.path else folder])

    def remember(self) -> None:
        """As `Tree.remember`: one request lists a thousand objects."""
        known = known_objects()
        if known is not None and known.below(self.path) is None:
            RemotePlace(self.path).remember_below()

    def files(self) -> list[FolderEntry]:
        """As `Tree.files`, by few requests."""
        about = known_about(self.path) or info_of(open_store(self.path))
        if about.get("type") != "directory":
            return [FolderEntry("", self.path, EntryKind.FILE, size_in(about), stamp_of(about))]
        return RemotePlace(self.path).files_below(is_own_name)

    def sums(
        self, files: Sequence[FolderEntry], *, digests: bool, known: Mapping[str, int]
    ) -> tuple[int, dict[str, str]]:
        """As `Tree.sums`: always 0, because an object's stamp changes with its bytes."""
        del files, digests, known
        return 0, {}

    def copied_nbytes(self, nbytes: int) -> int:
        return nbytes

    def check_root(self) -> None:
        """As `Tree.check_root`: some stores can only be read."""
        check_writable(open_to_write(self.path))

    def check_name(self) -> None:
        """As `Tree.check_name`: an object may have any name."""

    def obstacle(self) -> str:
        """As `Tree.obstacle`: none is known before writing."""
        return ""

    def free_nbytes(self) -> int | None:
        return None

    def is_taken(self) -> bool:
        return self.place.exists()

    def make_folder(self) -> None:
        """As `Tree.make_folder`: does nothing."""

    @contextlib.contextmanager
    def beside(self) -> Iterator[str]:
        """As `Tree.beside`: a local folder, because outputs to compare need not be in the store."""
        with temporary_folder() as here:
            yield os.path.join(here, self.place.name)

    def remove_leftovers(self, items: Iterable[Item], ledger: str = "") -> list[str]:
        """As `Tree.remove_leftovers`: removes invisible parts of unfinished uploads."""
        root = RemotePlace(ledger).parent if ledger else RemotePlace(self.path)
        refusals = [each.refusal for each in abort_dead(root.path)]
        notes = [
            f"{each.path}: {each}" + (f"; {each.hint}" if each.hint else "")
            for each in refusals
            if each is not None
        ]
        return list(dict.fromkeys(notes))

    def open_ledger(self) -> Ledger:
        return ObjectLedger(RemotePlace(self.path).child(OBJECT_LEDGER).path)


def _is_name(part: str) -> bool:
    """Whether a file may have this name: an object's name may lead out of a folder."""
    return part not in ("", ".", "..") and "\0" not in part
