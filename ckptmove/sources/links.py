"""Symbolic links in a model folder: which of them may be followed.

A folder that was downloaded may hold links to whatever its reader may read. So a link has to stay
within its folder, unless that lies in the cache of the Hub, where every file is one:

    models--x/snapshots/REVISION/config.json → ../../blobs/HASH

Source: huggingface_hub/file_download.py (`_create_symlink`).
"""

from __future__ import annotations

import os
import stat

from ..errors import StrPath, UnsupportedError
from .source import Source
from .urls import is_url

_HUB = ("models--", "datasets--", "spaces--")
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def check_link(path: StrPath, folder: StrPath, source: Source | None = None) -> None:
    """Check that a file in a folder, a link or not, does not lead out of it.

    Args:
        path: the file.
        folder: the folder of the model.
        source: the file as it was opened; it must be the one that was checked.

    Raises:
        UnsupportedError: it leads elsewhere.
    """
    if is_url(folder):
        return
    root, leads_to = os.path.realpath(folder), os.path.realpath(path)
    allowed = leads_to.startswith(os.path.join(root, "")) or _is_blob(leads_to, root)
    if not allowed or (source is not None and not source.same_file(leads_to)):
        raise UnsupportedError(
            "is a link that leads outside its folder",
            path=path,
            hint="--follow-links follows it",
        )


def _is_blob(path: str, folder: str) -> bool:
    """Whether a file is a blob of the repository, in the cache of the Hub, that a folder is of."""
    while os.path.basename(folder) != _SNAPSHOTS:
        folder, before = os.path.dirname(folder), folder
        if folder == before:
            return False
    repository = os.path.dirname(folder)
    if not os.path.basename(repository).startswith(_HUB):
        return False
    try:
        is_file = stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
    return is_file and os.path.dirname(path) == os.path.join(repository, _BLOBS)
