"""Write files like `torch.save` does: see `zip` for the records."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from ...errors import UnsupportedError, WriteError
from ...graph.draft import CheckpointGraph, Pieces, StorageBytes
from ...graph.edit.callables import names_are_harmless
from ...graph.fill import fill
from ...graph.plain_tensors import count_tensors
from ...graph.traversal import nodes_of
from ...pickles.emit import Emitter
from ...pickles.nodes import Persistent
from ...pickles.opcodes.plain_tensors import StorageReference
from ...plans.plan import CrcRange
from ...sources.source import Readable
from ...zips.archive import Archive
from ...zips.local_headers import check_layout
from ..archives.zip_container import prefix_of
from ..safetensors.metadata import RECORD, metadata_record, read_metadata, still_true
from ..writing import WriteOptions, WritePlan, assemble
from .frame import Frame


def plan_write(draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
    """Plan a file like torch.save of torch 2.13 writes, with numbered storages."""
    fill(draft)
    stored = _numbered(draft)
    emitter = Emitter()
    pickle = emitter.run(draft.graph.root)
    is_harmless = names_are_harmless(emitter.names.keys(), draft.graph.root)
    del emitter  # it has a slot for each tensor
    count, metadata = None if draft.metadata else count_tensors(draft.graph.root), draft.metadata
    if count is None:
        names = [each.name for each in draft.list_contents().tensors]
        count, metadata = len(names), still_true(metadata, set(names))
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

    return WritePlan({name: plan}, count, {}, (), check, pickle, is_harmless)


def _numbered(draft: CheckpointGraph) -> list[StorageBytes]:
    """Number the storages in the order of the pickle; return their bytes in that order."""
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
    """The checksum of a written storage, or 0 if it must be computed while copying."""
    if stored.is_made:
        return 0
    return stored.crc32 if stored.content is None else zlib.crc32(stored.content)


def _check(source: Readable, pickle: bytes, metadata: Mapping[str, str]) -> None:
    """Raises WriteError unless a written file can be read and has the planned contents."""
    archive = Archive(source)
    prefix = prefix_of(archive)
    record = archive.records[f"{prefix}data.pkl"]
    check_layout(archive)
    if read_metadata(archive, prefix) != metadata:
        raise WriteError("the written file has other metadata than planned")
    if archive.read(record, at_most=len(pickle)) != pickle:
        raise WriteError("the written file has another pickle than planned")
