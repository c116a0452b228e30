"""dcp-safetensors: a folder that torch.distributed.checkpoint wrote for Hugging Face.

    shard-RRRRR-model-00001-of-00002.safetensors        of rank R, counted from 1
      __metadata__: {"DCP_SHARDING_INFO": {TENSOR: {"saved_offsets": [ROW, …]}, …}, …}

Each file has boxes of tensors, under the names of the tensors; the shapes in the file are those of
the boxes. A tensor is as large as its boxes extend, and they must tile it exactly. There is no
index, and no file gives the number of ranks: missing files of the last ranks are noticed only if
their boxes leave a gap, or if the sizes of the tensors do not fit each other: see `ranks_by_sizes`.

The writer of transformers for FSDP with tensor parallelism may put several boxes of a tensor into
one file, and stores more:

      __metadata__: {"transformers_dcp_chunk_version": "1", "DCP_SHARDING_INFO":
                     {"chunk_0": {"fqn": TENSOR, "shape": [ROWS, …], "saved_offsets": …}, …}, …}

Source: torch/distributed/checkpoint/hf_storage.py, _hf_utils.py (torch 2.7 to 2.13);
transformers/distributed/hf_storage.py (of September 2026).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ....errors import CorruptError, InputError, UnsupportedError
from ....manifest.dtypes import BITS, nbytes_of
from ....manifest.manifest import TensorEntry
from ....manifest.other_records import Chunk
from ....sources import place_of
from ....sources.joined import JoinedFiles, Strip
from ....sources.source import Memory, Source
from ....torch_pickle.values.persistent_ids import is_size
from ...base import Format
from ...checkpoint import Carries, Checkpoint
from ...folders.parts import ALL_RANKS, IncompleteError
from ...probe import Probe
from ...safetensors.file import SHARDING, TensorInFile, TensorsContainer
from ...safetensors.header import HeaderEntry, quote, read_header, read_json
from ..boxes import Box, check_tiling, division_of, runs_of
from ..rank_groups import SHARD
from .ranks_by_sizes import DividedShape, number_of_ranks

_OFFSETS, _SHAPE, _TENSOR = "saved_offsets", "shape", "fqn"
_VERSION = "transformers_dcp_chunk_version"
_KNOWN_VERSION = "1"
_NBYTES_OF_QUOTE = 6  # an entry has four in at least 28 bytes


class _Chunk(NamedTuple):
    """A box of a tensor in a file."""

    file: Source
    entry: HeaderEntry


class _Tensor(NamedTuple):
    """A tensor with its boxes."""

    dtype: str
    chunks: dict[Box, _Chunk]
    #: its shape, if the files give it
    shape: tuple[int, ...] | None = None


class HuggingFaceShards(Format):
    """The format of the writer of torch.distributed.checkpoint for Hugging Face."""

    name = "dcp-safetensors"
    summary = "`HuggingFaceStorageWriter` of torch.distributed.checkpoint, without consolidation"
    refused = "to relocate it, since it carries no devices; parts that do not tile their tensor"
    carries = Carries(False, False, False, objects=False, dtypes="those of safetensors")
    in_parts = True

    def sniff(self, probe: Probe) -> bool:
        """Whether a folder has files of ranks."""
        return probe.is_folder and any(map(SHARD.fullmatch, probe.entries))

    def read(self, probe: Probe) -> Checkpoint:
        """Read the headers of all files."""
        files = {name: probe.open(name).file for name in checked_names(probe)}
        tensors: dict[str, _Tensor] = {}
        described = 0
        for file in files.values():
            try:
                described += _add(file, tensors)
            except InputError as error:
                error.about(file.path)
                raise
        container = _ShardsContainer(probe, tensors, list(files.values()), described)
        container.check_ranks(max(int(match[1]) for match in map(SHARD.fullmatch, files) if match))
        sources = [container.joined, *files.values()]
        return Checkpoint(self.name, container, self.carries, sources)


def checked_names(probe: Probe) -> list[str]:
    """The names of the files, in order; InputError if some are known to be missing."""
    found = [match for match in map(SHARD.fullmatch, sorted(probe.entries)) if match]
    if len({match[3] for match in found}) > 1:
        raise CorruptError("has files of two saves", path=probe.path)
    held = {(int(match[1]), int(match[2])) for match in found}
    ranks, numbers = {rank for rank, _ in held}, {number for _, number in held}
    count = min(int(found[0][3]), len(found) + 1)
    missing = [f"{rank:05}-model-…" for rank in range(1, max(ranks) + 1) if rank not in ranks]
    missing += [f"…-model-{n:05}-of-…" for n in range(1, count + 1) if n not in numbers]
    if missing:
        raise IncompleteError(
            f"its file 'shard-{missing[0]}.safetensors' is missing",
            path=probe.path,
            hint=ALL_RANKS,
        )
    if len(ranks) * len(numbers) > len(held):
        pairs = ((rank, n) for rank in sorted(ranks) for n in sorted(numbers))
        rank, n = next(pair for pair in pairs if pair not in held)
        probe.note(
            f"rank {rank} has no file {n:05}-of-{found[0][3]}, as another has: it is missing, or "
            "there was nothing for it"
        )
    return [match[0] for match in found]


def _add(file: Source, tensors: dict[str, _Tensor]) -> int:
    """Read the header of a file, and add its part of each tensor.

    Returns the size of the header.
    """
    header = read_header(file)
    told = header.metadata.get(SHARDING)
    said = {} if told is None else read_json(told.encode(), SHARDING, _NBYTES_OF_QUOTE)
    if not isinstance(said, dict):
        raise CorruptError(f"its {SHARDING} is malformed")
    for name in said:
        if name not in header.entries:
            raise CorruptError(f"its {SHARDING} lists {quote(name)}, which is not in it")
    version = header.metadata.get(_VERSION)
    if version not in (None, _KNOWN_VERSION):
        raise UnsupportedError(f"its {_VERSION} is {version!r:.40}, which is not known")
    for key, entry in header.entries.items():
        about = said.get(key)
        name, shape = key, None
        if version is not None:
            name, shape = _place(key, about)
        count = len(entry.shape)
        offsets = (0,) * count if told is None else _numbers(key, about, _OFFSETS, count)
        tensor = tensors.setdefault(name, _Tensor(entry.dtype, {}, shape))
        box = Box(offsets, entry.shape)
        known = next(iter(tensor.chunks), box)
        if tensor.dtype != entry.dtype or len(known.sizes) != len(box.sizes):
            raise CorruptError(f"{quote(name)} has another dtype or rank in another file")
        if tensor.shape != shape:
            raise CorruptError(f"{quote(name)} has another shape in another file")
        if box in tensor.chunks and box.numel:
            raise CorruptError(f"another file has the same part of {quote(name)}")
        tensor.chunks[box] = _Chunk(file, entry)
    return header.data_at


def _place(key: str, about: object) -> tuple[str, tuple[int, ...]]:
    """The tensor that a part belongs to, and the tensor's shape, as transformers stores them."""
    name = about.get(_TENSOR) if isinstance(about, dict) else None
    if not isinstance(name, str):
        raise CorruptError(f"its {SHARDING} does not say which tensor {quote(key)} is of")
    return name, _numbers(key, about, _SHAPE)


