"""The remains of a broken checkpoint: its tensors by name, and the bytes of their storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from ...errors import InputError
from ...manifest.dtypes import CARRIERS, nbytes_of
from ...reports.salvage import Fate
from ...sources.joined import JoinedFiles
from ...sources.source import Source
from ...torch_pickle.values.strided import reach_of
from ...zips.found_records import ProofLevel
from ..diagnosis import data_end

MISSING = "its bytes are not in the file"
_ZEROS = "the file ends in zeros, as when a disk was full"


def written_dtype(dtype: str) -> str:
    """A dtype that any format can store: for quantized numbers, that of their integers."""
    is_plain = dtype not in CARRIERS or dtype.startswith("complex")
    return dtype if is_plain else CARRIERS[dtype][0]


class NamedTensor(NamedTuple):
    """A tensor that the broken checkpoint names; strides and offset are in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    #: None if its bytes are not stored in one place
    storage: str | None
    device: str = "cpu"
    #: why it can't be read, if that is known
    why: str = ""
    #: whether a checksum proves its name, dtype and shape, independent of other tensors
    proven: bool = False
    #: which of torch's `conj` and `neg` bits are set
    flags: Mapping[str, bool] = MappingProxyType({})

    @property
    def written_dtype(self) -> str:
        """A dtype that any format can store."""
        return written_dtype(self.dtype)

    def span(self) -> tuple[int, int]:
        """The offsets of its first byte, and after its last byte, in its storage."""
        end = reach_of(self.shape, self.stride, self.offset, self.dtype)
        return min(end, nbytes_of(self.offset, self.dtype)), end


class StorageRemains(NamedTuple):
    """The remains of a storage."""

    #: how many bytes it should have
    nbytes: int
    #: how many of these are present, from its start
    present: int
    proof: ProofLevel
    dtype: str | None = None
    location: str = "cpu"
    #: the offset of its bytes, and the number of the file with them
    start: int = 0
    source: int = 0
    crc32: int = 0
    #: the bytes themselves, if no file has them as is
    content: bytes | None = None
    big_endian: bool = False
    why: str = ""
    #: whether its source has zeros in place of missing bytes; these may be anywhere in it
    is_filled: bool = False


class TensorFate(NamedTuple):
    """The result for one tensor."""

    fate: Fate
    present: int
    why: str


@dataclass
class Remains:
    """The remains of a checkpoint, in one or several files."""

    format: str
    tensors: Sequence[NamedTensor]
    storages: Mapping[str, StorageRemains]
    files: Sequence[Source]
    #: whether a checksum proves the names, dtypes and shapes of the tensors
    names_proven: bool = False
    #: whether all data that names tensors could be read
    names_complete: bool = True
    warnings: list[str] = field(default_factory=list)
    #: name of a file → what seems to have happened to it, if the format can show it; empty if
    #: nothing did
    damage: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _ends(self) -> list[int]:
        """For each file, the offset where its written data ends."""
        return [
            each.nbytes if isinstance(each, JoinedFiles) else data_end(each) for each in self.files
        ]

    def storage_remains(self, key: str | None) -> StorageRemains | None:
        """The remains of a storage: zeros at the end of its file count only if proven."""
        found = None if key is None else self.storages.get(key)
        if found is None or found.content is not None or found.proof is ProofLevel.RIGHT:
            return found
        present = max(0, self._ends[found.source] - found.start) if self.files else 0
        return found if present >= found.present else found._replace(present=present, why=_ZEROS)

    def judge(self, tensor: NamedTensor) -> TensorFate:
        """Determine what is left of a tensor."""
        held = self.storage_remains(tensor.storage)
        if held is None or tensor.why:
            return TensorFate(Fate.LOST, 0, tensor.why or MISSING)
        try:
            start, end = tensor.span()
        except InputError as error:
            return TensorFate(Fate.LOST, 0, str(error))
        if end > held.nbytes:
            return TensorFate(Fate.LOST, 0, "it reaches outside its storage")
        if end == start and tensor.nbytes == 0:
            proven = (self.names_proven or tensor.proven) and held.proof is not ProofLevel.WRONG
            return TensorFate(Fate.WHOLE if proven else Fate.UNPROVEN, 0, "")
        if end > held.present:
            there = min(tensor.nbytes, max(0, held.present - start))
            return TensorFate(Fate.PART if there else Fate.LOST, there, held.why or MISSING)
        if held.proof is ProofLevel.WRONG:
            return TensorFate(Fate.DAMAGED, tensor.nbytes, held.why or ProofLevel.WRONG.value)
        proven = self.names_proven or tensor.proven
        if held.proof is ProofLevel.RIGHT and held.present == held.nbytes and proven:
            return TensorFate(Fate.WHOLE, tensor.nbytes, "")
        return TensorFate(Fate.UNPROVEN, tensor.nbytes, "")

    def shift(self, by: int) -> Remains:
        """The same remains, for bytes that start at offset `by` of their file."""
        storages = {
            key: each._replace(start=each.start + by) for key, each in self.storages.items()
        }
        return replace(self, storages=storages)

    def renumber(self, first: int, folder: str, prefix: str = "") -> Remains:
        """The same remains as a part of several files, starting with file number `first`.

        `prefix` is prepended to the names of its tensors.
        """
        return replace(
            self,
            storages={
                f"{folder}/{key}": each._replace(source=first + each.source)
                for key, each in self.storages.items()
            },
            tensors=[
                each._replace(
                    name=prefix + each.name,
                    storage=None if each.storage is None else f"{folder}/{each.storage}",
                    proven=each.proven or self.names_proven,
                )
                for each in self.tensors
            ],
        )
