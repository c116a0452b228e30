"""Write a dict as a zip-bundle: each of its values becomes a record with the name of its key.

Bytes are written as they are. Other values become files of `torch.save`; a value without tensors
whose name ends in `.pkl` becomes a plain pickle, as libraries expect. So the contents of a bundle
become a zip that its library can read, with the same record names in the same order. Compression,
times and comments are not kept. Records are stored like by torch, at multiples of 64 bytes.

A nested checkpoint is copied only when the zip is written, so the checksum of its record is
combined from the checksums of its parts.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import RefusedError, WriteError
from ..graph.draft import CheckpointGraph, Pieces
from ..graph.edges import bytes_of, is_mutable
from ..graph.edit.callables import CallablePlace, unlisted_callable
from ..graph.fill import fill, stored_blob
from ..graph.traversal import nodes_of
from ..manifest.paths import spell
from ..pickles.base64_text import pickles_in
from ..pickles.emit import emit
from ..pickles.nodes import Blob, Call, Dict, Global, List, Node, Persistent
from ..pickles.opcodes.literals import may_be_checkpoint
from ..pickles.reached_globals import globals_reached
from ..plans.crc32 import combine_crc32
from ..plans.plan import CrcRange, Plan, Write
from ..reports.convert import Loss
from ..sources.budget import Budget
from ..sources.source import Memory, Readable
from ..zips.archive import STORED, Archive
from ..zips.layout import Member, PlacedRecord, directory, lay_out
from ..zips.local_headers import check_layout
from .torch.zip import TorchZip
from .writing import WriteOptions, WritePlan, assemble, join_plans, move_plan

_STEM = "archive"  # the folder in a zip that torch.save writes into an open file
_PICKLES = (".pkl", ".pickle")
_BY_TORCH = (".data/", "data.pkl", "archive_format", "model.json")
_HEAD_NBYTES = 64  # of a record
_LONGEST_NAME = 0xFFFF  # bytes
_NO_CHECKPOINT = "it is not a dict of files with at least one checkpoint"
_HINT = "write .pt or .safetensors instead"


class _Part(NamedTuple):
    """How a record is written."""

    name: str
    content: bytes | None = None  #: its bytes, if they are known
    blob: Blob | None = None  #: or a reference to its bytes
    writing: WritePlan | None = None  #: or how torch.save would write the object

    @property
    def plan(self) -> Plan | None:
        """How a checkpoint is written."""
        return None if self.writing is None else self.writing.files[""]

    @property
    def nbytes(self) -> int:
        """The size of the record."""
        if self.plan is not None:
            return self.plan.nbytes
        return len(self.content or b"") if self.blob is None else self.blob.nbytes


def losses_of(draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
    """The parts of a draft that a bundle cannot store."""
    losses: list[Loss] = []
    if draft.metadata:
        named = ", ".join(map(repr, sorted(draft.metadata)))
        losses.append(Loss("<metadata>", f"cannot be stored in a zip of files ({named:.200})"))
    owners: dict[int, str] = {}
    for name, node in _records_of(draft):
        held = [each for each in nodes_of(node) if isinstance(each, Persistent) or is_mutable(each)]
        others = (owners.setdefault(id(each), name) for each in held)
        first = next((other for other in others if other != name), None)
        if first is not None and options.shared != "duplicate":
            losses.append(Loss(name, f"shares objects or tensors with {first!r}, another record"))
        if name.endswith(_PICKLES) and any(isinstance(each, Persistent) for each in held):
            losses.append(Loss(name, "holds tensors, so it would become a file of torch.save"))
    return losses


def plan_write(draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
    """How to write a draft, which must be a dict of records."""
    records = _records_of(draft)
    _fill_checkpoints(draft, records)
    parts = [_part(draft, name, node, options) for name, node in records]
    if not any(part.writing for part in parts):
        raise RefusedError(_NO_CHECKPOINT, hint=_HINT)
    members = [_member(part) for part in parts]
    laid = lay_out(members)
    pieces, measures, inner = Pieces(), list[CrcRange](), list[Plan]()
    spans: list[tuple[int, int]] = []  # the range of measures that belongs to each record
    for part, place in zip(parts, laid, strict=True):
        pieces.write(place.at, place.header)
        first = len(measures)
        if part.plan is not None:
            moved = move_plan(part.plan, place.data_at)
            measures += moved.measures
            inner.append(moved)
        elif part.blob is not None:
            stored = stored_blob(draft, part.blob)
            pieces.put(stored, 0, stored.nbytes, place.data_at, "uint8")
            measures += [CrcRange(place.data_at, stored.nbytes)] if stored.nbytes else []
        else:
            pieces.write(place.data_at, part.content or b"")
        spans.append((first, len(measures)))
    end = laid[-1].end
    outer = assemble(end + len(directory(laid, end)), pieces)

    def seal(crcs: Sequence[int]) -> list[Write]:
        sums = [list(crcs[start:stop]) for start, stop in spans]
        return _last_writes(parts, laid, sums)

    plan = join_plans(outer, inner)._replace(measures=tuple(measures), seal=seal)
    name = f"{options.stem}.zip" if options.in_folder else ""

    def check(files: Mapping[str, Readable]) -> None:
        _check(files[name], parts)

    tensors = sum(part.writing.tensors for part in parts if part.writing is not None)
    pickle, places = _pickle_of_imports(draft, records)
    return WritePlan({name: plan}, tensors, {}, (), check, pickle, places=tuple(places))


def _fill_checkpoints(draft: CheckpointGraph, records: Sequence[tuple[str, Node]]) -> None:
    """Load the bytes of records that may be pickles, so that their callables can be listed."""
    for _, node in records:
        if isinstance(node, Blob) and node.content is None:
            window = draft.blobs[id(node)]
            if may_be_checkpoint(window.read(0, min(_HEAD_NBYTES, window.nbytes))):
                node.content = window.read(0, window.nbytes)


def _pickle_of_imports(
    draft: CheckpointGraph, records: Sequence[tuple[str, Node]]
) -> tuple[bytes, list[CallablePlace]]:
    """A pickle that names everything that loading any of the records would import.

    The second result lists the records of bytes that name a callable not known to be harmless: a
    library may unpickle a record of bytes too, even if it is short, in an old protocol, or base64
    text.
    """
    assert isinstance(draft.graph.root, Dict)
    held, places, budget = list[Node](), list[CallablePlace](), Budget()
    for slot, (name, node) in enumerate(records):
        if is_bytes(node):
            calls = [Call(each, None, "REDUCE", 0) for each in _risky_imports(draft, node, budget)]
            held += calls
            wrong = next(
                filter(None, map(unlisted_callable, (*calls, *(e.function for e in calls)))), None
            )
            if wrong is not None:
                places.append(CallablePlace(spell((name,)), wrong, draft.graph.root.pairs, slot))
        if not (isinstance(node, Blob) and node.content is None):
            held.append(node)
    return emit(List(held)), places


def _risky_imports(draft: CheckpointGraph, node: Node, budget: Budget) -> list[Global]:
    """The callables that unpickling a record of bytes would import and could misuse."""
    content = node.content if isinstance(node, Blob) else bytes_of(node)
    source: Readable
    if content is not None:
        source = Memory(content, draft.path)
    elif id(node) in draft.blobs:
        source = draft.blobs[id(node)]
    else:
        return []
    found = globals_reached(source, budget)
    for each in pickles_in(source):
        found = [*found, *globals_reached(Memory(each, draft.path), budget)]
    return found


def _records_of(draft: CheckpointGraph) -> list[tuple[str, Node]]:
    """The records that a draft will become; RefusedError if it is not a dict of files."""
    root = draft.graph.root
    recogniser = draft.graph.recogniser
    pairs = list(root.pairs) if isinstance(root, Dict) else []
    names: dict[str, Node] = {}
    for key, node in pairs:
        if not isinstance(key, str) or not _is_name(str(key)):
            raise RefusedError("a key of its dict can't be the name of a file", hint=_HINT)
        if isinstance(node, Call) and recogniser.tensor(node) is not None:
            raise RefusedError(f"{str(key)[:80]!r} in it is a tensor, not a file", hint=_HINT)
        names[str(key)] = node
    if len({name.casefold() for name in names}) != len(pairs):
        raise RefusedError("two keys of its dict name the same file", hint=_HINT)
    if all(map(is_bytes, names.values())):
        raise RefusedError(_NO_CHECKPOINT, hint=_HINT)
    return list(names.items())


def _is_name(name: str) -> bool:
    """Whether a record may have this name, without making the zip look like a file of torch."""
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return 0 < len(raw) <= _LONGEST_NAME and "\0" not in name and not is_of_torch(name)


def is_of_torch(name: str) -> bool:
    """Whether a record has a name as in a zip that torch lays out."""
    return name.startswith(_BY_TORCH) or name.partition("/")[2].startswith(_BY_TORCH)


def is_bytes(node: Node) -> bool:
    """Whether a node is bytes, in any spelling."""
    return isinstance(node, Blob) or (not isinstance(node, str) and bytes_of(node) is not None)


def _part(draft: CheckpointGraph, name: str, node: Node, options: WriteOptions) -> _Part:
    if isinstance(node, Blob) and node.content is None:
        return _Part(name, blob=node)
    if isinstance(node, Blob):
        return _Part(name, content=node.content)
    content = None if isinstance(node, str) else bytes_of(node)
    if content is not None:
        return _Part(name, content=content)
    graph = copy.copy(draft.graph)
    graph.root = node
    within = replace(draft, graph=graph, metadata={})
    if name.endswith(_PICKLES) and not any(isinstance(e, Persistent) for e in nodes_of(node)):
        fill(within)
        return _Part(name, content=emit(node))
    options = WriteOptions(_STEM, shared=options.shared)
    return _Part(name, writing=TorchZip().plan_write(within, options))


def _member(part: _Part) -> Member:
    crc32 = 0 if part.content is None else zlib.crc32(part.content)
    return Member(part.name, STORED, crc32, part.nbytes, part.nbytes)


def _last_writes(
    parts: Sequence[_Part], laid: Sequence[PlacedRecord], sums: Sequence[Sequence[int]]
) -> list[Write]:
    """The writes that need all checksums; `sums` are those of each part's measures."""
    writes: list[Write] = []
    members: list[Member] = []
    for part, place, crcs in zip(parts, laid, sums, strict=True):
        crc32 = place.member.crc32
        if part.plan is not None:
            last = [] if part.plan.seal is None else list(part.plan.seal(crcs))
            writes += [each._replace(at=each.at + place.data_at) for each in last]
            crc32 = _crc_of(part.plan, crcs, last)
        elif crcs:
            crc32 = crcs[0]
        members.append(place.member._replace(crc32=crc32))
    again = lay_out(members)
    end = again[-1].end
    writes += [
        Write(place.end - len(place.descriptor), place.descriptor)
        for place in again
        if place.descriptor
    ]
    return [*writes, Write(end, directory(again, end))]


