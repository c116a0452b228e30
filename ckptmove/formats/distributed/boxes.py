"""Boxes of a tensor: whether they tile it, where their bytes are in it, and how they divide it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ...errors import CorruptError
from ...torch_pickle.values.strided import contiguous_stride, count_of

_PRIME = (1 << 61) - 1


class Box(NamedTuple):
    """A part of a tensor: its start and size in each dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)


class Runs(NamedTuple):
    """The elements of a box in a tensor, as runs of contiguous elements."""

    at: int  #: the offset of the first run, in elements
    length: int  #: the length of each run
    #: how many runs there are in each dimension; empty if there is only one
    counts: tuple[int, ...]
    pitches: tuple[int, ...]  #: the distances between the starts of runs, in elements


def check_tiling(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Box]:
    """The boxes that are not empty, in order; CorruptError unless they tile the shape exactly."""
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape) and count_of(shape):
        return [*boxes]
    filled: list[Box] = []
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise CorruptError(
                f"a chunk of {name!r} has another number of dimensions than the tensor"
            )
        for start, size, whole in zip(*box, shape, strict=True):
            if start + size > whole:
                raise CorruptError(f"a chunk of {name!r} reaches outside it")
        if box.numel:
            filled.append(box)
    count_of(tuple(filter(None, shape)))  # torch also counts the strides of empty tensors
    filled.sort()
    covered, wanted = sum(box.numel for box in filled), prod(shape)
    if covered < wanted:
        raise CorruptError(
            f"chunks of {name!r} are missing: they have {covered:,} of its {wanted:,} elements"
        )
    if covered > wanted or (len(filled) > 1 and not _tile(shape, filled)):
        raise CorruptError(f"chunks of {name!r} overlap")
    return filled


def _tile(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether these boxes cover each element of a shape exactly once; fast for very many boxes.

    Each coordinate of a dimension gets a random number. The measure of an interval is the
    difference of the numbers at its ends, and that of a box the product of its sides. If the boxes
    tile the shape, their measures add up to that of the whole. If they do not, the probability of
    that is 2**-55 (Schwartz-Zippel lemma).
    """
    places = [defaultdict[int, int](_random_number) for _ in shape]

    def measure(box: Box) -> int:
        size = 1
        for known, start, length in zip(places, *box, strict=True):
            size = size * (known[start + length] - known[start]) % _PRIME
        return size

    whole = measure(Box((0,) * len(shape), shape))
    return sum(map(measure, boxes)) % _PRIME == whole


def _random_number() -> int:
    """A random number that the author of a file can't know. (`secrets` takes a while to import.)"""
    return int.from_bytes(os.urandom(16), "little") % _PRIME


def runs_of(shape: tuple[int, ...], box: Box) -> Runs:
    """The place of a box's elements in a tensor of this shape, in row-major order."""
    if box.sizes == shape:
        return Runs(0, prod(shape), (), ())
    strides = contiguous_stride(shape)
    at = sum(start * stride for start, stride in zip(box.offsets, strides, strict=True))
    inner = len(shape)  # from this dimension on, the box has all of each dimension
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    length = prod(box.sizes[outer:])
    counts, pitches = list[int](), list[int]()
    for size, stride in zip(box.sizes[:outer], strides[:outer], strict=True):
        if size > 1:
            counts.append(size)
            pitches.append(stride)
    return Runs(at, length, tuple(counts), tuple(pitches))


def division_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """How boxes that tile a tensor divide it, in a few characters: `rows/4`, `columns/2`, `2×2`."""
    if len(boxes) <= 1:
        return "whole"
    cuts = [len({box.offsets[n] for box in boxes}) for n in range(len(shape))]
    if prod(cuts) != len(boxes):
        return f"{len(boxes):,} chunks"
    divided = [n for n, count in enumerate(cuts) if count > 1]
    if divided == [0]:
        return f"rows/{cuts[0]:,}"
    if divided == [1] and len(shape) == 2:
        return f"columns/{cuts[1]:,}"
    return "×".join(f"{count:,}" for count in cuts)
