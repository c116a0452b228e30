"""Gather the elements of strided views in a file, in row-major order, and cast them if needed.

Elements are moved as integers, so that NaN payloads and -0.0 survive. Dense views are read; other
views are memory-mapped read-only, because their elements may be anywhere in a region. Both hold
only a few chunks in memory. Only casts do arithmetic. torch does the casts, except for dense views
between float32 and bfloat16, because importing torch for these would take too long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import prod

from ..errors import CorruptError, UnsupportedError
from ..manifest.dtypes import BITS, nbytes_of
from ..plans.plan import Gather
from ..sources.source import Source

_READ_NBYTES = 1 << 20  # bytes per read: few enough to stay in the processor's cache for the cast
Dimensions = list[tuple[int, int]]  # size and stride of each dimension, in elements


def gather_chunks(source: Source | None, gather: Gather) -> Iterator[bytearray]:
    """The elements of a view as contiguous little-endian bytes, in chunks of 8 MiB at most.

    `source` is the file in which `gather.source_at` is an offset, and must not change; None for a
    view in memory. Raises, before reading, CorruptError if the view is not valid or leaves its
    region; UnsupportedError if torch lacks the dtype or the cast; ImportError if torch is needed
    but missing.
    """
    source = source if gather.content is None else None
    dimensions = _dimensions(gather)
    _check_reach(source, gather, dimensions)
    is_dense = not dimensions or dimensions == [(dimensions[0][0], 1)]
    cast = _cast_without_torch(gather) if is_dense else None
    if cast is not None:
        return map(cast, _read_contiguous(source, gather))
    _check_torch()
    from .elements import finishing

    finish = finishing(gather)
    if 0 in gather.shape:
        return iter(())
    if is_dense:
        return map(finish, _read_contiguous(source, gather))
    from .strided import read_strided

    return map(finish, read_strided(source, gather, dimensions))


def _check_torch() -> None:
    """Raise an ImportError with the reason if torch can't be imported."""
    from .torch_import import why_no_torch

    no_torch = why_no_torch()
    if no_torch is not None:
        raise ImportError(no_torch, name="torch")


def _cast_without_torch(gather: Gather) -> Callable[[bytearray], bytearray] | None:
    """A cast with numpy, if it is the only conversion and numpy can be imported; else None."""
    if gather.conj or gather.neg or gather.big_endian or sys.byteorder == "big":
        return None
    if {gather.dtype, gather.to} != {"float32", "bfloat16"} or 0 in gather.shape:
        return None
    from .torch_import import has_room_for_numpy

    if not has_room_for_numpy():
        return None
    try:
        from .bfloat16 import from_bfloat16, to_bfloat16
    except ImportError:  # torch works without numpy
        return None
    return to_bfloat16 if gather.to == "bfloat16" else from_bfloat16


def _dimensions(gather: Gather) -> Dimensions:
    """The dimensions of a view, joined where possible; dimensions of size 1 are left out."""
    joined: Dimensions = []
    for n, step in zip(gather.shape, gather.stride, strict=True):
        if n == 1:
            continue
        if joined and joined[-1][1] == n * step:
            joined[-1] = joined[-1][0] * n, step
        else:
            joined.append((n, step))
    return joined


def _check_reach(source: Source | None, gather: Gather, dimensions: Dimensions) -> None:
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