def _crc_of(plan: Plan, crcs: Sequence[int], last: Sequence[Write]) -> int:
    """The CRC-32 of all bytes of a plan, combined from the checksums of its parts in order."""
    crc32 = at = 0
    for start, nbytes, each in sorted(_checksums(plan, crcs, last)):
        if start > at:  # only zeros lie between the parts
            crc32 = combine_crc32(crc32, zlib.crc32(bytes(start - at)), start - at)
        crc32, at = combine_crc32(crc32, each, nbytes), start + nbytes
    return crc32


def _checksums(
    plan: Plan, crcs: Sequence[int], last: Sequence[Write]
) -> Iterator[tuple[int, int, int]]:
    """Offset, size and CRC-32 of each part of a plan."""
    for write in (*plan.writes, *last):
        yield write.at, len(write.data), zlib.crc32(write.data)
    for measure, crc32 in zip(plan.measures, crcs, strict=True):
        yield measure.at, measure.nbytes, crc32
    measured = {measure.at for measure in plan.measures}
    for checksum in plan.checksums:
        if checksum.at not in measured:
            yield checksum.at, checksum.nbytes, checksum.crc32


def _check(source: Readable, parts: Sequence[_Part]) -> None:
    """Raises WriteError unless a written file can be read and holds the planned records."""
    archive = Archive(source)
    check_layout(archive)
    if list(archive.records) != [part.name for part in parts]:
        raise WriteError("the written file has other records than planned")
    for part in parts:
        record = archive.records[part.name]
        window = source.window(archive.data_at(record), record.nbytes)
        if part.writing is not None:
            part.writing.check({"": window})
        elif part.content is not None and archive.read(record, at_most=part.nbytes) != part.content:
            raise WriteError(f"the written file has another {part.name!r} than planned")
