"""Read broken pickles, and broken files that `torch.save` wrote before zip.

    pickle, protocol, machine     three pickles that say nothing of the tensors
    pickle                        the object
    pickle                        the keys of the storages, in their order
    number, bytes                 of each storage

Of what is cut short, the storages at the start are there. Nothing in such files has a checksum.
"""

from __future__ import annotations

from ...manifest.dtypes import storage_element_nbytes
from ...pickles.nodes import List
from ...sources.source import Source
from ...torch_pickle.streams import Container, PickleStream
from ...torch_pickle.values.persistent_ids import StorageId
from ...zips.found_records import ProofLevel
from ..probe import Probe
from ..torch.legacy import start_of, starts
from .listing import ids_of, strict_storages, tensors_of
from .remains import Remains, StorageRemains

_COUNT_NBYTES = 8
_BEFORE = 3  # pickles before that of the object
_KEYS = b".\x80\x02]q"  # the end of a pickle, and the start of the pickle of keys
_LONGEST_LOOK = 64 << 20  # bytes in which it is searched
_MOST = 1_000  # checkpoints in a file
_CUT = "the file ends before it"


class _Broken(Container):
    """Pickles that may be broken."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe.source)
        self.session = probe.session
        self.folder = self.session.folder()
        self.is_whole = True

    def stream_at(self, at: int) -> PickleStream:
        stream = self.session.stream(self.source, at, broken=True)
        self.is_whole = self.is_whole and stream.is_whole
        return stream


def read_legacy(probe: Probe) -> Remains:
    """Read the remains of a file that `torch.save` wrote before zip."""
    container = _Broken(probe)
    found: dict[str, StorageRemains] = {}
    at: int | None = start_of(probe) or 0
    count = 0
    while at is not None and at < probe.source.nbytes and count < _MOST:
        if count and not _starts(container, at):
            container.warnings.append(f"{probe.source.nbytes - at:,} bytes follow the last storage")
            break
        folder = f"{container.folder}{count}/" if count else container.folder
        at, count = _read_one(container, at, folder, found), count + 1
    if len(container.roots) > 1:
        container.roots = [((n,), root) for n, (_, root) in enumerate(container.roots)]
    remains = _remains(container, "torch-legacy", probe)
    return Remains(
        remains.format,
        remains.tensors,
        {**remains.storages, **found},
        remains.files,
        names_complete=container.is_whole,
        warnings=container.warnings,
    )


def read_pickle(probe: Probe) -> Remains:
    """Read the remains of a plain pickle: the tensors in its complete byte strings."""
    container = _Broken(probe)
    at, count = 0, 0
    while at < probe.source.nbytes and count < _MOST and container.is_whole:
        stream = container.stream_at(at)
        if not stream.nbytes:
            break
        container.streams.append(stream)
        container.roots.append(((), stream.pickle.root))
        at, count = at + stream.nbytes, count + 1
    if len(container.roots) > 1:
        container.roots = [((n,), root) for n, (_, root) in enumerate(container.roots)]
    return _remains(container, "pickle", probe)


def _starts(container: _Broken, at: int) -> bool:
    return starts(container.source.read(at, min(32, container.source.nbytes - at)))


def _remains(container: _Broken, format: str, probe: Probe) -> Remains:
    storages = {
        key: StorageRemains(
            storage.nbytes,
            storage.nbytes,
            ProofLevel.NONE,
            storage.dtype,
            storage.location,
            storage.extent.start if storage.extent else 0,
            content=None if storage.extent else held.content(key),
            big_endian=held.big_endian,
        )
        for key, (storage, held) in strict_storages(container).items()
    }
    files = [probe.source] if isinstance(probe.source, Source) else []
    listed = tensors_of(container)
    return Remains(
        format,
        listed.tensors,
        {**storages, **listed.arrays},
        files,
        names_complete=container.is_whole,
        warnings=container.warnings,
    )


def _read_one(
    container: _Broken, at: int, folder: str, found: dict[str, StorageRemains]
) -> int | None:
    """Read one saved object; return the offset of its end, or None if that is unknown."""
    end: int | None = at
    for _ in range(_BEFORE):
        stream = container.stream_at(at)
        if not stream.is_whole:
            return None
        at += stream.nbytes
    stream = container.stream_at(at)
    container.streams.append(stream)
    container.roots.append(((), stream.pickle.root))
    ids = ids_of(stream.pickle.persistents, f"{folder}data/", legacy=True)
    container.ids.update(ids)
    by_key = {each.key: each for each in ids.values()}
    keys_at = at + stream.nbytes if stream.is_whole else _keys_behind(container, at, stream)
    for each in by_key.values():
        found[each.id] = _lost(each)
    if keys_at is None or keys_at >= container.source.nbytes:
        container.is_whole = container.is_whole and stream.is_whole
        return None
    keys = container.session.stream(container.source, keys_at, broken=True)
    root = keys.pickle.root
    if not isinstance(root, List):
        return None
    end = keys_at + keys.nbytes if keys.is_whole else None
    for key in root.items if end is not None else ():
        end = _take(container, str(key) if isinstance(key, str) else "", by_key, end, found)
        if end is None:
            break
    return end


def _keys_behind(container: _Broken, at: int, stream: PickleStream) -> int | None:
    """The offset where the keys of the storages seem to be, after a damaged pickle."""
    source = container.source
    start = min(source.nbytes, at + max(0, stream.pickle.nbytes - 1))
    part = source.read(start, min(_LONGEST_LOOK, source.nbytes - start))
    where = part.find(_KEYS)
    return None if where < 0 else start + where + 1


def _take(
    container: _Broken,
    key: str,
    by_key: dict[str, StorageId],
    at: int | None,
    found: dict[str, StorageRemains],
) -> int | None:
    """Record the storage of a key at an offset; return the offset of the next one, or None."""
    source, storage = container.source, by_key.get(key)
    if at is None or storage is None:
        return None  # its size is unknown
    start = at + _COUNT_NBYTES
    numel = -1
    if start <= source.nbytes:
        numel = int.from_bytes(source.read(at, _COUNT_NBYTES), "little", signed=True)
    element = 1 if storage.dtype is None else storage_element_nbytes(storage.dtype)
    if start <= source.nbytes and numel * element != storage.whole_nbytes:
        container.warnings.append(
            f"the storage {key!r:.60} and the pickle differ in its size: one of the two is damaged"
        )
    present = min(storage.whole_nbytes, max(0, source.nbytes - start))
    found[storage.id] = _lost(storage)._replace(present=present, start=start)
    return start + storage.whole_nbytes


def _lost(storage: StorageId) -> StorageRemains:
    return StorageRemains(
        storage.whole_nbytes,
        0,
        ProofLevel.NONE,
        storage.dtype,
        str(storage.location),
        why=_CUT,
    )
