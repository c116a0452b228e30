"""Write new files, folders and objects: copy, verify, commit; and change files in place.

What is written to an object store is streamed in parts, in bounded memory and without a local copy.
It appears only after all of it is verified.
"""

from __future__ import annotations

from ..errors import StrPath
from ..sources import choose
from .destination import Destination, LocalDestination, StagedFolder

__all__ = ["Destination", "StagedFolder", "destination_of"]


def destination_of(path: StrPath) -> Destination:
    """Where a path or a URL leads, to write there."""
    return choose(path, LocalDestination, _remote)


def _remote(url: str) -> Destination:
    from .upload.destination import RemoteDestination  # what has no URL needs none of this

    return RemoteDestination(url)