def _numbers(key: str, about: object, what: str, count: int | None = None) -> tuple[int, ...]:
    """The offsets of a part in its tensor, or another list of sizes."""
    found = about.get(what) if isinstance(about, dict) else None
    if (
        not isinstance(found, list)
        or (count is not None and len(found) != count)
        or not all(map(is_size, found))
    ):
        raise CorruptError(f"its {SHARDING} gives {quote(key)} no valid {what}")
    return tuple(found)


class _ShardsContainer(TensorsContainer):
    """The tensors of all ranks."""

    def __init__(
        self,
        probe: Probe,
        tensors: Mapping[str, _Tensor],
        files: Sequence[Source],
        described: int,
    ) -> None:
        """`described`: the size of the headers."""
        self.joined = JoinedFiles(probe.path)
        self._tensors, self._boxes = tensors, dict[str, Sequence[Box]]()
        self._shapes: dict[str, tuple[int, ...]] = {}
        placed: dict[str, TensorInFile] = {}
        for name, tensor in tensors.items():
            ends = [tuple(map(sum, zip(*box, strict=True))) for box in tensor.chunks]
            shape = tensor.shape
            if shape is None:
                shape = tuple(map(max, zip(*ends, strict=True)))
            self._shapes[name] = shape
            boxes = self._boxes[name] = check_tiling(name, shape, list(tensor.chunks))
            nbytes = nbytes_of(sum(box.numel for box in boxes), tensor.dtype)
            at = self.joined.add(nbytes, partial(_strips, tensor, shape, boxes))
            placed[name] = TensorInFile(
                HeaderEntry(name, tensor.dtype, shape, at, nbytes), self.joined
            )
        self._files_nbytes = sum(file.nbytes for file in files)
        source, ids = Memory(b"", probe.path), probe.session.folder()
        super().__init__(source, placed, None, described, {}, ids)
        self.writer = "torch.distributed.checkpoint"

    def check_ranks(self, ranks: int) -> None:
        """Raises IncompleteError if the sizes of tensors say that there were more ranks.

        `ranks`: the highest rank, counted from 1.
        """
        if any(tensor.shape is None for tensor in self._tensors.values()):
            shapes = (
                DividedShape(self._shapes[name], boxes) for name, boxes in self._boxes.items()
            )
            world = number_of_ranks(shapes, ranks)
            if world > ranks:
                raise IncompleteError(
                    f"its files from 'shard-{ranks + 1:05}-model-…' on are missing: its tensors "
                    f"have {ranks}/{world} of the rows that fit their columns",
                    path=self.joined.path,
                    hint=ALL_RANKS,
                )
            self.warnings.append(
                "its files do not tell how many ranks saved: if the last are missing, only the "
                "sizes of the tensors can show it, and here they do not"
            )

    @property
    def nbytes(self) -> int:
        return self._files_nbytes

    def _divided(self, tensors: Sequence[TensorEntry]) -> Iterator[tuple[str, str]]:
        """The name of each tensor in the manifest, and in the files."""
        for each in tensors:
            name = (each.storage or "").removeprefix(self.folder)
            if name in self._boxes:
                yield each.name, name

    def divisions(self, tensors: Sequence[TensorEntry]) -> dict[str, str]:
        return {
            said: division_of(self._shapes[name], self._boxes[name])
            for said, name in self._divided(tensors)
        }

    def chunks(self, tensors: Sequence[TensorEntry]) -> Iterator[Chunk]:
        for said, name in self._divided(tensors):
            for box in self._boxes[name]:
                file, entry = self._tensors[name].chunks[box]
                own = place_of(file.path).name
                match = SHARD.fullmatch(own)
                rank = int(match[1]) - 1 if match else None
                yield Chunk(said, *box, own, rank, entry.nbytes)


def _strips(tensor: _Tensor, shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Strip]:
    """The place of each part's bytes in their tensor."""
    width = BITS[tensor.dtype] // 8
    strips = list[Strip]()
    for box in boxes:
        file, entry = tensor.chunks[box]
        runs = runs_of(shape, box)
        pitches = tuple(pitch * width for pitch in runs.pitches)
        at, run = runs.at * width, runs.length * width
        strips.append(Strip(file, entry.start, at, run, runs.counts, pitches))
    return strips
