"""Digests of objects, computed from the bytes as they pass: those that are sent, and those read."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from io import BytesIO

from .source import Source

_COLLECTED: ContextVar[PassingDigests | None] = ContextVar("_COLLECTED", default=None)


class PassingDigests:
    """The SHA-256 of objects that passed meanwhile, by their URLs."""

    def __init__(self) -> None:
        self.sent = dict[str, str]()  #: of those that were uploaded
        self._read = dict[str, RunningDigest]()

    def of_source(self, source: Source) -> str:
        """The SHA-256 of a source: what did not pass yet in its order is read."""
        return self._read.pop(source.path, RunningDigest()).finish(source)

    def reading(self, url: str) -> RunningDigest:
        """The digest of an object, to be told what of it is read."""
        return self._read.setdefault(url, RunningDigest())


class RunningDigest:
    """The SHA-256 of the first bytes of an object."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._nbytes = 0

    def add(self, start: int, data: bytes | memoryview) -> None:
        """Take bytes from an offset on into account, if they go on where the first ones end."""
        if start <= self._nbytes < start + len(data):
            self._sha256.update(memoryview(data)[self._nbytes - start :])
            self._nbytes = start + len(data)

    def finish(self, source: Source) -> str:
        """The digest of all of it, with what the source has more."""
        for at, data in source.chunks(self._nbytes, source.nbytes - self._nbytes):
            self.add(at, data)
        return self._sha256.hexdigest()


@contextlib.contextmanager
def collecting_digests(wanted: bool) -> Iterator[PassingDigests]:
    """Digests of what passes meanwhile; none if not `wanted`."""
    found = PassingDigests()
    token = _COLLECTED.set(found if wanted else None)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def wanted_digests() -> PassingDigests | None:
    """Where digests are collected, if they are; then all bytes have to pass."""
    return _COLLECTED.get()


def digest_parts(url: str, parts: Iterator[BytesIO]) -> Iterator[BytesIO]:
    """The parts of an object that is sent, as they are; its digest is known after the last one."""
    found = _COLLECTED.get()
    if found is None:
        yield from parts
        return
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part.getbuffer())
        yield part
        del part  # who took it may be done with it before there is another
    found.sent[url] = sha256.hexdigest()
