"""Sum ranges of sources, and use what was summed while they were read for something else."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from ..errors import CorruptError
from ..plans.crc32 import extend_crc32
from ..plans.plan import Proof, SourceChecksum
from .source import Source


def read_before(sources: Sequence[Source], proof: SourceChecksum | Proof) -> tuple[int, int]:
    """Return how far a range of a source was read, and the CRC-32 of those bytes."""
    source, at, nbytes = sources[proof.source], proof.source_at, proof.nbytes
    found = (each.read_before(source, at, nbytes) for each in sources)
    return max(found, key=itemgetter(0))


def crc32_of(source: Source, start: int, nbytes: int, crc32: int = 0) -> int:
    """Return the CRC-32 of a range of a source, continuing a given CRC-32."""
    for _, data in source.chunks(start, nbytes):
        crc32 = extend_crc32(crc32, data)
    return crc32


def damage_error(name: str, source: Source) -> CorruptError:
    """Return the error for a record with a wrong checksum."""
    return CorruptError(f"the record {name!r} is damaged: its checksum is wrong", path=source.path)
