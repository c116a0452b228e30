"""Remember what stores told of objects, so that each is asked about once for an item or a plan.

A verb asks several times whether something is where it will write; a plan needs the size and the
ETag of each of thousands of objects, and a listing tells a thousand at once. What is remembered may
be out of date: who reads an object checks its ETag with each answer, and who writes one does it
only where nothing is, if the store can promise that.
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
_FRESH = 5.0  # seconds for which one look tells what is there
_KEPT = 32 << 20  # bytes of small objects that are kept for who reads them within that time
_FROM_STAMP = re.compile(r"size=(\d+) ETag=(\S+)")
_KNOWN: ContextVar[KnownObjects | None] = ContextVar("_KNOWN", default=None)


class KeptObjects:
    """Small objects that were read whole a moment ago, each for one more reader."""

    def __init__(self) -> None:
        self._found = dict[str, tuple[float, str, bytes]]()
        self._left = _KEPT

    def put(self, url: str, stamp: str, data: bytes) -> None:
        """Keep an object, if there is room."""
        if url not in self._found and len(data) <= self._left:
            self._left -= len(data)
            self._found[url] = time.monotonic() + _FRESH, stamp, data

    def take(self, url: str, stamp: str) -> bytes | None:
        """What was read of this version of an object, if that was just now."""
        until, of, data = self._found.pop(url, (0.0, "", b""))
        self._left += len(data)
        return data if of == stamp and time.monotonic() < until else None


class KnownObjects:
    """What stores told of objects, by their URLs; None where nothing is."""

    def __init__(self) -> None:
        #: up to which size an object is fetched whole by what reads any of it
        self.whole_nbytes = 0
        #: objects that are being fetched whole, for who opens them next, by their URLs
        self.coming: dict[str, Future[bytes]] = {}
        #: small objects that were just read, for what is done next
        self.kept = KeptObjects()
        #: what is remembered around it, for which what a listing lacks is not there
        self.around: KnownObjects | None = None
        self._seen: dict[str, tuple[float, About | None]] = {}
        self._listed: dict[str, dict[str, About]] = {}  # of prefixes, all that is below
        self._complete: dict[str, float] = {}  # until when nothing else is below a prefix

    def find(self, url: str) -> tuple[bool, About | None]:
        """Whether it is known what is there, and what."""
        url = url.rstrip("/")
        if url in self._seen:
            until, about = self._seen[url]
            return time.monotonic() < until, about
        for base in self._listed:
            if url == base:
                return bool(self._listed[base]), _FOLDER
            if url.startswith(f"{base}/"):
                return True, self._listed[base].get(url[len(base) + 1 :])
        return self.around is not None and self.around.lacks(url), None

    def lacks(self, url: str) -> bool:
        """Whether a listing that was made just now has neither an object nor a folder there."""
        return any(
            time.monotonic() < until
            and url.startswith(f"{base}/")
            and url[len(base) + 1 :] not in self._listed[base]
            for base, until in self._complete.items()
        )

    def below(self, url: str) -> dict[str, About] | None:
        """All objects below a URL by their relative names, if they were listed."""
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
        """Remember what is there now."""
        self._seen[url.rstrip("/")] = time.monotonic() + seconds, about

    def forget(self, url: str) -> None:
        """Have the store asked again what is there."""
        self.put(url, None, 0.0)

    def put_stamp(self, url: str, stamp: str) -> bool:
        """Remember an object by its stamp, if that tells enough to find out that it is another."""
        found = _FROM_STAMP.fullmatch(stamp)
        if found is not None:
            about = {"type": "file", "size": int(found[1]), "ETag": found[2]}
            self.put(url, about, float("inf"))
        return found is not None

    def put_listing(
        self, url: str, found: Iterable[tuple[str, About]], *, exclusive: bool = False
    ) -> None:
        """Remember all that is below a URL, by relative names.

        `exclusive`: the store writes only where nothing is, whatever came there meanwhile.
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
    """Remember what is told of objects meanwhile, within this thread and what it starts.

    Of what is remembered around it, only objects that are `kept` are known, and for a moment what
    is not there.
    """
    known, around = KnownObjects(), _KNOWN.get()
    if around is not None:
        known.kept, known.around = around.kept, around
    with recalling(known):
        yield known


@contextlib.contextmanager
def recalling(known: KnownObjects) -> Iterator[None]:
    """Go on with what was remembered."""
    token = _KNOWN.set(known)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_objects() -> KnownObjects | None:
    """What is remembered, if anything is."""
    return _KNOWN.get()


def known_about(url: str) -> About | None:
    """What is remembered of the object or folder there."""
    known = _KNOWN.get()
    return None if known is None else known.find(url)[1]


def look(place: StorePath, ask: Callable[[], About | None] | None = None) -> About | None:
    """The store's entry of what is at a place, an object or a folder; None if nothing is.

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
    """As `look`, past what is remembered. Raises what fsspec raises, such as FileNotFoundError."""
    place.fs.invalidate_cache()
    if is_s3(place.fs):
        with contextlib.suppress(PermissionError, _Unclear):  # who may not list may ask for one
            return _listed_at(place)
    found: About = place.fs.info(place.path)
    return found


class _Unclear(Exception):
    """A listing does not tell what is at a place."""


def _listed_at(place: StorePath) -> About | None:
    """What is at a place by one request: the object, and all of its folder that begins as it does.

    `info` of s3fs takes two where nothing is.
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
