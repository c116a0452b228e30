"""Download objects into a temporary folder, for readers that can open only files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence

from ..errors import InputError, RefusedError, StrPath
from ..system.temporary import temporary_folder
from .place import EntryKind
from .remote_place import RemotePlace
from .source import Source

_MOST_BESIDE = 16 << 20  # largest file besides weights, such as a model's configuration


class Downloads:
    """Local copies of objects. As a context manager, it removes them at the end."""

    def __init__(self) -> None:
        self._ending = contextlib.ExitStack()
        self._room = ""
        self._here: dict[str, str] = {}  # URL → path
        self._origins: dict[str, str] = {}  # folder → its original URL

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ending.close()

    def here(self, path: StrPath) -> str:
        """Return the path of the local copy of a URL; any other path is returned unchanged."""
        return self._here.get(os.fspath(path), os.fspath(path))

    def with_original_names(self, text: str) -> str:
        """Replace the paths of copies in a text with the original URLs."""
        for folder, origin in self._origins.items():
            text = text.replace(folder, origin)
        return text

    def take(
        self, url: str, sources: Sequence[Source], *, folder: bool, beside: bool
    ) -> tuple[str, ...]:
        """Copy the sources of a URL, which lie in one folder; return the paths of the copies.

        `folder`: the URL names that folder; `beside`: also copy its other small files.
        """
        try:
            self._room = self._room or self._ending.enter_context(temporary_folder())
            room = os.path.join(self._room, str(len(self._origins)))
            os.mkdir(room)
            needed, free = sum(each.nbytes for each in sources), shutil.disk_usage(room).free
            if needed > free:
                raise _no_room(url, f"{needed:,} bytes are needed, {free:,} are free")
            place = RemotePlace(url)
            self._origins[room] = url.rstrip("/") if folder else place.parent.path
            copies = tuple(_copied(each, room) for each in sources)
            if folder and beside:
                names = {os.path.basename(each) for each in copies}
                for each in place.entries():
                    is_small = each.kind is EntryKind.FILE and each.nbytes <= _MOST_BESIDE
                    if is_small and each.name not in names:
                        with place.child(each.name).open() as source:
                            _copied(source, room)
        except OSError as error:
            raise _no_room(url, str(error.strerror)) from error
        self._here[url] = room if folder else os.path.join(room, place.name)
        return copies


def _copied(source: Source, room: str) -> str:
    name = RemotePlace(source.path).name
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InputError("has a name that is not valid for a file here", path=source.path)
    path = os.path.join(room, name)
    with open(path, "xb") as file:
        for _, data in source.chunks(0, source.nbytes):
            file.write(data)
    source.check_unchanged()
    return path


def _no_room(url: str, why: str) -> RefusedError:
    hint = "set TMPDIR to a folder with more room"
    return RefusedError(f"can't be copied into {tempfile.gettempdir()}: {why}", path=url, hint=hint)
