"""torch-legacy: what `torch.save` wrote from 0.2 to 1.5, and still writes on request.

    pickle   0x1950a86a20f9469cfc6c
    pickle   1001, the version of the protocol
    pickle   a dict about the machine that wrote it
    pickle   the object; tensors name their storages
    pickle   the list of storage keys
    then for each key, in that order: int64 number of elements, and the bytes of the storage

Nothing is aligned and nothing has a checksum, so bytes are compared after copying. Relocating
changes only device tags in the object's pickle; the bytes after it move if its length changes.
torch writes this format with `_use_new_zipfile_serialization=False`. Integers are little-endian on
every machine.

torch unpickles all five: a file is refused if any pickle other than the object's names anything to
import.

Sources: torch/serialization.py (`_legacy_save`, `_legacy_load`); `writeFileRaw` of
torch/csrc/StorageMethods.cpp and its kin.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...errors import CorruptError, UnsupportedError
from ...manifest.dtypes import storage_element_nbytes
from ...manifest.manifest import Extent
from ...pickles.nodes import Dict, List
from ...pickles.reached_globals import names_reached
from ...torch_pickle.callables.uses import not_surely_harmless
from ...torch_pickle.streams import Container, LocationEdits, PickleStream
from ...torch_pickle.values.persistent_ids import StorageId, storage_ids, storages_of
from ..base import PickledFormat, bytes_behind, runs_nothing
from ..checkpoint import Carries
from ..probe import Probe

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_MAGIC_BYTES = _MAGIC.to_bytes(10, "little")
_MAGIC_HEADS = (b"\x80\x02\x8a\x0a", b"\x80\x03\x8a\x0a", b"\x80\x04", b"\x80\x05")
_MAGIC_TEXT = f"L{_MAGIC}L\n.".encode()  # in protocols 0 and 1
_COUNT_NBYTES = 8
_HEAD_NBYTES = 32  # the magic number ends within so many bytes
_LATEST_START = 1 << 16  # torch's data must start within so many bytes of the start of the file
_MOST = 10_000  # checkpoints in one file


class TorchLegacy(PickledFormat):
    """The format of `torch.save` before zip."""

    name = "torch-legacy"
    suffixes = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
    summary = "torch.save, torch 0.2 to 1.5, or with `_use_new_zipfile_serialization=False`"
    refused = "nothing"
    carries = Carries(
        devices=True,
        aliases=True,
        strides=True,
        objects=True,
        dtypes="all of torch; newer ones than 1.5 had are written, but torch cannot load them",
    )

    def sniff(self, probe: Probe) -> bool:
        """Whether it starts with a pickle of torch's magic number."""
        return starts(probe.head)

    def open(self, probe: Probe) -> LegacyContainer:
        """Read the pickles and where the storages lie."""
        return LegacyContainer(probe)


class LegacyAfterPrefix(TorchLegacy):
    """The same format, after other bytes at the start of the file."""

    def sniff(self, probe: Probe) -> bool:
        """Whether a pickle of torch's magic number starts within the first bytes."""
        found = probe.archive is None and start_of(probe) is not None
        return found and runs_nothing(probe)


def starts(head: bytes) -> bool:
    """Whether bytes are the start of such a file."""
    return head.startswith(_MAGIC_TEXT) or (
        head.startswith(_MAGIC_HEADS) and _MAGIC_BYTES in head[:_HEAD_NBYTES]
    )


def start_of(probe: Probe) -> int | None:
    """The offset where torch's data starts: a program may have written other bytes before it."""
    head = probe.head
    if starts(head):
        return 0
    source = probe.source
    head = source.read(0, min(source.nbytes, _LATEST_START))
    found = (head.find(magic + _MAGIC_BYTES) for magic in _MAGIC_HEADS[:2])
    return min((at for at in found if at >= 0), default=None)


