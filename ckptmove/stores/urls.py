"""URLs: what one is, and the names in it."""

from __future__ import annotations

import os
import re

from ..errors import StrPath

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")


def is_url(path: StrPath) -> bool:
    """Whether this names something in a store, as `s3://bucket/run.pt` does, and no path here."""
    return isinstance(path, str) and _URL.match(path) is not None


def joined(folder: StrPath, name: str) -> str:
    """What has a name in a folder."""
    if is_url(folder):
        return f"{str(folder).rstrip('/')}/{name}"
    return os.path.join(os.fspath(folder), name)


def folder_of(path: StrPath) -> str:
    """The folder that a file is in, without a slash at its end."""
    if is_url(path):
        return str(path).rstrip("/").rpartition("/")[0]
    return os.path.dirname(os.fspath(path))


def name_of(path: StrPath) -> str:
    """The last part of a path or a URL."""
    return os.path.basename(os.fspath(path).rstrip("/"))
