"""Digests of what is uploaded, computed from the bytes as they are sent."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from io import BytesIO

_COLLECTED: ContextVar[dict[str, str] | None] = ContextVar("_COLLECTED", default=None)


@contextlib.contextmanager
def collecting_digests(wanted: bool) -> Iterator[dict[str, str]]:
    """The SHA-256 of each object that is uploaded meanwhile, by its URL; none if not `wanted`."""
    found = dict[str, str]()
    token = _COLLECTED.set(found if wanted else None)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def digests_wanted() -> bool:
    """Whether someone collects digests, for which all bytes have to come through here."""
    return _COLLECTED.get() is not None


def digested(url: str, parts: Iterator[BytesIO]) -> Iterator[BytesIO]:
    """The parts of an object, as they are; its digest is known after the last one."""
    found = _COLLECTED.get()
    if found is None:
        yield from parts
        return
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part.getbuffer())
        yield part
        del part  # who took it may be done with it before there is another
    found[url] = sha256.hexdigest()