class LegacyContainer(Container):
    """Five pickles and the storages; repeated if several objects were saved to one file."""

    def __init__(self, probe: Probe) -> None:
        """Read the pickles, and the size of each storage."""
        super().__init__(probe.source)
        self.session = probe.session
        self.folder = f"{self.session.folder()}data/"
        self._extents: dict[str, Extent] = {}
        self.reached: list[str] = []  # names that unpickling the bytes behind the end would import
        start = start_of(probe) or 0
        if start:
            self.warnings.append(f"{start:,} bytes precede what torch saved")
        end = self._read(start, self.folder)
        while end < self.source.nbytes and self._starts_again(end):
            if len(self.streams) == _MOST:
                raise UnsupportedError(f"it holds more than {_MOST:,} checkpoints")
            end = self._read(end, f"{self.folder}{len(self.streams)}/")
        if len(self.roots) > 1:
            self.roots = [((n,), root) for n, (_, root) in enumerate(self.roots)]
        if end < self.source.nbytes:
            self.warnings.append(bytes_behind(self.source.nbytes - end, "the last storage"))
            self.reached = names_reached(self.source, probe.session.budget, end)
        self.storages = storages_of(self.ids.values(), partial(map, self._extent))
        self.writer = self._writer(self.streams[0])

    def _starts_again(self, at: int) -> bool:
        head = self.source.read(at, min(_HEAD_NBYTES, self.source.nbytes - at))
        return starts(head)

    def _read(self, at: int, folder: str) -> int:
        """Read the object that was saved at an offset; return the offset of its end."""
        session = self.session
        magic = session.plain(self.source, at)
        protocol = session.plain(self.source, at + magic.nbytes)
        if magic.pickle.root != _MAGIC:
            raise CorruptError("the magic number at its start is wrong")
        if protocol.pickle.root != _PROTOCOL:
            raise UnsupportedError(f"its protocol is not {_PROTOCOL}")
        machine = session.plain(self.source, protocol.start + protocol.nbytes)
        if not isinstance(machine.pickle.root, Dict):  # torch reads this dict, but does not use it
            raise CorruptError("the third pickle of the file should be a dict")
        stream = session.stream(self.source, machine.start + machine.nbytes)
        keys = session.plain(self.source, stream.start + stream.nbytes)
        if stream.pickle.textual:
            raise UnsupportedError("its pickle has protocol 0, which torch can't load")
        self.streams.append(stream)
        self.roots.append(((), stream.pickle.root))
        ids = storage_ids(stream.pickle.persistents, folder, legacy=True)
        self.ids.update(ids)
        return self._find_storages(keys, {each.key: each for each in ids.values()})

    def _find_storages(self, keys: PickleStream, by_key: dict[str, StorageId]) -> int:
        """Record the extent of each storage; return the offset where the last one ends."""
        root = keys.pickle.root
        if not isinstance(root, List):
            raise CorruptError("the list of storages is not a list")
        at, listed = keys.start + keys.nbytes, set[str]()
        for key in root.items:
            if not isinstance(key, str) or str(key) in listed:
                raise CorruptError("the list of storages is malformed")
            listed.add(str(key))
            storage = by_key.get(str(key))
            if storage is None:
                raise CorruptError(f"the storage {str(key)!r} is listed but never used")
            numel = int.from_bytes(self.source.read(at, _COUNT_NBYTES), "little", signed=True)
            element = 1 if storage.dtype is None else storage_element_nbytes(storage.dtype)
            if numel < 0 or numel * element != storage.whole_nbytes:
                raise CorruptError(
                    f"the storage {storage.key!r} should have "
                    f"{storage.whole_nbytes:,} bytes and has {numel * element:,}"
                )
            at += _COUNT_NBYTES
            if at + storage.whole_nbytes > self.source.nbytes:
                raise CorruptError(f"the storage {storage.key!r} is truncated")
            self._extents[storage.id] = Extent(at, storage.whole_nbytes)
            at += storage.whole_nbytes
        return at

    def _extent(self, storage: StorageId) -> Extent | None:
        found = self._extents.get(storage.id)
        if found is None:
            raise CorruptError(f"the storage {storage.key!r} is missing")
        start = self.source.start
        return None if start is None else Extent(start + found.start, found.nbytes)

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        yield from not_surely_harmless(self.reached)

    def content(self, storage: str) -> bytes:
        extent = self._extents[storage]
        return self.source.read(extent.start, extent.nbytes)

    def frame(self, spelling: LocationEdits | None = None) -> object:
        """The order of the storages."""
        return list(self._extents)

    def _writer(self, stream: PickleStream) -> str:
        """The version of torch that wrote the file, judged by what only some versions write."""
        names = {name.qualname for name in stream.pickle.globals}
        python = ", Python 2" if stream.pickle.python2 else ""
        if "torch._utils._rebuild_tensor" in names:
            return f"torch 0.2 to 0.3{python}"
        if python:
            return f"torch 0.4 to 1.4{python}"
        return "torch 0.4 to 1.5, or newer when asked for this format"
