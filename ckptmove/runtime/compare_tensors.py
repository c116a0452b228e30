"""Compare the elements of two tensors in their files, one chunk at a time.

Tensors with the same layout are compared as bytes; holes of sparse files are not even read.
Elements are examined only in chunks that differ. torch is needed only for views that must be
gathered, byte-swapped or cast.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UnsupportedError
from ..graph.compare.difference import StoredElements
from ..graph.draft import View
from ..manifest.dtypes import BITS, nbytes_of
from ..plans.plan import Gather
from ..reports.difference import Values
from ..sources.file import File
from ..sources.nearby import NearbyFiles
from ..sources.source import Source
from ..torch_pickle.values.strided import is_contiguous
from .element_runs import ElementRun, GatheredElements, plain, span

if TYPE_CHECKING:
    from .compare_elements import ElementDifferences

_CHUNK_NBYTES = 1 << 17  # bytes of each at once; more than the processor's cache is slower
_ALIGNED = 16  # bytes of the largest element
_SMALL = 1 << 12  # largest tensor that is read together with its neighbors
_TIMES = 64  # how often all bytes may be compared, over all names and views
_LEAST_ROOM = 1 << 30
_WHOLE = {f"{sign}int{n}": not sign for sign in ("", "u") for n in (8, 16, 32, 64)}

_Progress = Callable[[int], object]


class ComparisonResult(NamedTuple):
    """The result of a comparison."""

    values: Values | None  #: how elements differ, or None if they do not
    close: int  #: how many differ by less than the tolerance

    @property
    def same(self) -> bool:
        """Whether all bits are the same."""
        return self.values is None and not self.close


_SAME = ComparisonResult(None, 0)


class Comparison:
    """Compares tensors; as a context manager, it releases its resources."""

    def __init__(
        self, nbytes: int, atol: float, rtol: float, progress: _Progress | None = None
    ) -> None:
        """`nbytes` counts both checkpoints; `progress` gets the bytes compared of the first one."""
        self.tolerance = atol, rtol
        self.room = _LEAST_ROOM + _TIMES * nbytes
        self.report = progress or (lambda nbytes: None)
        self.known: dict[str, ComparisonResult] = {}
        self.held: dict[int, tuple[Source, bytes | memoryview]] = {}
        self.buffers = bytearray(_CHUNK_NBYTES), bytearray(_CHUNK_NBYTES)
        self.nearby = NearbyFiles(), NearbyFiles()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for source, _ in self.held.values():
            source.close()

    def compare(
        self, old: StoredElements, new: StoredElements, *, again: bool = False
    ) -> ComparisonResult:
        """Compare two tensors of one shape, after a cast of the old one to the new dtype.

        `again`: the bytes of the old one were compared before, so they are not reported. Raises
        CorruptError if bytes are missing, UnsupportedError if torch is missing or can't cast, or if
        many views share the same bytes.
        """
        small = _small(old.view, new.view)
        if small is not None and self.are_small_and_same(old, new, small):
            self.report(0 if again else small.nbytes)
            return _SAME
        # as text, since sizes and strides can be chosen so that tuples have equal hashes
        key = f"{old.view} {new.view} {old.stored.id!r} {new.stored.id!r}"
        if key not in self.known:
            self.known[key] = self._compare(old, new)
        return self.known[key]

    def digest(self, shown: StoredElements, dtype: str) -> bytes:
        """Return a digest of the elements in a dtype."""
        nbytes = nbytes_of(prod(shown.view.shape), dtype)
        self.take_room(nbytes)
        run, found = self.run(shown, dtype), hashlib.sha256()
        buffer = self.buffers[0]
        for at in range(0, nbytes, _CHUNK_NBYTES):
            part = memoryview(buffer)[: min(_CHUNK_NBYTES, nbytes - at)]
            run.read(at, part)
            found.update(part)
        return found.digest()

    def take_room(self, nbytes: int) -> None:
        """Count bytes to read; UnsupportedError if far too many for files of this size."""
        self.room -= nbytes
        if self.room < 0:
            raise UnsupportedError("its tensors use the same bytes too many times")

    def _compare(self, old: StoredElements, new: StoredElements) -> ComparisonResult:
        dtype = new.view.dtype
        nbytes = nbytes_of(prod(new.view.shape), dtype)
        if not nbytes or _is_same(old, new):
            self.report(nbytes)
            return ComparisonResult(None, 0)
        if _lie_alike(old, new):
            start, end = span(new.view)
            start_old, _ = span(old.view)
            self.take_room(end - start)
            flags = new.view.conj or new.view.neg
            if is_contiguous(new.view.shape, new.view.stride) and not flags:
                return self.elements(plain(old, start_old), plain(new, start), nbytes, new.view)
            runs = plain(old, start_old), plain(new, start)
            if not any(True for _ in self.unequal(*runs, end - start)):
                return ComparisonResult(None, 0)
        self.take_room(nbytes)
        mine, other = self.run(old, dtype), self.run(new, dtype)
        return self.elements(mine, other, nbytes, new.view, nan_alike=old.view.dtype != dtype)

    def are_small_and_same(self, old: StoredElements, new: StoredElements, small: _Small) -> bool:
        """Whether a few bytes of two storages are the same; neighbors are read with them.

        Also False if one of them is not stored unchanged in a local file.
        """
        mine, other = old.stored, new.stored
        files = old.draft.sources[mine.source], new.draft.sources[other.source]
        for stored, file in zip((mine, other), files, strict=True):
            if stored.is_made or stored.content is not None or file.fetch_stats is not None:
                return False
        self.take_room(small.nbytes)
        left = self.nearby[0].read(files[0], mine.start + small.old_at, small.nbytes)
        return left == self.nearby[1].read(files[1], other.start + small.new_at, small.nbytes)

    def elements(
        self, old: ElementRun, new: ElementRun, nbytes: int, view: View, *, nan_alike: bool = False
    ) -> ComparisonResult:
        """Compare the elements of two runs; `nan_alike`: any NaN equals any other."""
        tally = _Tally(view, *self.tolerance, nan_alike=nan_alike)
        for at, mine, other in self.unequal(old, new, nbytes):
            tally.add(at, mine, other)
        return tally.outcome

    def unequal(
        self, old: ElementRun, new: ElementRun, nbytes: int
    ) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Yield the chunks that differ, with their offsets."""
        left, right = self.buffers
        at = 0
        while at < nbytes:
            data = min(old.data_from(at), new.data_from(at))
            data = nbytes if data >= nbytes else data - data % _ALIGNED
            if data > at:
                self.report(data - at)
                at = data
                continue
            count = min(_CHUNK_NBYTES, nbytes - at)
            mine, other = memoryview(left)[:count], memoryview(right)[:count]
            old.read(at, mine)
            new.read(at, other)
            same = left == right if count == _CHUNK_NBYTES else left[:count] == right[:count]
            if not same:
                yield at, mine, other
            self.report(count)
            at += count

    # -- where the elements come from ----------------------------------------------------------

    def run(self, shown: StoredElements, dtype: str) -> ElementRun:
        """Return the elements of a tensor in a dtype, in sequence."""
        view = shown.view
        made = shown.stored.is_made or view.conj or view.neg or dtype != view.dtype
        if not made and is_contiguous(view.shape, view.stride):
            return plain(shown, span(view)[0])
        return GatheredElements(self.gather_elements(shown, dtype))

    def gather_elements(self, shown: StoredElements, dtype: str) -> Iterator[bytearray]:
        """Yield the elements of a tensor that must be gathered or converted, in chunks."""
        from .gather import gather_chunks

        view, stored = shown.view, shown.stored
        held = stored.content is not None
        gather = Gather(
            at=0,
            nbytes=nbytes_of(prod(view.shape), dtype),
            source=stored.source,
            source_at=0 if held else stored.start,
            source_nbytes=stored.nbytes_before,
            dtype=view.dtype,
            shape=view.shape,
            stride=view.stride,
            offset=view.offset,
            conj=view.conj,
            neg=view.neg,
            big_endian=stored.big_endian,
            to=None if dtype == view.dtype else dtype,
        )
        try:  # contiguous elements need no torch
            return gather_chunks(self.source(shown), gather)
        except ImportError as error:
            raise UnsupportedError(
                f"needs torch to compare strided or cast tensors: {error}"
            ) from error

    def source(self, shown: StoredElements) -> Source:
        """Return the source with the bytes of a storage; for bytes in memory, make one."""
        stored = shown.stored
        if stored.content is None:
            return shown.draft.sources[stored.source]
        if id(stored.content) not in self.held:
            with tempfile.TemporaryFile() as file:
                file.write(stored.content)
                file.flush()
                made = File(os.dup(file.fileno()), shown.draft.path)
            self.held[id(stored.content)] = made, stored.content
        return self.held[id(stored.content)][0]


