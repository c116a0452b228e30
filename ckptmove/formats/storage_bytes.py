"""Locate the bytes of storages."""

from __future__ import annotations

from collections.abc import Mapping

from ..graph.canonical import StorageSlice
from ..graph.draft import StorageBytes
from ..manifest.manifest import Extent, Storage
from ..torch_pickle.streams import Container


def stored_bytes(container: Container, storage: Storage) -> StorageBytes:
    """The location of a storage's bytes.

    Or the bytes themselves, if they are not in a file as is.
    """
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
    proofs = container.proofs(storage.id)
    if source and proofs:  # file numbers as in the whole checkpoint
        proofs = [each._replace(source=source + each.source) for each in proofs]
    fields = (
        *(storage.id, storage.location, storage.dtype, storage.nbytes, source, start),
        container.crc32(storage.id),
        None,
        container.big_endian,
        None,
        proofs,
    )
    return tuple.__new__(StorageBytes, fields)  # fast, as there may be very many storages


def bytes_of_part(
    key: str, cut: StorageSlice, origins: Mapping[str, Container], storages: Mapping[str, Storage]
) -> StorageBytes:
    """The location of the bytes of a part of a storage, as a separate storage."""
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
