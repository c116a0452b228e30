"""List all objects below a prefix in a store, and read small objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..errors import InputError
from .fetch_pool import Fetchers, result_of
from .filesystem import Missing, info_of, place_of, size_in, stamp_of, with_retries

_T = TypeVar("_T")
_R = TypeVar("_R")
_AT_ONCE = 16  # requests


class Listed(NamedTuple):
    """An object in a tree.

    Attributes:
        name: relative to the tree, with `/` between its parts.
        path: its URL.
        nbytes: its size.
        stamp: a text that changes if the object does.
    """

    name: str
    path: str
    nbytes: int
    stamp: str


def tree(url: str) -> list[Listed]:
    """Every object below a prefix, in the order of names.

    Raises:
        Missing: nothing is there.
        InputError: it can't be listed.
    """
    place = place_of(url)
    root = place.path.rstrip("/")

    def find() -> Mapping[str, Mapping[str, Any]]:
        place.fs.invalidate_cache()
        found: Mapping[str, Mapping[str, Any]] = place.fs.find(root, detail=True)
        return found

    within, base = f"{root}/", url.rstrip("/")
    listed = list[Listed]()
    for path, about in with_retries(find, url).items():
        if path.startswith(within) and about.get("type") != "directory":
            name = path[len(within) :]
            nbytes = size_in(about)
            listed.append(Listed(name, f"{base}/{name}", nbytes, stamp_of(about)))
    if not listed:
        raise Missing("can't be read: there is nothing below it", path=url)
    return sorted(listed)


def facts(url: str) -> tuple[int, str]:
    """The size and the stamp of an object.

    Raises:
        InputError: there is no such object, or it can't be told.
    """
    about = info_of(place_of(url))
    return size_in(about), stamp_of(about)


def many(call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
    """What a call gives for each, in their order; several are asked for at once.

    Raises:
        Exception: what any call raised, at once: no call that is on its way is waited for.
    """
    fetchers, coming = Fetchers[_R](_AT_ONCE), deque[Future[_R]]()
    try:
        for each in given:
            coming.append(fetchers.submit(partial(call, each)))
            if len(coming) > 2 * _AT_ONCE:
                yield result_of(coming.popleft(), coming)
        while coming:
            yield result_of(coming.popleft(), coming)
    finally:
        fetchers.close()


def small(url: str, most: int) -> bytes:
    """The content of a small object.

    Raises:
        InputError: it can't be read, or has more than `most` bytes.
    """
    place = place_of(url)
    data: bytes = with_retries(lambda: place.fs.cat_file(place.path, start=0, end=most + 1), url)
    if len(data) > most:
        raise InputError(f"has more than {most:,} bytes", path=url)
    return data