class _Small(NamedTuple):
    """Where two small tensors lie in their storages, in bytes."""

    old_at: int
    new_at: int
    nbytes: int


@lru_cache(1 << 7)  # limited, because sizes can be chosen to have equal hashes
def _small(old: View, new: View) -> _Small | None:
    """Where two small tensors lie; None if they are not contiguous and of one dtype, or large."""
    nbytes = nbytes_of(prod(new.shape), new.dtype)
    contiguous = is_contiguous(new.shape, new.stride) and not (new.conj or new.neg)
    if not 0 < nbytes <= _SMALL or not contiguous or not _alike(old, new):
        return None
    return _Small(span(old)[0], span(new)[0], nbytes)


def _lie_alike(old: StoredElements, new: StoredElements) -> bool:
    """Whether equal bytes mean equal elements."""
    return not (old.stored.is_made or new.stored.is_made) and _alike(old.view, new.view)


def _alike(mine: View, other: View) -> bool:
    """Whether two views lie alike in their storages."""
    if mine.dtype != other.dtype:
        return False
    if (mine.conj, mine.neg) != (other.conj, other.neg):
        return False
    if BITS[mine.dtype] < 8 and (mine.offset or other.offset):
        return False
    shape = mine.shape
    if all(is_contiguous(shape, each.stride) for each in (mine, other)):
        return True
    steps = zip(shape, mine.stride, other.stride, strict=True)
    return all(size == 1 or a == b for size, a, b in steps)


