"""Write new files, folders and objects: copy, verify, commit; and change files in place.

What is written to an object store is streamed in parts, in bounded memory and without a local copy.
It appears only after all of it is verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..sources import choose

if TYPE_CHECKING:
    from ..errors import StrPath
    from .destination import Destination

__all__ = ["destination_of"]


def destination_of(path: StrPath) -> Destination:
    """Where a path or a URL leads, to write there."""
    from .destination import LocalDestination  # not for who only looks for journals

    return choose(path, LocalDestination, _remote)


def _remote(url: str) -> Destination:
    from .upload.destination import RemoteDestination  # what has no URL needs none of this

    return RemoteDestination(url)
