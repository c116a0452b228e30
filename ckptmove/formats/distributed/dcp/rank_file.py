"""Plan the file of a rank: its items one after the other, and the proof of copied bytes.

A source has checksums of whole storages, or of chunks of them; a file may contain only a part of
one. Then the checksums of the parts are computed as they are written, and combined: nothing is read
twice.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ....errors import CorruptError
from ....graph.draft import Pieces, StorageBytes, View
from ....manifest.dtypes import nbytes_of
from ....plans.crc32 import combine_crc32
from ....plans.plan import Checksum, CrcRange, Plan, Proof, SourceChecksum, Write
from ....sources.source import Source
from ....torch_pickle.values.strided import is_contiguous
from ...writing import assemble, join_plans, move_plan
from .item_frame import ItemFrame


class ChunkBytes(NamedTuple):
    """The elements of a chunk: a view of a storage."""

    stored: StorageBytes
    view: View

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return nbytes_of(_numel(self.view), self.view.dtype)

    @property
    def is_copied(self) -> bool:
        """Whether the elements are contiguous bytes of a source, or known bytes."""
        view = self.view
        plain = is_contiguous(view.shape, view.stride) and not (view.conj or view.neg)
        return plain and not self.stored.is_made


class _Stretch(NamedTuple):
    """A part of a chunk with its own checksum."""

    start: int  # offset in the storage
    nbytes: int
    crc32: int | None  # None if it is computed while writing


class _MeasuredPart(NamedTuple):
    """A part of the range of a proof: its start, and the file and measure with its checksum."""

    start: int
    nbytes: int
    file: RankFile
    measure: int


class Sums:
    """The checksums that sources have for copied bytes, and how each is proved."""

    def __init__(self) -> None:
        self._proofs: dict[str, list[Proof]] = {}  # storage id → its proofs, in order
        self._apart: list[Proof] = []  # proofs of ranges that are not contiguous in a storage
        self._proved: set[tuple[str, int]] = set()
        self._measured: dict[tuple[str, int], list[_MeasuredPart]] = {}

    def of(self, stored: StorageBytes) -> list[Proof]:
        """The checksums that a source has for ranges of a storage, in order."""
        if stored.id not in self._proofs:
            told = list(stored.proofs)
            if not told and stored.crc32 and stored.content is None:
                crc32, source = stored.crc32, stored.source
                told = [Proof(stored.nbytes_before, crc32, stored.id, source, stored.start, 0)]
            self._apart += [each for each in told if each.at is None]
            apart = [each for each in told if each.at is not None and each.nbytes]
            self._proofs[stored.id] = sorted(apart, key=_start)
        return self._proofs[stored.id]

    def stretches(self, stored: StorageBytes, start: int, end: int) -> Iterator[_Stretch]:
        """A range of a storage, cut where the range of a checksum starts or ends."""
        proofs = self.of(stored)
        at = start
        for n in range(max(0, bisect_right(proofs, start, key=_start) - 1), len(proofs)):
            low, high = _start(proofs[n]), _start(proofs[n]) + proofs[n].nbytes
            if low >= end:
                break
            if high <= at:
                continue
            if low > at:
                yield _Stretch(at, low - at, None)
            at = max(at, low)
            whole = at == low and high <= end
            if whole:
                self._proved.add((stored.id, low))
            yield _Stretch(at, min(high, end) - at, proofs[n].crc32 if whole else None)
            at = min(high, end)
        if at < end:
            yield _Stretch(at, end - at, None)

    def measure(self, stored: StorageBytes, part: _MeasuredPart) -> None:
        """Record that the checksum of a stretch is computed while it is written."""
        proofs = self.of(stored)
        n = bisect_right(proofs, part.start, key=_start) - 1
        if n >= 0 and part.start < _start(proofs[n]) + proofs[n].nbytes:
            self._measured.setdefault((stored.id, _start(proofs[n])), []).append(part)

    def of_sources(self) -> Iterator[SourceChecksum]:
        """The checksums for which the sources have to be read again."""
        for storage, proofs in self._proofs.items():
            for proof in proofs:
                key = storage, _start(proof)
                if key not in self._proved and not self._are_whole(key, proof):
                    yield _of_source(proof)
        yield from dict.fromkeys(map(_of_source, self._apart))

    def _are_whole(self, key: tuple[str, int], proof: Proof) -> bool:
        """Whether the measured parts cover the whole range of a proof, possibly more than once."""
        at = _start(proof)
        for part in sorted(self._measured.get(key, ()), key=lambda part: part[:2]):
            at = part.start + part.nbytes if part.start == at else at
        return at == _start(proof) + proof.nbytes

    def prove(self, sources: Sequence[Source]) -> None:
        """Raises CorruptError if written bytes differ from a source's checksum.

        Call it at the end.
        """
        for storage, proofs in self._proofs.items():
            for proof in proofs:
                key = storage, _start(proof)
                if key in self._proved or not self._are_whole(key, proof):
                    continue
                at, crc32 = _start(proof), 0
                for part in sorted(self._measured[key], key=lambda part: part[:2]):
                    if part.start == at:
                        crc32 = combine_crc32(crc32, part.file.crcs[part.measure], part.nbytes)
                        at += part.nbytes
                if crc32 != proof.crc32:
                    raise CorruptError(
                        f"the record {proof.name!r} is damaged: its checksum is wrong",
                        path=sources[proof.source].path,
                    )


class RankFile:
    """A file with items one after the other."""

    def __init__(self, name: str, sums: Sums) -> None:
        self.name = name
        self.end = 0  #: its size so far
        self.crcs: Sequence[int] = ()  #: the checksums of its measures, once it is written
        self._sums = sums
        self._pieces = Pieces()
        self._plans: list[Plan] = []
        self._measures: list[CrcRange] = []
        #: first measure, end of measures, and the function that makes writes from their checksums
        self._seals: list[tuple[int, int, Callable[[Sequence[int]], Sequence[Write]]]] = []

    def add_bytes(self, item: bytes) -> None:
        """Add an item whose bytes are known."""
        self._pieces.write(self.end, item)
        self.end += len(item)

    def add_plan(self, plan: Plan) -> None:
        """Add an item that has a plan."""
        shifted = move_plan(plan, self.end)
        first, seal, at = len(self._measures), plan.seal, self.end
        self._measures += shifted.measures
        self._plans.append(shifted)
        if seal is not None:
            self._seals.append(
                (
                    first,
                    len(self._measures),
                    lambda crcs: [each._replace(at=each.at + at) for each in seal(crcs)],
                )
            )
        self.end += plan.nbytes

    def add_tensor(self, frame: ItemFrame, chunk: ChunkBytes) -> None:
        """Add the item of a chunk."""
        self._pieces.write(self.end, frame.head)
        at = self.end + frame.data_at
        first, stretches = len(self._measures), self._put(chunk, at)
        seal = partial(_sealed, frame, at + chunk.nbytes, stretches)
        if first == len(self._measures):
            for write in seal(()):
                self._pieces.write(*write)
        else:
            self._seals.append((first, len(self._measures), seal))
        self.end += frame.nbytes

    def _put(self, chunk: ChunkBytes, at: int) -> list[_Stretch]:
        """Put the elements of a chunk at an offset; returns the stretches with their checksums."""
        stored, view = chunk
        bare, nbytes = stored._replace(crc32=0, proofs=()), chunk.nbytes
        if not nbytes:
            return []
        if not chunk.is_copied:
            self._sums.of(stored)
            self._pieces.gather(bare, view, nbytes, at)
            self._measures.append(CrcRange(at, nbytes))
            return [_Stretch(0, nbytes, None)]
        start = nbytes_of(view.offset, view.dtype)
        self._pieces.put(bare, start, nbytes, at, view.dtype)
        if stored.content is not None:
            return [_Stretch(start, nbytes, zlib.crc32(stored.content[start : start + nbytes]))]
        stretches = list(self._sums.stretches(stored, start, start + nbytes))
        for part in stretches:
            place = at + part.start - start
            if part.crc32 is None:
                known = _MeasuredPart(part.start, part.nbytes, self, len(self._measures))
                self._sums.measure(stored, known)
                self._measures.append(CrcRange(place, part.nbytes))
            else:
                self._pieces.checksums.append(
                    Checksum(
                        at=place,
                        nbytes=part.nbytes,
                        crc32=part.crc32,
                        name=stored.id,
                        source_at=stored.start + part.start,
                        source=stored.source,
                    )
                )
        return stretches

    def plan(self) -> Plan:
        """The plan to write the file, after all of its items were added."""
        outer = assemble(self.end, self._pieces)._replace(measures=tuple(self._measures))
        return join_plans(outer, self._plans)._replace(seal=self._sealed)

    def _sealed(self, crcs: Sequence[int]) -> list[Write]:
        self.crcs = list(crcs)
        return [write for first, last, seal in self._seals for write in seal(self.crcs[first:last])]


def _sealed(
    frame: ItemFrame, at: int, stretches: Sequence[_Stretch], crcs: Sequence[int]
) -> list[Write]:
    """The end of an item, given the checksums of its measured parts."""
    measured, crc32 = iter(crcs), 0
    for part in stretches:
        mine = next(measured) if part.crc32 is None else part.crc32
        crc32 = combine_crc32(crc32, mine, part.nbytes)
    return [Write(at, frame.tail(crc32))]


def _numel(view: View) -> int:
    numel = 1
    for n in view.shape:
        numel *= n
    return numel


def _start(proof: Proof) -> int:
    assert proof.at is not None
    return proof.at


def _of_source(proof: Proof) -> SourceChecksum:
    return SourceChecksum(proof.source_at, proof.nbytes, proof.crc32, proof.name, proof.source)
