"""torch-zip: what `torch.save` writes since 1.6.

    P/data.pkl            the object, a pickle of protocol 2; tensors name their storages
    P/.format_version     "1", since 2.7 or so; then offsets of storages may be computed by torch
    P/.storage_alignment  "64"
    P/byteorder           "little" or "big"
    P/data/0 … N-1        the bytes of each storage
    P/version             "3\\n"
    P/.data/serialization_id
    P/.data/ckptmove_metadata.json    what safetensors said of the whole; torch passes over it

`P` is the file's stem at the time of saving. Relocating changes device tags in `data.pkl` alone: if
the new pickle is as long as the old one, a clone of the file is patched; else the zip is laid out
anew, as torch would have. `.data/serialization_id` is kept either way: it is an identity that
nothing checks, and the tensors it stands for are the same.

Sources: torch/serialization.py (`_save`, `_load`); caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from ...errors import UnsupportedError, WriteError
from ...graph.draft import CheckpointGraph, Pieces, StorageBytes
from ...graph.edit.callables import names_are_harmless
from ...graph.fill import fill
from ...graph.reach import nodes_of
from ...manifest.other_records import RecordKind
from ...pickles.emit import Emitter
from ...pickles.nodes import Persistent
from ...pickles.opcodes.plain_tensors import StorageReference
from ...plans.plan import CrcRange
from ...reports.convert import Loss
from ...sources.source import Readable
from ...zips.archive import Archive
from ...zips.checking import holds_patched
from ..archives.zip_container import ZipContainer, prefix_of
from ..base import PickledFormat, WritableFormat
from ..checkpoint import Carries
from ..probe import Probe
from ..safetensors.metadata import RECORD, metadata_record, read_metadata, still_true
from ..session import ReadSession
from ..writing import WriteOptions, WritePlan, assemble
from .frame import Frame

_LONGEST_NUMBER = 8  # digits of a storage's number; those of an address are more


class TorchZip(PickledFormat, WritableFormat):
    """The format of `torch.save`."""

    name = "torch-zip"
    suffixes = (".pt", ".pth", ".bin", ".ckpt")
    nestable = True
    folder_stem = "pytorch_model"
    shards = False
    annotates = False
    summary = "torch.save, torch 1.6 and newer, or 1.4 when asked for it"
    refused = "zips that contradict themselves, since readers would disagree on what is in them"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """A zip with a `data.pkl`, and without the `constants.pkl` of TorchScript."""
        if probe.archive is None:
            return False
        prefix = prefix_of(probe.archive)
        records = probe.archive.records
        return (
            bool(prefix)
            and f"{prefix}data.pkl" in records
            and f"{prefix}constants.pkl" not in records
        )

    def open(self, probe: Probe) -> TorchZipContainer:
        """Read the directory and the pickle."""
        assert probe.archive is not None
        return TorchZipContainer(probe.archive, probe.session)

    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        """None."""
        return []

    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        """How to write a draft as torch.save of torch 2.13 would, with numbers for the storages."""
        fill(draft)
        stored = _numbered(draft)
        emitter = Emitter()
        pickle = emitter.run(draft.graph.root)
        is_harmless = names_are_harmless(emitter.names.keys(), draft.graph.root)
        del emitter  # which has a slot for each tensor
        tensors = draft.list_contents().tensors
        metadata = still_true(draft.metadata, {each.name for each in tensors})
        further = {RECORD: metadata_record(metadata)} if metadata else {}
        crcs = [_known_crc(each) for each in stored]
        sizes = [(each.nbytes, crc32) for each, crc32 in zip(stored, crcs, strict=True)]
        frame = Frame(options.stem, pickle, sizes, further)
        pieces = Pieces()
        for write in frame.writes():
            pieces.write(*write)
        for n, each in enumerate(stored):
            pieces.put(each, 0, each.nbytes, frame.data_at(n), each.dtype or "uint8")
        measured = [n for n, each in enumerate(stored) if each.nbytes and not crcs[n]]
        plan = assemble(frame.nbytes, pieces)._replace(
            measures=tuple(CrcRange(frame.data_at(n), stored[n].nbytes) for n in measured),
            seal=lambda crcs: frame.final_writes(dict(zip(measured, crcs, strict=True))),
        )

        name = f"{options.stem}.bin" if options.in_folder else ""

        def check(files: Mapping[str, Readable]) -> None:
            _check(files[name], pickle, metadata)

        return WritePlan({name: plan}, len(tensors), {}, (), check, pickle, is_harmless)


def _numbered(draft: CheckpointGraph) -> list[StorageBytes]:
    """Name the storages by numbers, in the order of the pickle."""
    graph, stored = draft.graph, list[StorageBytes]()
    for node in nodes_of(graph.root):
        found = graph.ids.get(id(node))
        if found is not None and isinstance(node, StorageReference):
            node.respell(node.form, str(len(stored)), node.location)
            stored.append(draft.stored[found.id])
        elif isinstance(node, Persistent):
            raise UnsupportedError("it refers to something outside the file that is not a storage")
    return stored


def _known_crc(stored: StorageBytes) -> int:
    """The checksum of a storage as it will be, or 0 where it must be measured."""
    if stored.is_made:
        return 0
    return stored.crc32 if stored.content is None else zlib.crc32(stored.content)


def _check(source: Readable, pickle: bytes, metadata: Mapping[str, str]) -> None:
    """Raises WriteError unless a file that was written can be read, and says what it should."""
    archive = Archive(source)
    prefix = prefix_of(archive)
    record = archive.records[f"{prefix}data.pkl"]
    archive.check_layout()
    if read_metadata(archive, prefix) != metadata:
        raise WriteError("the written file has other metadata than planned")
    if archive.read(record, at_most=len(pickle)) != pickle:
        raise WriteError("the written file has another pickle than planned")


class TorchZipContainer(ZipContainer):
    """A file that torch.save wrote."""

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Read the pickle."""
        super().__init__(archive, session)
        self.add("data.pkl", "data/")
        self.metadata = read_metadata(archive, self.prefix)
        self.writer = self._writer()

    def kind_of(self, name: str) -> RecordKind | None:
        return None if name == RECORD else super().kind_of(name)

    def patched_pickles(self, written: Readable) -> Sequence[bytes] | None:
        if not holds_patched(self.archive, written, self.pickled):
            return None
        if any(stream.nested or stream.unread for stream in self.streams):
            return None
        places = ((self.archive.data_at(record), record.nbytes) for record in self.pickled)
        return [written.read(*place) for place in places]

    def _writer(self) -> str:
        """Which torch wrote it, as far as the records tell: each release only added to them.

        Python's writer puts the pickle first, that of C++ the storages. Storages went by the
        addresses of C objects at first, by numbers from 0 since 1.7. `byteorder` came with 2.1, and
        `.data/serialization_id` with it or a little earlier; `.format_version` in early 2025.
        """
        records, prefix = self.archive.records, self.prefix
        if f"{prefix}.format_version" in records:
            return "a recent torch (about 2.7 or newer)"
        order = sorted(records.values(), key=lambda record: record.header_at)
        names = [record.name.removeprefix(prefix) for record in order]
        keys = {name[5:] for name in names if name.startswith("data/")}
        if keys and names.index("data.pkl") > max(names.index(f"data/{key}") for key in keys):
            return "libtorch (C++)"
        if "byteorder" in names:
            return "torch 2.1 or newer"
        if ".data/serialization_id" in names:
            return "torch 2.0 or newer"
        if any(key.isdecimal() and len(key) > _LONGEST_NUMBER for key in keys):
            return "torch 1.4 to 1.6"
        return "torch 1.6 to 2.0" if keys else "torch 1.4 to 2.0"
