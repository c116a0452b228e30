"""Write new files, folders and objects: copy, verify, commit; and change files in place.

Output to an object store is streamed in parts, in bounded memory and without a local copy. It
appears only after all of it is verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..sources import choose

if TYPE_CHECKING:
    from ..errors import StrPath
    from .destination import Destination

__all__ = ["destination_of"]


def destination_of(path: StrPath) -> Destination:
    """Return the destination for a path or a URL."""
    from .destination import LocalDestination  # not needed to look for journals

    return choose(path, LocalDestination, _remote)


def _remote(url: str) -> Destination:
    from .upload.destination import RemoteDestination  # imported only for URLs

    return RemoteDestination(url)
