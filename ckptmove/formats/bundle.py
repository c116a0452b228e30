"""zip-bundle: an ordinary zip file in which some records are checkpoints.

    policy.pth              a whole torch-zip, torch-legacy or pickle file, mostly stored
    policy.optimizer.pth    another
    data, …                 anything else: bytes

stable-baselines3 saves agents this way, and people zip what they download. The whole zip is one
dict: the name of each record → the object in its checkpoint, or else its bytes. Relocating changes
the devices in checkpoints, and the checksums. A record with a plain pickle is read too, but does
not make a zip a bundle: many zips have some. A checkpoint that holds only bytes is shown as a file,
since the two can't be distinguished. If a JSON record contains pickles as base64 text, only their
callables are listed: stable-baselines3 unpickles them. A record that is compressed too tightly to
be held in memory is only listed; its callables count as unknown.

Source: stable_baselines3/common/save_util.py (`save_to_zip_file`).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from ..display.phrases import plural
from ..errors import InputError, UnsupportedError
from ..graph.draft import CheckpointGraph
from ..manifest.other_records import HeldRecord, RecordKind
from ..pickles.base64_text import pickles_in
from ..pickles.nodes import Blob
from ..pickles.opcodes.literals import may_be_checkpoint
from ..pickles.reached_globals import names_reached
from ..reports.convert import Loss
from ..sources.budget import Excess
from ..sources.source import Memory, Readable
from ..torch_pickle.callables.uses import Uses, not_surely_harmless
from ..torch_pickle.streams import PickleStream
from ..zips.archive import DEFLATED, LOCAL_MAGIC, Archive
from ..zips.members import Record
from .archives.records import RecordsContainer
from .archives.zip_container import content_of
from .base import PickledFormat, WritableFormat
from .bundle_writing import is_bytes, is_of_torch, losses_of, plan_write
from .checkpoint import Carries
from .probe import Probe
from .session import ReadSession
from .torch.legacy import starts
from .torch.zip import TorchZip
from .writing import WriteOptions, WritePlan

_HEAD_NBYTES = 512
_PROTO, _NEWEST_PROTOCOL = b"\x80", b"\5"
_NAME_NBYTES = 300  # the name of a zip's first record ends within so many bytes


class ZipBundle(PickledFormat, WritableFormat):
    """The format of zips that hold checkpoints."""

    name = "zip-bundle"
    suffixes = (".zip",)
    summary = "any zip with checkpoints in it, such as those of stable-baselines3"
    folder_stem = "bundle"
    shards = False
    annotates = False
    refused = "nothing; records that are no checkpoints stay as they are, or are bytes in a dict"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a zip that torch did not lay out, with a record that torch.save wrote."""
        archive = probe.archive
        if archive is None or any(map(is_of_torch, archive.records)):
            return False
        records = archive.records.values()
        return any(_is_checkpoint(archive, each, probe.session) for each in records)

    def open(self, probe: Probe) -> BundleContainer:
        """Open every record that is a checkpoint."""
        assert probe.archive is not None
        return BundleContainer(probe.archive, probe.session)

    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        return losses_of(draft, options)

    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        return plan_write(draft, options)


