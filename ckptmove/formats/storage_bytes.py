"""Where the bytes of storages come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..graph.canonical import StorageSlice
from ..graph.draft import StorageBytes
from ..manifest.manifest import Extent, Storage
from ..plans.plan import Proof
from ..torch_pickle.streams import Container


def stored_bytes(container: Container, storage: Storage) -> StorageBytes:
    """Where the bytes of a storage come from."""
    if storage.extent is None and storage.nbytes:
        content = container.content(storage.id)
        return StorageBytes(
            id=storage.id,
            location=storage.location,
            dtype=storage.dtype,
            nbytes=len(content),
            content=content,
            big_endian=container.big_endian,
        )
    start, _, source = storage.extent or Extent(0, 0)
    return StorageBytes(  # by place, since there may be very many
        *(storage.id, storage.location, storage.dtype, storage.nbytes, source, start),
        container.crc32(storage.id),
        None,
        container.big_endian,
        None,
        _proofs(container, storage),
    )


def _proofs(container: Container, storage: Storage) -> Sequence[Proof]:
    """The checksums of a storage's parts, by the numbers that its files have among all."""
    proofs = container.proofs(storage.id)
    first = 0 if storage.extent is None else storage.extent.source
    return [each._replace(source=first + each.source) for each in proofs] if first else proofs


def bytes_of_part(
    key: str, cut: StorageSlice, origins: Mapping[str, Container], storages: Mapping[str, Storage]
) -> StorageBytes:
    """A part of a storage as one of its own."""
    whole = stored_bytes(origins[cut.storage], storages[cut.storage])
    content = whole.content
    return whole._replace(
        id=key,
        nbytes=cut.nbytes,
        start=whole.start + cut.start,
        crc32=0,
        proofs=(),
        content=None if content is None else content[cut.start : cut.start + cut.nbytes],
    )
