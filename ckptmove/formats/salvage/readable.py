"""Take the contents of a readable checkpoint, and check them by its checksums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...errors import InputError
from ...manifest.manifest import Storage
from ...plans.plan import Proof as PartProof
from ...sources import place_of
from ...sources.checksums import crc32_of
from ...sources.joined import JoinedFiles
from ...sources.source import Source
from ...torch_pickle.streams import Container
from ...zips.archive import Archive
from ...zips.found_records import ProofLevel
from ..archives.zip_container import ArchiveContainer
from ..checkpoint import Checkpoint
from ..diagnosis import ending_in_zeros
from ..folders.parts import PartsContainer
from .listing import of_contents, of_entry, strict_storages
from .remains import Remains, StorageRemains


def read_whole(found: Checkpoint) -> Remains:
    """The contents of a checkpoint, with each storage checked.

    Only compressed bytes stay in memory.
    """
    storages = {
        key: _checked(found.files, storage, held)
        for key, (storage, held) in strict_storages(found.container).items()
    }
    listed = of_contents(found.contents)
    tensors = [*(of_entry(each, "") for each in found.raw()), *listed.tensors]
    proven = _proven_storages(found.container)
    names_proven = _is_proven(found.container) or all(e.storage in proven for e in tensors)
    # a readable file has no other damage than its checksums and its reader report
    damage = {
        place_of(each.path).name: "" if names_proven else ending_in_zeros(each)
        for each in found.files
        if not isinstance(each, JoinedFiles)
    }
    return Remains(
        found.format,
        [each._replace(proven=each.storage in proven) for each in tensors],
        {**storages, **listed.arrays},
        found.files,
        names_proven=names_proven,
        warnings=list(dict.fromkeys((*found.notes, *found.manifest.warnings))),
        damage=damage,
    )


def _checked(files: Sequence[Source], storage: Storage, held: Container) -> StorageRemains:
    """The bytes of a storage, and whether its checksum is right."""
    remains = StorageRemains(
        storage.nbytes,
        storage.nbytes,
        ProofLevel.NONE,
        storage.dtype,
        storage.location,
        big_endian=held.big_endian,
    )
    if storage.extent is None:
        if not storage.nbytes:
            return remains
        try:
            content = held.content(storage.id)
        except InputError as error:
            return remains._replace(present=0, proof=ProofLevel.WRONG, why=str(error))
        proof = ProofLevel.RIGHT if _is_proven(held) else ProofLevel.NONE
        return remains._replace(content=content, proof=proof, nbytes=len(content))
    start, nbytes, number = storage.extent
    remains = remains._replace(start=start, source=number)
    crc32 = held.crc32(storage.id)
    sums = held.proofs(storage.id)  # for a tensor that ranks divided
    if any(_is_wrong(files[each.source], each) for each in sums):
        return remains._replace(proof=ProofLevel.WRONG)
    if not crc32:
        return remains._replace(
            proof=ProofLevel.NONE if nbytes or not _is_proven(held) else ProofLevel.RIGHT
        )
    if crc32_of(files[number], start, nbytes) != crc32:
        return remains._replace(proof=ProofLevel.WRONG)
    return remains._replace(proof=ProofLevel.RIGHT, crc32=crc32)


@lru_cache(256)
def _is_wrong(source: Source, proof: PartProof) -> bool:
    """Whether a part of a file differs from its checksum; many tensors may be in one part."""
    return crc32_of(source, proof.source_at, proof.nbytes) != proof.crc32


def _proven_storages(container: Container) -> set[str]:
    """The storages in those files whose checksums prove their whole contents."""
    if isinstance(container, PartsContainer):
        return set().union(*map(_proven_storages, container.parts.values()))
    if not _is_proven(container):
        return set()
    return {key for each in container.everything() for key in each.storages}


def _is_proven(container: Container) -> bool:
    """Whether checksums prove the contents of a container and of all nested in it."""
    return all(_has_checksums(each) for each in container.everything())


def _has_checksums(container: Container) -> bool:
    if not isinstance(container, ArchiveContainer):
        return False
    archive: Archive = container.archive
    return not any(record.lacks_checksum for record in archive.records.values())
