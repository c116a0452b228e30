"""Upload small objects: held in memory, and sent at once."""

from __future__ import annotations

from ...sources.filesystem import open_store
from .errors import with_write_retries


def put_small(url: str, data: bytes) -> None:
    """Write a small object, at once, whatever was there.

    Raises:
        RefusedError: nothing can be written there.
        WriteError: it can't be written.
    """

    def put() -> None:
        place = open_store(url)
        place.fs.pipe_file(place.path, data)

    with_write_retries(put, url)
