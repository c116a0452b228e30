"""List folders, local or remote, and tell whether a path is one."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import CkptmoveError, InputError, StrPath
from .urls import is_url, name_of


class Inside(NamedTuple):
    """What is in a folder.

    Attributes:
        name: its name in it.
        is_folder: whether it is one; else a file, or what else has a name.
        is_file: whether it is one, links to files among them.
        nbytes: of a file in a store.
    """

    name: str
    is_folder: bool
    is_file: bool
    nbytes: int = 0


def is_folder(path: StrPath) -> bool:
    """Whether this is a folder, or a prefix in a store below which something is."""
    if not is_url(path):
        return os.path.isdir(path)
    from .filesystem import Missing, place_of, with_retries

    place = place_of(str(path))
    if str(path).endswith("/"):
        return bool(with_retries(lambda: place.fs.isdir(place.path), place.url))
    try:
        about: Mapping[str, Any] = with_retries(lambda: place.fs.info(place.path), place.url)
    except InputError as error:
        if isinstance(error, Missing):
            return False
        raise
    return about.get("type") == "directory"


def exists(path: StrPath) -> bool:
    """Whether there is something of this name.

    Raises:
        InputError: the store can't tell.
    """
    if not is_url(path):
        return os.path.exists(path)
    from .filesystem import place_of, with_retries

    place = place_of(str(path))
    return bool(with_retries(lambda: place.fs.exists(place.path), place.url))


def nbytes_of(path: StrPath) -> int:
    """The size of a file in bytes; 0 for a folder, a missing file, or an unknown size."""
    try:
        if not is_url(path):
            about = os.stat(path)
            return about.st_size if stat.S_ISREG(about.st_mode) else 0
        from .filesystem import info_of, place_of, size_in

        return size_in(info_of(place_of(str(path))))
    except (OSError, ValueError, CkptmoveError):
        return 0


def inside(path: StrPath) -> list[Inside]:
    """What is in a folder, in the order of names.

    Raises:
        InputError: it can't be read.
    """
    if is_url(path):
        return _in_store(str(path))
    try:
        with os.scandir(path) as found:
            entries = [Inside(each.name, each.is_dir(), each.is_file()) for each in found]
    except OSError as error:
        raise InputError(f"can't be read: {error.strerror}", path=path) from error
    return sorted(entries)


def _in_store(url: str) -> list[Inside]:
    from .filesystem import place_of, size_in, with_retries

    place = place_of(url)
    listed: list[Mapping[str, Any]] = with_retries(
        lambda: list(place.fs.ls(place.path, detail=True)), url
    )
    own = place.path.rstrip("/")
    found = list[Inside]()
    for each in listed:
        path = str(each["name"]).rstrip("/")
        name = name_of(path)
        if path == own or not name:  # a folder that is marked by an object of its name
            continue
        folder = each.get("type") == "directory"
        found.append(Inside(name, folder, not folder, size_in(each)))
    return sorted(found)
