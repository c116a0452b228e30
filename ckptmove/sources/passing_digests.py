"""Digests of objects, computed while their bytes are sent or read."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from io import BytesIO

from .source import Source

_COLLECTED: ContextVar[PassingDigests | None] = ContextVar("_COLLECTED", default=None)


class PassingDigests:
    """The SHA-256 of objects that were sent or read in a context, by URL."""

    def __init__(self) -> None:
        self.sent = dict[str, str]()  #: digests of uploaded objects
        self._read = dict[str, RunningDigest]()

    def of_source(self, source: Source) -> str:
        """Return the SHA-256 of a source; reads the bytes that were not yet read in order."""
        return self._read.pop(source.path, RunningDigest()).finish(source)

    def reading(self, url: str) -> RunningDigest:
        """Return the running digest of an object; `add` gets the bytes that are read."""
        return self._read.setdefault(url, RunningDigest())


class RunningDigest:
    """The SHA-256 of the first bytes of an object."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._nbytes = 0
        self._adding = threading.Lock()

    def add(self, start: int, data: bytes | memoryview) -> None:
        """Add bytes at an offset, if they continue the bytes so far."""
        with self._adding:
            if start <= self._nbytes < start + len(data):
                self._sha256.update(memoryview(data)[self._nbytes - start :])
                self._nbytes = start + len(data)

    def finish(self, source: Source) -> str:
        """Return the digest of the whole source, after reading the rest."""
        for at, data in source.chunks(self._nbytes, source.nbytes - self._nbytes):
            self.add(at, data)
        return self._sha256.hexdigest()


@contextlib.contextmanager
def collecting_digests(wanted: bool) -> Iterator[PassingDigests]:
    """A context that collects digests of objects that are sent or read; none if not `wanted`."""
    found = PassingDigests()
    token = _COLLECTED.set(found if wanted else None)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def wanted_digests() -> PassingDigests | None:
    """Return the present collection of digests, if any; then all bytes must pass through here."""
    return _COLLECTED.get()


def digest_parts(url: str, parts: Iterator[BytesIO]) -> Iterator[BytesIO]:
    """Pass on the parts of an uploaded object; its digest is known after the last part."""
    found = _COLLECTED.get()
    if found is None:
        yield from parts
        return
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part.getbuffer())
        yield part
        del part  # the caller may release it before the next part exists
    found.sent[url] = sha256.hexdigest()
