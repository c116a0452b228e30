"""Read bytes: local files, and objects in any store that fsspec can open by URL."""

from __future__ import annotations

from ..errors import StrPath
from .filesystem import Missing
from .place import LocalPlace, Place, choose, mask_secrets
from .source import Source

__all__ = ["Missing", "Place", "choose", "mask_secrets", "open_source", "place_of"]


def place_of(path: StrPath) -> Place:
    """Where a path or a URL leads."""
    return choose(path, LocalPlace, _remote)


def _remote(url: str) -> Place:
    from .remote_place import RemotePlace  # what has no URL needs none of this

    return RemotePlace(url)


def open_source(path: StrPath) -> Source:
    """Open a file, or what a URL names, for reading. Raises as `Place.open`."""
    return place_of(path).open()
