"""Read bytes: local files, and objects in any store that fsspec can open by URL."""

from __future__ import annotations

from ..errors import StrPath
from .filesystem import Missing
from .place import LocalPlace, Place, choose, mask_secrets
from .source import Source

__all__ = ["Missing", "Place", "choose", "mask_secrets", "open_source", "place_of"]


def place_of(path: StrPath) -> Place:
    """Return the place of a path or a URL."""
    return choose(path, LocalPlace, _remote)


def _remote(url: str) -> Place:
    from .remote_place import RemotePlace  # imported only for URLs

    return RemotePlace(url)


def open_source(path: StrPath) -> Source:
    """Open a file, or the object of a URL, for reading. Raises as `Place.open`."""
    return place_of(path).open()
