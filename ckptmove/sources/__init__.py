"""Read bytes: local files, and objects in any store that fsspec can open by URL."""

from __future__ import annotations

from ..errors import InputError, StrPath
from .filesystem import Missing
from .folders import exists, inside, is_folder, nbytes_of
from .links import check_link
from .source import File, Source
from .urls import folder_of, is_url, joined, looks_like_url, masked

__all__ = [
    "Missing",
    "check_link",
    "exists",
    "folder_of",
    "inside",
    "is_folder",
    "is_url",
    "joined",
    "masked",
    "nbytes_of",
    "open_source",
]


def open_source(path: StrPath) -> Source:
    """Open a file, or what a URL names, for reading.

    Raises:
        InputError: missing, unreadable, or not a regular file (a FIFO does not block).
        UsageError: what the URL needs isn't installed.
    """
    if not is_url(path):
        try:
            return File.open(path)
        except InputError as error:
            if looks_like_url(path):
                error.hint = "a URL must be a string with two slashes"
            raise
    from .remote_object import Object  # what has no URL needs none of this

    return Object(str(path))
