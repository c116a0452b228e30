"""Write a folder in a store: objects with a common prefix.

All files are uploaded and verified before the first one is completed. No store can make them appear
at once, so the order shows completeness: first the files beside the weights, then the weights, and
the index last. An old index is removed before the files that it names are replaced, so it never
names a mixture. A process that is killed in between leaves a folder without an index, and must be
run again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import CkptmoveError, InputError, RefusedError, StrPath, WriteError
from ...sources.filesystem import Missing, StorePath, is_s3, open_store
from ...sources.remote_object import RemoteObject
from ...sources.remote_place import RemotePlace
from ...sources.source import Source
from ..final_name import exists_error
from .errors import uninterruptible, with_write_retries
from .fsspec import check_writable
from .parts import PART_NBYTES
from .staged_object import MemoryAllowance, StagedUpload, kind_at, open_to_write

_INDEX = (".index.json", ".metadata")  # name suffixes of files that describe the folder


class StagedPrefix:
    """A folder that is being written. As a context manager, it is removed unless committed."""

    def __init__(self, destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
        """Raises RefusedError as `check_prefix` does."""
        self._place = check_prefix(str(destination), sources, force=force)
        self.path = str(destination).rstrip("/")  #: its URL, without a slash at the end
        self.sources = sources
        self.force = force
        self._old = names_below(self.path) if force else []
        self._files = dict[str, StagedUpload]()
        self._room = MemoryAllowance(PART_NBYTES)

    def __enter__(self) -> StagedPrefix:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed: CkptmoveError | None = None
        for file in self._files.values():
            try:
                file.abort(error)
            except CkptmoveError as one:
                failed = one
        if failed is not None:
            raise failed

    def file(self, name: str, sources: Sequence[Source] | None = None) -> StagedUpload:
        """As `StagedFolder.file`."""
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise RefusedError(f"{name!r} is not a valid file name", path=self.path)
        if name in self._files:
            raise WriteError("is written twice", path=RemotePlace(self.path).child(name).path)
        file = StagedUpload(
            self._at(name),
            self.sources if sources is None else sources,
            self._room,
            force=self.force,
        )
        self._files[name] = file
        return file

    def _at(self, name: str) -> StorePath:
        path = f"{self._place.path.rstrip('/')}/{name}"
        return self._place._replace(url=RemotePlace(self.path).child(name).path, path=path)

    def make(self, name: str) -> None:
        """Do nothing: stores have no empty folders."""

    def commit(self) -> None:
        """Complete the files one by one, the index last; then remove the rest of an old folder."""
        order = sorted(reversed(self._files), key=lambda name: name.endswith(_INDEX))
        stale = [name for name in self._old if name.endswith(_INDEX)]
        for name in stale:
            self._remove(name)
        for done, name in enumerate(order):
            try:
                self._files[name].complete()
            except CkptmoveError as error:
                if done:
                    error.hint = f"{done:,} of {len(order):,} files are already there, complete"
                raise
        for name in self._old:
            if name not in self._files and name not in stale:
                self._remove(name)

    def _remove(self, name: str) -> None:
        place = self._at(name)

        def remove() -> None:
            try:
                place.fs.rm_file(place.path)
            except FileNotFoundError:
                return

        uninterruptible(lambda: with_write_retries(remove, place.url))


def check_prefix(url: str, sources: Sequence[Source], *, force: bool) -> StorePath:
    """Return the place of a folder; raises RefusedError if it must not be written."""
    path = url.rstrip("/")
    place = open_to_write(path)
    check_writable(place)
    if force and "/" not in place.path.strip("/") and is_s3(place.fs):
        raise RefusedError("is a whole bucket, which --force would empty", path=path)
    if kind_at(place) == "file":
        raise RefusedError("the destination exists and is not a directory", path=path)
    within = f"{place.path.rstrip('/')}/"
    remote = [source.place for source in sources if isinstance(source, RemoteObject)]
    if any(each.fs == place.fs and each.path.startswith(within) for each in remote):
        raise RefusedError("the source is inside the destination", path=path)
    if not force and names_below(path):
        raise exists_error(path)
    return place


def names_below(url: str) -> list[str]:
    """Return the relative names of all objects in a folder; empty without a folder."""
    place = open_store(url)
    if kind_at(place) != "directory":
        return []
    try:
        return [each.name for each in RemotePlace(url).files_below()]
    except Missing:
        return []
    except InputError as error:
        raise RefusedError(str(error), path=url) from error
