"""Fetch one range of an object from its store, and check that exactly this range came.

S3 and web servers say which range of which version they sent; this is checked. If a server sends
more than was asked for, the rest is not read. Other stores are trusted to send ranges.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import CorruptError, UnsupportedError
from .filesystem import PATIENCE, StorePath, is_s3, is_web

_PIECE = 1 << 20  # bytes read at once
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
CHANGED = "the object was changed while it was read"


def fetch_range(place: StorePath, start: int, nbytes: int, total: int, etag: str) -> bytes:
    """Fetch at least one byte of an object of `total` bytes.

    `etag` is what it was known by when its size was told; it may be empty. Raises CorruptError if
    it is another object by now, and whatever its fsspec implementation raises.
    """
    if is_s3(place.fs) or is_web(place.fs):
        from fsspec.asyn import sync

        ask = _ask_s3 if is_s3(place.fs) else _ask_web
        wanted = _WantedRange(place, start, nbytes, total, etag)
        data: bytes = sync(place.fs.loop, ask, wanted)
    else:
        # what has no requests for ranges of its own would read far ahead, of each
        more = {} if place.fs.async_impl else {"cache_type": "none"}
        data = place.fs.cat_file(place.path, start=start, end=start + nbytes, **more)
        if len(data) > nbytes:
            raise UnsupportedError("its store can't send a part of it", path=place.url)
    if len(data) < nbytes:  # which is worth another try
        raise ConnectionError(f"{len(data):,} bytes arrived of {nbytes:,}")
    return data


class _WantedRange:
    """A range, and what is known of the object."""

    def __init__(self, place: StorePath, start: int, nbytes: int, total: int, etag: str) -> None:
        self.place, self.start, self.nbytes = place, start, nbytes
        self.total, self.etag = total, etag

    @property
    def header(self) -> str:
        """The range as an HTTP header."""
        return f"bytes={self.start}-{self.start + self.nbytes - 1}"

    def check(self, content_range: str | None, etag: str | None) -> None:
        """Raises unless this range is answered, and of this object."""
        if self.etag and etag and _strong(etag) != _strong(self.etag):
            raise CorruptError(CHANGED, path=self.place.url)
        if content_range is None:
            if self.nbytes == self.total:
                return
            raise UnsupportedError(
                "its server can't send a part of it",
                path=self.place.url,
                hint="download it, and give the file",
            )
        found = _CONTENT_RANGE.fullmatch(content_range.strip())
        if found is None or int(found[1]) != self.start:
            raise ConnectionError(f"{content_range!r} was answered to {self.header!r}")
        if found[2] not in ("*", str(self.total)):
            raise CorruptError(CHANGED, path=self.place.url)

    async def taken(self, read: Callable[[int], Awaitable[bytes]]) -> bytes:
        """Read the body of an answer. Raises ConnectionError if it is longer than the range."""
        pieces, count = list[bytes](), 0
        while piece := await read(_PIECE):
            pieces.append(piece)
            count += len(piece)
            if count > self.nbytes:
                raise ConnectionError(f"more than {self.nbytes:,} bytes arrived")
        return b"".join(pieces)


def _strong(etag: str) -> str:
    return etag.strip().removeprefix("W/").strip('"')


async def _ask_s3(wanted: _WantedRange) -> bytes:
    fs = wanted.place.fs
    bucket, key, version = fs.split_path(wanted.place.path)
    which = {"VersionId": version} if version else {}
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted.header, **which)
    body = answer["Body"]
    try:
        wanted.check(answer.get("ContentRange"), answer.get("ETag"))
        return await wanted.taken(body.read)
    finally:
        body.close()


async def _ask_web(wanted: _WantedRange) -> bytes:
    from aiohttp import ClientTimeout

    fs = wanted.place.fs
    session = await fs.set_session()
    options: dict[str, Any] = {
        "timeout": ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE),
        **fs.kwargs,
    }
    options["headers"] = {
        **options.get("headers", {}),
        "Range": wanted.header,
        "Accept-Encoding": "identity",
    }
    async with session.get(fs.encode_url(wanted.place.path), **options) as answer:
        answer.raise_for_status()
        wanted.check(answer.headers.get("Content-Range"), answer.headers.get("ETag"))
        return await wanted.taken(answer.content.read)