class BundleContainer(RecordsContainer):
    """The checkpoints in a zip."""

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Open every record that is a checkpoint."""
        super().__init__(archive, session, by_torch=False)
        self.reached: list[str] = []  # names that unpickling unreadable text would import
        self.in_text: list[PickleStream] = []  # pickles that a record keeps as text
        self.texts: Counter[str] = Counter()  # how many such pickles each record has
        self.tight = set[str]()  # records that are compressed too tightly to be held in memory
        large = 0
        for record in archive.records.values():
            if not archive.may_be_parsed(record):
                large += 1
                self.tight.add(record.name)
                continue
            if not _may_be_one(_head(archive, record)) or not self._try(record):
                self._hold(record)
            if record.nbytes and record.name not in self.parts:
                self._look_into_text(record)
        for name, count in (+self.texts).items():
            self.warnings.append(
                f"the record {name!r} keeps {plural(count, 'pickle')} as base64 text: these stay "
                "as they are, and the library that wrote them unpickles them"
            )
        if large:
            self.warnings.append(
                f"{large:,} of its records are compressed and too large to search "
                "for checkpoints; they stay as they are"
            )

    def _look_into_text(self, record: Record) -> None:
        """Note the pickles that JSON keeps as text: a library unpickles them."""
        try:
            pickles = list(pickles_in(content_of(self.archive, record)))
        except UnsupportedError:
            self.reached.append(f"(in the record {record.name!r})")
            return
        self.texts[record.name] += len(pickles)
        for pickle in (Memory(each, self.source.path) for each in pickles):
            try:
                self.in_text.append(self.session.stream(pickle))
            except Excess:
                raise
            except InputError:
                self.reached += names_reached(pickle, self.session.budget)

    def _hold(self, record: Record) -> None:
        """Show a record as bytes, which are read only when they are needed."""
        blob = Blob(0, record.nbytes, None)
        packed = record.method == DEFLATED
        window = self.archive.source.window
        content = window(self.archive.data_at(record), record.stored_nbytes)
        self.blobs[id(blob)] = _CompressedRecord(self.archive, record) if packed else content
        self.roots.append(((record.name,), blob))

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        yield from not_surely_harmless(self.reached)
        for stream in self.in_text:
            loaded = {id(nested.maker) for nested in stream.nested}
            yield from Uses(loaded).unknown(stream.pickle, self.is_known)
            for nested in stream.nested:
                for each in nested.container.everything():
                    yield from each.unknown_callables()

    def kind_of(self, name: str) -> RecordKind | None:
        return RecordKind.DATA

    def records(self) -> Iterator[HeldRecord]:
        for held in super().records():
            yield held._replace(in_tree=held.record.name not in self.tight)

    def _try(self, record: Record) -> bool:
        """Open a record of any content if it is a checkpoint, and return whether it is."""
        known = len(self.roots)
        try:
            container = self.add(record, (record.name,), needed=False)
            if container is None or not all(is_bytes(root) for _, root in container.roots):
                return container is not None
            del self.roots[known:]
        except InputError as error:
            if isinstance(error, Excess) or _is_checkpoint(self.archive, record, self.session):
                raise
            self.warnings.append(f"the record {record.name!r} can't be read, and stays as it is")
        return False


class _CompressedRecord:
    """The content of a compressed record, inflated at the first read."""

    start = None

    def __init__(self, archive: Archive, record: Record) -> None:
        self.path = archive.source.path
        self.nbytes = record.nbytes
        self._archive = archive
        self._record = record

    @cached_property
    def _content(self) -> Memory:
        content = self._archive.read_parsed(self._record)
        return Memory(content, self.path)

    def read(self, start: int, nbytes: int) -> bytes:
        return self._content.read(start, nbytes)

    def window(self, start: int, nbytes: int) -> Readable:
        return self._content.window(start, nbytes)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Does nothing: the record is read as a whole."""


def _may_be_one(head: bytes) -> bool:
    """Whether a record starts like a checkpoint, however short it is."""
    return head.startswith(LOCAL_MAGIC) or (head[:1] == _PROTO and head[1:2] <= _NEWEST_PROTOCOL)


def _is_checkpoint(archive: Archive, record: Record, session: ReadSession) -> bool:
    """Whether `torch.save` wrote a record."""
    head = _head(archive, record) if archive.may_be_parsed(record) else b""
    if not may_be_checkpoint(head):
        return False
    if not head.startswith(LOCAL_MAGIC):
        return starts(head)
    try:
        return TorchZip().sniff(Probe(content_of(archive, record), session))
    except InputError:  # broken, or not a zip at all; a zip of torch.save begins with the pickle
        return b"/data.pkl" in head[:_NAME_NBYTES]


def _head(archive: Archive, record: Record) -> bytes:
    """The first bytes of a record."""
    nbytes = min(record.stored_nbytes, _HEAD_NBYTES)
    head = archive.source.read(archive.data_at(record), nbytes)
    if record.method != DEFLATED:
        return head
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, _HEAD_NBYTES)
    except zlib.error:
        return b""
