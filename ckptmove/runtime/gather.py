"""Gather the elements of strided views in a file, in row-major order, and cast them if needed.

Elements are moved as integers, so that NaN payloads and -0.0 survive; only torch's own cast does
arithmetic. Dense views are read; others are memory-mapped read-only, because their elements may be
anywhere in a region. Both hold only a few chunks in memory.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from collections.abc import Callable, Iterator
from math import gcd, prod
from typing import Any

import torch

from ..errors import CorruptError, InputError, UnsupportedError
from ..manifest.dtypes import BITS, nbytes_of, storage_element_nbytes
from ..plans.plan import Gather
from ..sources.source import Source
from ..system.files import map_file

_READ_NBYTES = 1 << 20  # at once: what stays in a processor's cache until it is cast
_PICKED_NBYTES = 8 << 20  # at once: each chunk of a transposed view goes over all of its region
_ALONE = 1 << 15  # elements: of more torch makes work for threads, which wait longer than they work

_BIG_HOST = sys.byteorder == "big"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

_Dimensions = list[tuple[int, int]]  # how many, and how many elements apart


def gather_chunks(source: Source | None, gather: Gather) -> Iterator[bytearray]:
    """The elements of a view as contiguous little-endian bytes, in chunks of 8 MiB at most.

    `source` is the file that `gather.source_at` counts in, and must not change; None for a view in
    memory. Raises CorruptError before it reads if the view is not valid or leaves its region,
    UnsupportedError if torch lacks the dtype or the cast.
    """
    source = source if gather.content is None else None
    dimensions = _dimensions(gather)
    _check_reach(source, gather, dimensions)
    finish = _finishing(gather)
    if 0 in gather.shape:
        return iter(())
    if not dimensions or dimensions == [(dimensions[0][0], 1)]:
        return map(finish, _read_contiguous(source, gather))
    return map(finish, _read_strided(source, gather, dimensions))


def _dimensions(gather: Gather) -> _Dimensions:
    """The dimensions of a view without those of size 1, and joined where possible."""
    joined: _Dimensions = []
    for n, step in zip(gather.shape, gather.stride, strict=True):
        if n == 1:
            continue
        if joined and joined[-1][1] == n * step:
            joined[-1] = joined[-1][0] * n, step
        else:
            joined.append((n, step))
    return joined


def _check_reach(source: Source | None, gather: Gather, dimensions: _Dimensions) -> None:
    bits = BITS[gather.dtype]
    if min((0, gather.offset, *gather.shape, *gather.stride)) < 0:
        raise CorruptError(
            "a tensor has a negative size, stride or offset",
            path=None if source is None else source.path,
        )
    numel = prod(gather.shape)
    assert gather.nbytes == nbytes_of(numel, _to(gather)), "as was planned"
    last = gather.offset + sum((n - 1) * step for n, step in dimensions)
    start, end = gather.source_at, gather.source_at + gather.source_nbytes
    if numel and nbytes_of(last + 1, gather.dtype) > gather.source_nbytes:
        raise CorruptError(
            "a tensor reaches outside its storage", path=None if source is None else source.path
        )
    nbytes = len(gather.content or b"") if source is None else source.nbytes
    if not 0 <= start <= end <= nbytes:
        raise CorruptError(
            "a storage reaches outside the file", path=None if source is None else source.path
        )
    if bits < 8 and (gather.offset * bits % 8 or dimensions not in ([], [(numel, 1)])):
        raise UnsupportedError(f"{gather.dtype} can't be copied: its elements share bytes")


def _to(gather: Gather) -> str:
    return gather.to or gather.dtype


# -- elements, as they lie in the file ---------------------------------------------------------


def _read_contiguous(source: Source | None, gather: Gather) -> Iterator[bytearray]:
    """The bytes of a contiguous view."""
    bits = BITS[gather.dtype]
    at = gather.source_at + gather.offset * bits // 8
    end = at + nbytes_of(prod(gather.shape), gather.dtype)
    if source is not None:
        source.expect([(at, end - at)])
    while at < end:
        raw = bytearray(min(_READ_NBYTES, end - at))
        if source is None:
            assert gather.content is not None
            raw[:] = gather.content[at : at + len(raw)]
        else:
            source.read_into(at, raw)
        at += len(raw)
        yield raw


def _read_strided(
    source: Source | None, gather: Gather, dimensions: _Dimensions
) -> Iterator[bytearray]:
    """The bytes of a view that is not contiguous."""
    width = BITS[gather.dtype] // 8
    unit = gcd(width, 8, gather.source_at)  # in which elements are aligned, and can be moved
    region = _region(source, gather, unit)
    units = width // unit
    parts = [(units, 1)] if units > 1 else []
    elements = _PICKED_NBYTES // max(width, BITS[_to(gather)] // 8)
    for offset, dims in _pieces(dimensions, elements):
        if source is not None:
            source.check_unchanged()  # a mapping of what was truncated since would kill the process
        dims = [(n, step * units) for n, step in dims] + parts
        shape, stride = [n for n, _ in dims], [step for _, step in dims]
        raw = bytearray(prod(shape) * unit)
        view = region.as_strided(shape, stride, (gather.offset + offset) * units)
        torch.frombuffer(raw, dtype=region.dtype).view(shape).copy_(view)
        yield raw


def _pieces(dimensions: _Dimensions, elements: int) -> Iterator[tuple[int, _Dimensions]]:
    """A view cut into pieces of at most `elements`, in row-major order, with offsets."""
    inner, cut = 1, len(dimensions) - 1
    while cut > 0 and inner * dimensions[cut][0] <= elements:
        inner *= dimensions[cut][0]
        cut -= 1
    outer, (n, step), rest = dimensions[:cut], dimensions[cut], dimensions[cut + 1 :]
    rows = max(1, elements // inner)
    for index in range(prod(count for count, _ in outer)):
        offset = 0
        for count, apart in reversed(outer):
            index, place = divmod(index, count)
            offset += place * apart
        for row in range(0, n, rows):
            yield offset + row * step, [(min(rows, n - row), step), *rest]


def _region(source: Source | None, gather: Gather, unit: int) -> torch.Tensor:
    """The region of a view as a read-only tensor of integers of `unit` bytes."""
    at, nbytes = gather.source_at, gather.source_nbytes
    before = at % mmap.ALLOCATIONGRANULARITY if source is not None else at
    try:
        held = gather.content or map_file(
            -1 if source is None else source.mappable(at, nbytes), before + nbytes, at - before
        )
    except OSError as error:
        raise InputError(
            f"can't be read: {error.strerror}", path=None if source is None else source.path
        ) from error
    with warnings.catch_warnings():
        # Pages that could be written to would count as memory, of which there may be less.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(held, dtype=_INTEGERS[unit], offset=before, count=nbytes // unit)


# -- elements, as they are to be written -------------------------------------------------------


def _finishing(gather: Gather) -> Callable[[bytearray], bytearray]:
    """The function that turns gathered elements into written ones; raises as `gather_chunks`."""
    flips = _flips(gather)
    dtype, to = gather.dtype, _to(gather)
    cast = None if dtype == to else _checked_cast(dtype, to)
    swapped = gather.big_endian is not _BIG_HOST

    def finish(raw: bytearray) -> bytearray:
        if swapped and (gather.big_endian or flips or cast):
            _swap(raw, dtype)
        for flip in flips:
            flip(raw)
        if cast is not None:
            raw = cast(raw)
        if _BIG_HOST and (gather.big_endian or flips or cast):
            _swap(raw, to)
        return raw

    return finish


def _swap(raw: bytearray, dtype: str) -> None:
    width = BITS[dtype] // (16 if dtype in _PARTS else 8)
    if width > 1:
        torch.frombuffer(raw, dtype=torch.uint8).untyped_storage().byteswap(_INTEGERS[width])


def _flips(gather: Gather) -> list[Callable[[bytearray], None]]:
    """The functions for the conj and neg bits of a tensor."""
    dtype = gather.dtype
    if gather.conj and dtype not in _PARTS:
        raise CorruptError(f"a tensor of {dtype} is said to be conjugated")
    if dtype in _PARTS:
        half = _INTEGERS[BITS[dtype] // 16]
        signs = (0, gather.neg), (1, gather.neg is not gather.conj)  # twice is not at all
        return [_sign_flip(half, part, 2) for part, flipped in signs if flipped]
    if not gather.neg:
        return []
    integer = _INTEGERS[max(1, BITS[dtype] // 8)]
    if dtype in _FLOATS:
        return [_sign_flip(integer, 0, 1)]
    if dtype in _WHOLE:
        return [_negation(integer)]
    raise UnsupportedError(f"a tensor of {dtype} is said to be negated")


def _sign_flip(integer: torch.dtype, start: int, step: int) -> Callable[[bytearray], None]:
    def flip(raw: bytearray) -> None:
        every = torch.frombuffer(raw, dtype=integer)[start::step]
        every.bitwise_xor_(torch.iinfo(integer).min)

    return flip


def _negation(integer: torch.dtype) -> Callable[[bytearray], None]:
    def negate(raw: bytearray) -> None:
        torch.frombuffer(raw, dtype=integer).neg_()

    return negate


def _checked_cast(dtype: str, to: str) -> Callable[[bytearray], bytearray]:
    """The cast from one dtype to another, if torch has it."""
    if dtype in _PARTS and to not in _PARTS:
        raise UnsupportedError(f"{dtype} can't be cast to {to}: the imaginary parts would be lost")
    widened = to in _PARTS and dtype not in _PARTS
    # Complex numbers by their parts, which is the same: torch warns of some complex dtypes.
    values: Any = getattr(torch, _PARTS.get(dtype, dtype), None)
    wanted: Any = getattr(torch, _PARTS.get(to, to), None)

    def cast(raw: bytearray) -> bytearray:
        old = torch.frombuffer(raw, dtype=torch.uint8).view(values)
        made = bytearray(old.numel() * wanted.itemsize * (2 if widened else 1))
        new = torch.frombuffer(made, dtype=torch.uint8).view(wanted)
        new = new[:: 2 if widened else 1]
        for these, those in zip(old.split(_ALONE), new.split(_ALONE), strict=True):
            those.copy_(these)
        return made

    try:
        cast(bytearray(storage_element_nbytes(dtype)))
    except (RuntimeError, TypeError, AttributeError) as error:  # no such cast, or no such dtype
        raise UnsupportedError(f"torch {torch.__version__} can't cast {dtype} to {to}") from error
    return cast
