"""New content for a record of a zip: bytes, or a plan made from the old content."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from operator import itemgetter

from ..errors import CorruptError
from ..plans.crc32 import extend_crc32
from ..plans.plan import Checksum, Plan
from .archive import Archive
from .members import Record

#: A plan copies from the file that holds the zip, by offsets within that file.
Content = bytes | Plan

_STEP = 1 << 20


def nbytes_of(content: Content) -> int:
    """Return the length of the content."""
    return len(content) if isinstance(content, bytes) else content.nbytes


def checksum_of(archive: Archive, record: Record, content: Content) -> int:
    """Return the CRC-32 of a record's new content; for a plan, this reads the record.

    CorruptError if the record's own checksum is wrong: a new one would hide the damage.
    """
    if isinstance(content, bytes):
        return zlib.crc32(content)
    if not record.lacks_checksum:
        at = archive.data_at(record)
        found = _sum(_read(archive, at, record.nbytes))
        if found != record.crc32:
            raise CorruptError(f"the record {record.name!r} is damaged: its checksum is wrong")
    return _sum(_carried_out(archive, content))


def _sum(parts: Iterator[bytes]) -> int:
    crc32 = 0
    for part in parts:
        crc32 = extend_crc32(crc32, part)
    return crc32


def _carried_out(archive: Archive, plan: Plan) -> Iterator[bytes]:
    """Yield the output of a plan, from start to end."""
    start = archive.source.start or 0
    pieces: list[tuple[int, int, int, bytes | memoryview]] = [
        (check.at, check.nbytes, check.source_at - start, b"") for check in plan.checks()
    ]
    pieces += [(write.at, 0, 0, write.data) for write in plan.writes]
    for _, nbytes, source_at, data in sorted(pieces, key=itemgetter(0, 1)):
        yield bytes(data)
        yield from _read(archive, source_at, nbytes)


def _read(archive: Archive, at: int, nbytes: int) -> Iterator[bytes]:
    for done in range(0, nbytes, _STEP):
        yield archive.source.read(at + done, min(_STEP, nbytes - done))


def checksums_that_stay(
    archive: Archive, new: dict[str, Content], places: Mapping[str, int] | None = None
) -> Iterator[Checksum]:
    """Return the checksums of unchanged records, and of parts that plans keep of the others.

    `places`: the name of a record → the new offset of its content; by default, where it is.
    """
    records, start = archive.records, archive.source.start or 0
    for name, nbytes, crc32, old in records.checksums():
        if name not in new:
            old = old or archive.data_at(records[name])
            at = old if places is None else places[name]
            yield Checksum(at, nbytes, crc32, name, start + old if start else old)
    for name, content in new.items():
        if isinstance(content, Plan):
            at = archive.data_at(records[name]) if places is None else places[name]
            yield from (each._replace(at=at + each.at) for each in content.checksums)
