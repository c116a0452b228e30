"""Read the remains of a folder of torch.distributed.checkpoint with missing or damaged files.

Only `.metadata` names the tensors and locates their chunks. Each chunk is a complete file of
torch.save, so its checksum shows whether its bytes are right. `.metadata` has no checksum: the
names of tensors are unproven.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ...display.phrases import plural, short
from ...errors import CorruptError, InputError, UnsupportedError
from ...manifest.dtypes import BITS, nbytes_of
from ...manifest.paths import spell
from ...sources.checksums import crc32_of
from ...sources.joined import JoinedFiles, Strip
from ...sources.nearby import NearbyFiles
from ...sources.source import Source
from ...torch_pickle.values.strided import contiguous_stride
from ...zips.found_records import ProofLevel
from ..diagnosis import cut_short, data_end
from ..distributed.boxes import Box, check_tiling
from ..distributed.dcp.folder import Dcp
from ..distributed.dcp.items import DcpItem, is_dense, open_item, strip_of
from ..distributed.dcp.metadata import METADATA, SavedState, SavedTensor, read_metadata
from ..distributed.dcp.metadata_walk import ItemRange
from ..distributed.dcp.saves import ranks_of
from ..probe import Probe
from .remains import NamedTensor, Remains, StorageRemains
from .zero_fill import ZeroFilledSource
from .zipped import read_zip

_UNFINISHED = re.compile(re.escape(f"{METADATA}.tmp"))


class _Chunk(NamedTuple):
    """The remains of a chunk: `present` bytes from its start."""

    item: DcpItem
    present: int
    proof: ProofLevel
    why: str = ""


def is_distributed(probe: Probe) -> bool:
    """Whether this is such a folder, without an interrupted later save.

    After such a save, nothing shows to which save the bytes of a file belong.
    """
    return Dcp().sniff(probe) and not any(map(_UNFINISHED.fullmatch, probe.entries))


def read_distributed(probe: Probe) -> Remains:
    """Read the remains of such a folder."""
    return _Folder(probe).remains()


class _Folder:
    """The available chunks and values of a folder."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._joined = JoinedFiles(probe.path)
        self._nearby = NearbyFiles()
        self._lost: dict[str, str] = {}  # name of a file → why it can't be read
        self._unread: dict[str, str] = {}  # name of a value → why it can't be looked into
        self._saved, self._is_whole = self._read_saved()
        self._saved.check_apart()
        self._files = dict(self._open())

    def _read_saved(self) -> tuple[SavedState, bool]:
        """The contents of the metadata, and whether they are complete."""
        names = [METADATA] if METADATA in self._probe.entries else ranks_of(self._probe)
        saved, errors = SavedState(), list[InputError]()
        for name in names:
            try:
                index = self._probe.open(name).file
                saved.join(read_metadata(index, self._probe.session.budget).saved)
            except InputError as error:
                error.about(self._probe.path)
                self._lost[name] = str(error)
                errors.append(error)
        if errors and len(errors) == len(names):
            raise errors[0]
        return saved, not errors

    def _open(self) -> Iterator[tuple[str, Source]]:
        for name in sorted({span.file for _, span in self._saved.items()}):
            try:
                yield name, self._probe.open(name).file
            except InputError as error:
                missing = name not in self._probe.entries
                self._lost[name] = "is missing" if missing else str(error)

    def remains(self) -> Remains:
        tensors, storages = list[NamedTensor](), dict[str, StorageRemains]()
        sources: list[Source] = [self._joined, *self._files.values()]
        for name in self._saved.names:
            keys = self._saved.paths.get(name, (name,))
            tensor = self._saved.tensors.get(name)
            if tensor is None:
                value = self._value(name, spell(keys), self._saved.blobs[name])
                tensors += value.tensors
                storages |= value.storages
                continue
            stride = contiguous_stride(tensor.shape)
            nbytes = nbytes_of(sum(box.numel for box in tensor.chunks), tensor.dtype)
            named = NamedTensor(
                spell(keys), tensor.dtype, tensor.shape, stride, 0, nbytes, storage=name
            )
            try:
                storages[name] = self._storage(name, tensor)
            except InputError as error:
                named = named._replace(storage=None, why=str(error))
            tensors.append(named)
        return Remains(
            "dcp",
            tensors,
            storages,
            sources,
            names_complete=self._is_whole,
            warnings=[
                *(f"{name}: {why}" for name, why in self._lost.items()),
                *self._unread_values(),
            ],
            damage=dict(self._damage()),
        )

    def _storage(self, name: str, tensor: SavedTensor) -> StorageRemains:
        """The storage of a tensor, assembled from chunks as it is read.

        Zeros replace missing chunks.
        """
        boxes = check_tiling(name, tensor.shape, list(tensor.chunks))
        chunks = [self._chunk(name, tensor, box) for box in boxes]
        nbytes = nbytes_of(sum(box.numel for box in boxes), tensor.dtype)
        present = sum(each.present for each in chunks)
        proofs = {each.proof for each in chunks}
        proof = next(
            (each for each in (ProofLevel.WRONG, ProofLevel.CUT) if each in proofs), ProofLevel.NONE
        )
        return StorageRemains(
            nbytes,
            present,
            proof if proofs != {ProofLevel.RIGHT} else ProofLevel.RIGHT,
            tensor.dtype,
            start=self._joined.add(nbytes, partial(_strips, tensor, boxes, chunks)),
            why="; ".join(dict.fromkeys(each.why for each in chunks if each.why)),
            is_filled=True,
        )

    def _chunk(self, name: str, tensor: SavedTensor, box: Box) -> _Chunk:
        """The remains of one chunk of a tensor."""
        span, nbytes = tensor.chunks[box], box.numel * BITS[tensor.dtype] // 8
        file = self._files.get(span.file)
        if file is None:
            why = f"the file {short(span.file)} {self._lost[span.file]}"
            return _Chunk(self._nothing(nbytes, box), 0, ProofLevel.CUT, why)
        try:
            item = open_item(file, span, name, tensor, box, self._nearby)
        except InputError as error:
            return self._broken(file, span, tensor, box, str(error))
        if not item.crc32:
            return _Chunk(item, nbytes, ProofLevel.NONE)
        if crc32_of(file, item.at, nbytes) != item.crc32:
            why = f"its checksum in {short(span.file)} is wrong"
            return _Chunk(item._replace(crc32=0), nbytes, ProofLevel.WRONG, why)
        return _Chunk(item, nbytes, ProofLevel.RIGHT)

    def _broken(
        self, file: Source, span: ItemRange, tensor: SavedTensor, box: Box, why: str
    ) -> _Chunk:
        """The remains of a chunk whose item can't be read as a whole."""
        nbytes = box.numel * BITS[tensor.dtype] // 8
        end = min(span.at + span.nbytes, data_end(file))
        if end < min(span.at + span.nbytes, file.nbytes) or file.nbytes < span.at + span.nbytes:
            why = f"{short(span.file)} ends within it, or before it"
        nothing = _Chunk(self._nothing(nbytes, box), 0, ProofLevel.CUT, why)
        if end <= span.at or span.is_packed:
            return nothing
        try:
            window = file.window(span.at, end - span.at)
            found = read_zip(Probe(window, self._probe.session))
        except InputError:
            return nothing
        if len(found.tensors) != 1 or found.tensors[0].storage is None:
            return nothing
        own = found.tensors[0]
        held = found.storages[own.storage or ""]
        fits = (own.dtype, own.shape, own.offset, held.nbytes) == (
            tensor.dtype,
            box.sizes,
            0,
            nbytes,
        )
        if not fits or held.content is not None or not is_dense(own.shape, own.stride):
            return nothing
        item = DcpItem(file, span.at + held.start, nbytes, own.stride, 0)
        if held.present < nbytes:
            filled = ZeroFilledSource(file, item.at, held.present, nbytes)
            item = item._replace(source=filled, at=0)
        return _Chunk(item, held.present, held.proof, why if held.present < nbytes else held.why)

    def _nothing(self, nbytes: int, box: Box) -> DcpItem:
        zeros = ZeroFilledSource(self._joined, 0, 0, nbytes)
        return DcpItem(zeros, 0, nbytes, contiguous_stride(box.sizes), 0)

    def _value(self, name: str, called: str, span: ItemRange) -> Remains:
        """The tensors in a value that is not a tensor itself; most values have none."""
        file = self._files.get(span.file)
        try:
            if file is None or span.at + span.nbytes > file.nbytes:
                raise CorruptError(f"{short(span.file)} does not have it")
            if span.is_packed:
                raise UnsupportedError("it is compressed")
            window = file.window(span.at, span.nbytes)
            found = read_zip(Probe(window, self._probe.session))
        except InputError as error:
            self._unread[called] = str(error)
            return Remains("dcp", [], {}, [])
        if not found.names_complete:
            self._unread[called] = next(iter(found.warnings), "it is damaged")
        number = 1 + list(self._files).index(span.file)
        return found.shift(span.at).renumber(number, name, f"{called}.")

    def _unread_values(self) -> Iterator[str]:
        """Says that there are values which may have tensors, and can't be looked into."""
        if self._unread:
            name, why = next(iter(self._unread.items()))
            several = f"{plural(len(self._unread), 'value')} can't be read, nor tensors in them"
            yield f"{several}: {short(name)}: {why}"

    def _damage(self) -> Iterator[tuple[str, str]]:
        """What happened to each file, as far as it shows."""
        needed: dict[str, int] = {}
        for _, span in self._saved.items():
            needed[span.file] = max(needed.get(span.file, 0), span.at + span.nbytes)
        for name, file in self._files.items():
            if file.nbytes < needed[name]:
                yield name, cut_short(file, needed[name])
        missing = [name for name in self._lost if name not in self._probe.entries]
        if missing:
            more = f", and {plural(len(missing) - 1, 'more file')}" if len(missing) > 1 else ""
            yield missing[0], f"an interrupted upload: the file is missing{more}"


def _strips(tensor: SavedTensor, boxes: Sequence[Box], chunks: Sequence[_Chunk]) -> Sequence[Strip]:
    pairs = zip(boxes, chunks, strict=True)
    return [strip_of(chunk.item, tensor, box) for box, chunk in pairs]
