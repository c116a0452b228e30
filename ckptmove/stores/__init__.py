"""Where files are: on this machine, or in a store that fsspec knows, which a URL names."""

from __future__ import annotations

from ..errors import StrPath
from ..source import File, Source
from .folders import exists, inside, is_folder
from .urls import folder_of, is_url, joined

__all__ = ["exists", "folder_of", "inside", "is_folder", "is_url", "joined", "open_source"]


def open_source(path: StrPath) -> Source:
    """Open a file, or what a URL names, for reading.

    Raises:
        InputError: missing, unreadable, or not a regular file (a FIFO does not block).
        UsageError: what the URL needs isn't installed.
    """
    if not is_url(path):
        return File.open(path)
    from .objects import Object  # what has no URL needs none of this

    return Object(str(path))