def _is_same(old: StoredElements, new: StoredElements) -> bool:
    """Whether both are the same view of the same bytes of the same file."""
    mine, other = old.stored, new.stored
    if mine.content is not None or other.content is not None or old.view != new.view:
        return False
    if (mine.start, mine.big_endian, mine.cast_from) != (
        other.start,
        other.big_endian,
        other.cast_from,
    ):
        return False
    files = old.draft.sources[mine.source], new.draft.sources[other.source]
    if isinstance(files[0], File) and isinstance(files[1], File):
        return files[0].is_same(files[1])
    return files[0].path == files[1].path


class _Tally:
    """Adds up how the elements of two tensors differ."""

    def __init__(self, view: View, atol: float, rtol: float, *, nan_alike: bool) -> None:
        self.view = view
        self.nan_alike = nan_alike
        self.width = max(1, BITS[view.dtype] // 8)
        self.tolerance = atol, rtol
        self.count = self.close = 0
        self.first: tuple[int, str, str] | None = None
        self.max_abs: float | None = None
        self.max_rel: float | None = None

    def add(self, at: int, old: memoryview, new: memoryview) -> None:
        """Count the differences of two chunks that begin at an offset."""
        found = self.element_differences(old, new)
        self.count += found.far
        self.close += found.close
        self.max_abs = _larger(self.max_abs, found.max_abs)
        self.max_rel = _larger(self.max_rel, found.max_rel)
        if self.first is None and found.far:
            start = found.first * self.width
            element = slice(start, start + self.width)
            texts = [_element_text(bytes(each[element]), self.view.dtype) for each in (old, new)]
            self.first = at // self.width + found.first, texts[0], texts[1]

    def element_differences(
        self, old: memoryview, new: memoryview
    ) -> ElementDifferences | _BitDifferences:
        dtype, first = self.view.dtype, self.first is None
        try:
            from .compare_elements import element_differences  # equal chunks need no torch
        except ImportError as error:
            if any(self.tolerance):
                raise UnsupportedError(
                    "needs torch to compare with a tolerance", hint="pip install torch"
                ) from error
            mine, other = bytes(old), bytes(new)
            places = range(0, len(mine), self.width)
            pairs = ((n, mine[n : n + self.width], other[n : n + self.width]) for n in places)
            differs = [n for n, a, b in pairs if a != b and not self.are_nan(a, b)]
            return _BitDifferences(len(differs), 0, differs[0] // self.width if differs else -1)
        return element_differences(
            old, new, dtype, *self.tolerance, first=first, nan_alike=self.nan_alike
        )

    def are_nan(self, *elements: bytes) -> bool:
        """Whether NaNs are alike and all elements are NaN; for dtypes that numpy can cast."""
        infinity = {"bfloat16": 0x7F80, "float32": 0x7F80_0000}.get(self.view.dtype)
        if not self.nan_alike or infinity is None:
            return False
        sign = 1 << 8 * self.width - 1
        return all(int.from_bytes(each, "little") & ~sign > infinity for each in elements)

    @property
    def outcome(self) -> ComparisonResult:
        if self.first is None:
            return ComparisonResult(None, self.close)
        index, old, new = self.first
        shape, of = self.view.shape, prod(self.view.shape)
        if BITS[self.view.dtype] < 8:  # several elements per byte: bytes are reported
            of = nbytes_of(of, self.view.dtype)
            shape = (of,)
        where = []
        for size in reversed(shape):
            index, place = divmod(index, size)
            where.append(place)
        first = tuple(reversed(where))
        return ComparisonResult(
            Values(self.count, of, first, old, new, self.max_abs, self.max_rel), self.close
        )


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)


class _BitDifferences(NamedTuple):
    """Like `compare_elements.ElementDifferences`, but without torch: compares only bits."""

    far: int
    close: int
    first: int
    max_abs: None = None
    max_rel: None = None


def _element_text(raw: bytes, dtype: str) -> str:
    """Return one element as text."""
    if dtype in _WHOLE:
        return str(int.from_bytes(raw, "little", signed=_WHOLE[dtype]))
    if dtype == "bool" and raw in (b"\0", b"\1"):
        return str(raw == b"\1")
    try:
        from .compare_elements import element_text
    except ImportError:
        return f"0x{raw[::-1].hex()}"
    return element_text(raw, dtype)
