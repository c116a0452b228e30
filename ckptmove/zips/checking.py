"""Read every record of a zip and check its CRC-32, which torch itself never does."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from .archive import DEFLATED, Archive
from .members import Record

_STEP = 1 << 20  # bytes read at once


def damage(archive: Archive, report: Callable[[int], object]) -> Iterator[str]:
    """What is wrong with the bytes of records, a sentence each. Memory does not grow with them.

    `report` is called with how many bytes were read since its last call.
    """
    for record in archive.records.values():
        crc32, nbytes, whole = _read(archive, record, report)
        if not whole or nbytes != record.nbytes:
            yield f"the record {record.name!r} does not inflate to its declared size"
        elif not record.unchecksummed and crc32 != record.crc32:
            yield f"the record {record.name!r} is damaged: its checksum is wrong"


def _read(
    archive: Archive, record: Record, report: Callable[[int], object]
) -> tuple[int, int, bool]:
    """CRC-32 and size of the content, and whether it ends where it should."""
    start = archive.data_at(record)
    machine = zlib.decompressobj(-zlib.MAX_WBITS) if record.method == DEFLATED else None
    crc32 = nbytes = 0
    for done in range(0, record.stored_nbytes, _STEP):
        step = min(_STEP, record.stored_nbytes - done)
        data = archive.source.read(start + done, step)
        report(step)
        while data:
            content = data
            if machine is not None:
                try:
                    content = machine.decompress(data, _STEP)
                except zlib.error:
                    return crc32, nbytes, False
            crc32, nbytes = zlib.crc32(content, crc32), nbytes + len(content)
            if nbytes > record.nbytes:
                return crc32, nbytes, False
            data = b"" if machine is None else machine.unconsumed_tail
    return crc32, nbytes, machine is None or machine.eof
