"""Divide an upload within one store: the store itself copies unchanged parts.

    |  sent  |        copied        | sent |     copied     | sent |      parts of the object
    0       5 MiB                  pickle                directory

`upload_part_copy` makes a part of a range of another object, so these bytes never come here. A
part, except the last, has at least 5 MiB and at most 5 GiB, so bytes around a change are sent with
it. No checksum of copied bytes is computed here. The store copies only if the source still has the
ETag that was read; it returns the ETag of each part, and the ETag of the object must follow from
these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...plans.plan import Plan
from ...sources.filesystem import StorePath, is_s3
from ...sources.remote_object import RemoteObject
from ...sources.source import Source

_LEAST = 5 << 20  # least bytes of a part, except the last
_STEP = 64 << 20  # bytes that are copied by one request, if a few thousand are enough
_MOST_COPIES = 5_000


class StoreCopy(NamedTuple):
    """A part that the store copies from another of its objects."""

    source: RemoteObject
    source_at: int
    nbytes: int


class UploadPart(NamedTuple):
    """A part of an upload: `[start, end)` of the object."""

    start: int
    end: int
    copy: StoreCopy | None = None  #: None for a part that is sent


def parts_of(nbytes: int, part_nbytes: int) -> list[UploadPart]:
    """Return parts of equal size that are all sent; the last may be smaller."""
    return [UploadPart(at, min(nbytes, at + part_nbytes)) for at in range(0, nbytes, part_nbytes)]


def divide(
    plan: Plan, sources: Sequence[Source], store: StorePath, part_nbytes: int
) -> list[UploadPart] | None:
    """Return the parts of an upload, some copied by the store; None if it can copy no part."""
    if plan.reads_all or plan.gathers or plan.seal is not None or plan.source_checksums:
        return None
    found, done = list[UploadPart](), 0
    for start, copy in _unchanged(plan, sources, store):
        end = start + copy.nbytes
        since = start if start == done else max(start, done + _LEAST)
        if end - since < _LEAST:
            continue
        found += _sent(done, since, part_nbytes)
        found += _copied(since, end, copy, max(_STEP, -(-plan.nbytes // _MOST_COPIES)))
        done = end
    if not done:
        return None
    return [*found, *_sent(done, plan.nbytes, part_nbytes)]


def _unchanged(
    plan: Plan, sources: Sequence[Source], store: StorePath
) -> Iterator[tuple[int, StoreCopy]]:
    """Yield the ranges between the writes that the store can copy, in order."""
    writes = sorted((write.at, write.at + len(write.data)) for write in plan.writes if write.data)
    n = 0
    for copy in plan.copies:
        source = sources[copy.source]
        if not isinstance(source, RemoteObject) or not source.etag:
            continue
        if not is_s3(store.fs) or source.place.fs != store.fs:
            continue
        shift, at, end = copy.source_at - copy.at, copy.at, copy.at + copy.nbytes
        while n < len(writes) and writes[n][1] <= at:
            n += 1
        for low, high in (*writes[n:], (end, end)):
            stop = min(low, end)
            if stop > at:
                yield at, StoreCopy(source, at + shift, stop - at)
            at = max(at, high)
            if at >= end:
                break


def _sent(start: int, end: int, part_nbytes: int) -> Iterator[UploadPart]:
    """Yield sent parts of about equal size, so that none is too small."""
    count = -(-(end - start) // part_nbytes)
    for n in range(count):
        yield UploadPart(
            start + (end - start) * n // count, start + (end - start) * (n + 1) // count
        )


def _copied(start: int, end: int, copy: StoreCopy, step: int) -> Iterator[UploadPart]:
    first = copy.source_at + copy.nbytes - (end - start)
    for each in _sent(start, end, step):
        made = copy._replace(source_at=first + each.start - start, nbytes=each.end - each.start)
        yield each._replace(copy=made)
