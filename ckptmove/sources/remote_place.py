"""Places in object stores, which URLs name and fsspec opens."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from ..errors import CorruptError, InputError, UnsupportedError
from .filesystem import (
    Missing,
    StorePath,
    info_of,
    is_s3,
    mtime_of,
    open_store,
    size_in,
    stamp_of,
    with_retries,
)
from .known_objects import known_about, known_objects, look
from .place import WEB, EntryKind, FolderEntry, Place, check_count
from .remote_object import RemoteObject
from .source import Source


class RemotePlace(Place):
    """A URL."""

    __slots__ = ()
    changes_in_place = False
    opens_by_path = False

    @property
    def store(self) -> StorePath:
        """The store, opened. Raises as `open_store`."""
        return open_store(self.path)

    @property
    def name(self) -> str:
        return _name_of(self.path)

    @property
    def parent(self) -> RemotePlace:
        return RemotePlace(_bare(self.path).rstrip("/").rpartition("/")[0])

    def child(self, name: str) -> RemotePlace:
        quoted = quote(name) if WEB.match(self.path) else name
        return RemotePlace(f"{self.path.rstrip('/')}/{quoted}")

    def absolute(self) -> str:
        """As `Place.absolute`: it is."""
        return self.path

    def folder_identity(self) -> str:
        store = self.store
        return f"{store.fs.protocol}:{store.path.strip('/')}/"

    def open(self) -> Source:
        return RemoteObject(self.path)

    def exists(self) -> bool:
        return look(self.store) is not None

    def is_unreachable(self, error: InputError) -> bool:
        """As `Place.is_unreachable`: its store did not give it."""
        return not isinstance(error, (CorruptError, UnsupportedError))

    def is_folder(self) -> bool:
        store = self.store
        if self.path.endswith("/"):
            return bool(with_retries(lambda: store.fs.isdir(store.path), self.path))
        known = known_objects()
        is_known, about = (False, None) if known is None else known.find(self.path)
        if not is_known:
            with contextlib.suppress(Missing):
                about = with_retries(lambda: store.fs.info(store.path), self.path)
        return about is not None and about.get("type") == "directory"

    def size_and_stamp(self) -> tuple[int, str]:
        about = known_about(self.path) or info_of(self.store)
        return size_in(about), stamp_of(about)

    def entries(self) -> list[FolderEntry]:
        known = known_objects()
        below = None if known is None else known.below(self.path)
        if below:
            return sorted(self._entries_of(below))
        store = self.store
        listed: list[Mapping[str, Any]] = with_retries(
            lambda: list(store.fs.ls(store.path, detail=True)), self.path
        )
        own = store.path.rstrip("/")
        found = list[FolderEntry]()
        for each in listed:
            path = str(each["name"]).rstrip("/")
            name = _name_of(path)
            if path == own or not name:  # a folder that is marked by an object of its name
                continue
            folder = each.get("type") == "directory"
            kind = EntryKind.FOLDER if folder else EntryKind.FILE
            found.append(FolderEntry(name, self.child(name).path, kind, size_in(each)))
        return sorted(found)

    def _entries_of(self, below: Mapping[str, Mapping[str, Any]]) -> Iterator[FolderEntry]:
        """What is directly in it, of all objects below."""
        for name in dict.fromkeys(each.partition("/")[0] for each in below):
            if name and name in below:
                yield FolderEntry(name, self.child(name).path, EntryKind.FILE, size_in(below[name]))
            elif name:
                yield FolderEntry(name, self.child(name).path, EntryKind.FOLDER)

    def files_below(
        self, ignored: Callable[[str], bool] = lambda _: False, most: int | None = None
    ) -> list[FolderEntry]:
        """As `Place.files_below`, in the order of names. Raises Missing if nothing is there."""
        known = known_objects()
        below = None if known is None else known.below(self.path)
        if below is None:
            below = self._found_below()
        listed, base = list[FolderEntry](), self.path.rstrip("/")
        for name, about in below.items():
            said = size_in(about), stamp_of(about), mtime_of(about)
            listed.append(FolderEntry(name, f"{base}/{name}", EntryKind.FILE, *said))
        if not listed:
            raise Missing("can't be read: there is nothing below it", path=self.path)
        check_count(listed, most, self.path)
        return sorted(each for each in listed if not any(map(ignored, each.name.split("/"))))

    def remember_below(self) -> None:
        """List all that is below, and remember it where something is remembered at all."""
        known = known_objects()
        if known is not None:
            found = self._found_below().items()
            known.put_listing(self.path, found, exclusive=is_s3(self.store.fs))

    def _found_below(self) -> dict[str, Mapping[str, Any]]:
        """The entries of all objects below, by their relative names."""
        store = self.store
        if is_s3(store.fs):
            return with_retries(lambda: _listed_by_s3(store), self.path)
        root = store.path.rstrip("/")

        def find() -> Mapping[str, Mapping[str, Any]]:
            store.fs.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = store.fs.find(root, detail=True)
            return found

        within = f"{root}/"
        return {
            path[len(within) :]: about
            for path, about in with_retries(find, self.path).items()
            if path.startswith(within) and about.get("type") != "directory"
        }

    def read_small(self, most: int) -> bytes:
        """The content of an object. Raises InputError if it has more than `most` bytes."""
        store = self.store
        data: bytes = with_retries(
            lambda: store.fs.cat_file(store.path, start=0, end=most + 1), self.path
        )
        if len(data) > most:
            raise InputError(f"has more than {most:,} bytes", path=self.path)
        return data


def _listed_by_s3(store: StorePath) -> dict[str, Mapping[str, Any]]:
    """All objects below, a thousand by a request; `find` of s3fs asks twice more if none is."""
    bucket, key, _ = store.fs.split_path(store.path)
    prefix = f"{key.rstrip('/')}/" if key.strip("/") else ""
    found, more = dict[str, Mapping[str, Any]](), dict[str, str]()
    while True:
        answer = store.fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        for each in answer.get("Contents", ()):
            name = each["Key"][len(prefix) :]
            if not name.endswith("/") and name:  # what marks a folder
                about = {"type": "file", "size": each["Size"], "name": f"{bucket}/{each['Key']}"}
                found[name] = {**each, **about}
        if not answer.get("IsTruncated"):
            return found
        more = {"ContinuationToken": answer["NextContinuationToken"]}


def _name_of(url: str) -> str:
    name = _bare(url).rstrip("/").rpartition("/")[2]
    return unquote(name) if WEB.match(url) else name


def _bare(url: str) -> str:
    """A URL of the web without what follows its path."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if WEB.match(url) else url
