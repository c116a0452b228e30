"""Read the elements of views that are not dense, with torch over a memory-mapped region."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from math import gcd, prod
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..manifest.dtypes import BITS
from ..system.files import map_file
from .elements import INTEGERS

if TYPE_CHECKING:
    from ..plans.plan import Gather
    from ..sources.source import Source

_PICKED_NBYTES = 8 << 20  # bytes per chunk: each chunk of a transposed view reads its whole region

Dimensions = list[tuple[int, int]]  # size and stride of each dimension, in elements


def read_strided(
    source: Source | None, gather: Gather, dimensions: Dimensions
) -> Iterator[bytearray]:
    """The bytes of a view that is not contiguous."""
    width = BITS[gather.dtype] // 8
    unit = gcd(width, 8, gather.source_at)  # bytes of each copied integer, which must be aligned
    region = _region(source, gather, unit)
    units = width // unit
    parts = [(units, 1)] if units > 1 else []
    elements = _PICKED_NBYTES // max(width, BITS[gather.to or gather.dtype] // 8)
    for offset, dims in _pieces(dimensions, elements):
        if source is not None:
            source.check_unchanged()  # reading the mapping of a truncated file kills the process
        dims = [(n, step * units) for n, step in dims] + parts
        shape, stride = [n for n, _ in dims], [step for _, step in dims]
        raw = bytearray(prod(shape) * unit)
        view = region.as_strided(shape, stride, (gather.offset + offset) * units)
        torch.frombuffer(raw, dtype=region.dtype).view(shape).copy_(view)
        yield raw


def _pieces(dimensions: Dimensions, elements: int) -> Iterator[tuple[int, Dimensions]]:
    """Cut a view into pieces of at most `elements`, in row-major order, with offsets."""
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
        # The mapping is read-only: writable pages would count as memory, which may be too small.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(held, dtype=INTEGERS[unit], offset=before, count=nbytes // unit)
