"""Remember entries of objects, so that each is requested once per item or plan.

A verb checks several times whether its destination exists; a plan needs the size and the ETag of
thousands of objects, and a listing returns a thousand at once. Remembered entries may be out of
date: a reader of an object checks its ETag with each answer, and a writer creates it only if the
name is free, where the store can promise that.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

from .filesystem import Missing, StorePath, is_s3, with_retries

About = Mapping[str, Any]
_FOLDER: About = {"type": "directory", "size": 0}
_FRESH = 5.0  # seconds for which an entry counts as current
_KEPT = 32 << 20  # bytes of small objects that are kept for a second reader within that time
_FROM_STAMP = re.compile(r"size=(\d+) ETag=(\S+)")
_KNOWN: ContextVar[KnownObjects | None] = ContextVar("_KNOWN", default=None)


class KeptObjects:
    """Small objects that were just read whole, each kept for one more reader."""

    def __init__(self) -> None:
        self._found = dict[str, tuple[float, str, bytes]]()
        self._left = _KEPT

    def put(self, url: str, stamp: str, data: bytes) -> None:
        """Keep an object, if there is room."""
        if url not in self._found and len(data) <= self._left:
            self._left -= len(data)
            self._found[url] = time.monotonic() + _FRESH, stamp, data

    def take(self, url: str, stamp: str) -> bytes | None:
        """Return the bytes of this version of an object, if it was just read."""
        until, of, data = self._found.pop(url, (0.0, "", b""))
        self._left += len(data)
        return data if of == stamp and time.monotonic() < until else None


class KnownObjects:
    """Entries of objects by URL; None for a missing object."""

    def __init__(self) -> None:
        #: objects up to this size are fetched whole at the first read
        self.whole_nbytes = 0
        #: objects that are being fetched whole for the next reader, by URL
        self.coming: dict[str, Future[bytes]] = {}
        #: small objects that were just read, for the next step
        self.kept = KeptObjects()
        #: the enclosing memory, whose listings show which objects are missing
        self.around: KnownObjects | None = None
        self._seen: dict[str, tuple[float, About | None]] = {}
        self._listed: dict[str, dict[str, About]] = {}  # by prefix: all entries below
        self._complete: dict[str, float] = {}  # prefix → end of validity

    def find(self, url: str) -> tuple[bool, About | None]:
        """Return whether the entry of a URL is known, and the entry."""
        url = url.rstrip("/")
        if url in self._seen:
            until, about = self._seen[url]
            return time.monotonic() < until, about
        for base in self._listed:
            if url == base:
                return (True, _FOLDER) if self._listed[base] else (False, None)
            if url.startswith(f"{base}/"):
                return True, self._listed[base].get(url[len(base) + 1 :])
        return self.around is not None and self.around.lacks(url), None

    def lacks(self, url: str) -> bool:
        """Whether a recent listing has neither an object nor a folder there."""
        return any(
            time.monotonic() < until
            and url.startswith(f"{base}/")
            and url[len(base) + 1 :] not in self._listed[base]
            for base, until in self._complete.items()
        )

    def below(self, url: str) -> dict[str, About] | None:
        """Return all objects below a URL by their relative names, if they were listed."""
        url = url.rstrip("/")
        for base, found in self._listed.items():
            if url == base or url.startswith(f"{base}/"):
                within = f"{url}/"[len(base) + 1 :]
                return {
                    name[len(within) :]: about
                    for name, about in found.items()
                    if name.startswith(within) and about is not _FOLDER
                }
        return None

    def put(self, url: str, about: About | None, seconds: float = _FRESH) -> None:
        """Remember the present entry of a URL."""
        self._seen[url.rstrip("/")] = time.monotonic() + seconds, about

    def forget(self, url: str) -> None:
        """Forget the entry of a URL, so that the store is asked again."""
        self.put(url, None, 0.0)

    def put_stamp(self, url: str, stamp: str) -> bool:
        """Remember an object by its stamp, if the stamp can show that it was replaced."""
        found = _FROM_STAMP.fullmatch(stamp)
        if found is not None:
            about = {"type": "file", "size": int(found[1]), "ETag": found[2]}
            self.put(url, about, float("inf"))
        return found is not None

    def put_listing(
        self, url: str, found: Iterable[tuple[str, About]], *, exclusive: bool = False
    ) -> None:
        """Remember all entries below a URL, by relative names.

        `exclusive`: the store creates an object only if the name is free at that moment.
        """
        below = dict(found)
        folders = dict[str, About]()
        for name in below:
            while (name := name.rpartition("/")[0]) and name not in folders:
                folders[name] = _FOLDER
        self._listed[url.rstrip("/")] = folders | below
        if exclusive:
            self._complete[url.rstrip("/")] = time.monotonic() + _FRESH


@contextlib.contextmanager
def remembering() -> Iterator[KnownObjects]:
    """A context that remembers entries of objects, in this thread and threads it starts.

    From an enclosing context, only `kept` objects are known, and for a moment missing objects.
    """
    known, around = KnownObjects(), _KNOWN.get()
    if around is not None:
        known.kept, known.around = around.kept, around
    with recalling(known):
        yield known


@contextlib.contextmanager
def recalling(known: KnownObjects) -> Iterator[None]:
    """A context that continues with an existing memory."""
    token = _KNOWN.set(known)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_objects() -> KnownObjects | None:
    """Return the present memory, if there is one."""
    return _KNOWN.get()


def known_about(url: str) -> About | None:
    """Return the remembered entry of an object or folder."""
    known = _KNOWN.get()
    return None if known is None else known.find(url)[1]


def look(place: StorePath, ask: Callable[[], About | None] | None = None) -> About | None:
    """Return the store's entry of an object or folder at a place; None if there is none.

    `ask` asks the store, as `look_now` does. Raises as `with_retries`.
    """
    known = _KNOWN.get()
    if known is not None:
        is_known, about = known.find(place.url)
        if is_known:
            return about
    found: About | None = None
    with contextlib.suppress(Missing):
        found = with_retries(lambda: look_now(place), place.url) if ask is None else ask()
    if known is not None:
        known.put(place.url, found)
    return found


def look_now(place: StorePath) -> About | None:
    """As `look`, without the memory. Raises what fsspec raises, such as FileNotFoundError."""
    place.fs.invalidate_cache()
    if is_s3(place.fs):
        with contextlib.suppress(PermissionError, _Unclear):  # reading may still be allowed
            return _listed_at(place)
    found: About = place.fs.info(place.path)
    return found


class _Unclear(Exception):
    """Raised if a listing does not show what is at a place."""


def _listed_at(place: StorePath) -> About | None:
    """Look up a place by one request: a listing of all names that begin with its path.

    For a missing object, `info` of s3fs needs two requests.
    """
    bucket, key, version = place.fs.split_path(place.path)
    if not key or version:
        raise _Unclear
    answer = place.fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=key, Delimiter="/")
    for each in answer.get("Contents", ()):
        if each["Key"] == key:
            return {**each, "type": "file", "size": each["Size"], "name": place.path}
    if any(each["Prefix"] == f"{key}/" for each in answer.get("CommonPrefixes", ())):
        return _FOLDER
    if answer.get("IsTruncated"):
        raise _Unclear
    return None
