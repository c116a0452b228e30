"""Convert the bytes of numpy arrays to the order that tensors have in a file, and back.

In a file, the last index of a tensor runs fastest, and bytes are little-endian. Arrays in Fortran
order and big-endian arrays are converted, so that any reader finds the right values under the right
shape. The tree records the old order, and the arrays come back in it. One whole array is in memory
at a time; very large arrays are not converted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from ..manifest.dtypes import BITS
from ..sources.source import Memory, Readable, check_range
from ..torch_pickle.values.numpy_arrays import Array
from ..torch_pickle.values.strided import is_contiguous

#: The type codes of Python's arrays for integers, by size in bytes.
_CODES: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_WIDEST = max(_CODES)
_MOST_LISTED = 4096  # offsets


class Order(NamedTuple):
    """The order of an array's elements and bytes; a flag is set only if it makes a difference."""

    dtype: str
    shape: tuple[int, ...]
    #: whether the first index runs fastest
    fortran: bool
    big_endian: bool


def order_of(array: Array) -> Order | None:
    """Return the order of an array; None if it is the order of a file of tensors."""
    fortran = array.fortran and not is_contiguous(array.shape, array.stride)
    big_endian = array.big_endian and BITS[array.dtype] > 8 and array.nbytes > 0
    if not (fortran or big_endian):
        return None
    return Order(array.dtype, array.shape, fortran, big_endian)


class Latest:
    """The array of a file that is in memory; there is only one at a time."""

    #: its `ReorderedArray`, and its bytes
    held: tuple[ReorderedArray, memoryview] | None = None


class ReorderedArray:
    """The bytes of an array, converted to the order that tensors have in a file.

    All bytes stay in memory from the first read until the last is read, or another array is read.
    """

    start = None

    def __init__(self, tensor: Readable, order: Order, latest: Latest) -> None:
        self.tensor = tensor
        self.order = order
        self.path = tensor.path
        self.nbytes = tensor.nbytes
        self._latest = latest

    def read(self, start: int, nbytes: int) -> bytes:
        """As `Readable.read`."""
        check_range(self, start, nbytes)
        held = self._latest.held
        if held is None or held[0] is not self:
            held = self._latest.held = None
            held = self, reorder(self.tensor.read(0, self.nbytes), self.order)
        self._latest.held = held if start + nbytes < self.nbytes else None
        return bytes(held[1][start : start + nbytes])

    def window(self, start: int, nbytes: int) -> Readable:
        """As `Readable.window`."""
        return Memory(self.read(start, nbytes), self.path)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Readable.expect`: it is read as a whole."""
        self.tensor.expect([(0, self.nbytes)])


def reorder(content: bytes, order: Order) -> memoryview:
    """Convert the bytes of a tensor in a file to the order of an array."""
    found, nbytes = memoryview(content), BITS[order.dtype] // 8
    if order.fortran:
        found = _by_columns(found, order.shape, nbytes)
    if order.big_endian:
        parts = 2 if order.dtype.startswith("complex") else 1
        words = array(_CODES[nbytes // parts], found.tobytes())
        words.byteswap()
        found = memoryview(words).cast("B")
    return found


def _by_columns(content: memoryview, shape: Sequence[int], nbytes: int) -> memoryview:
    """Reorder elements from last index fastest to first index fastest.

    Copies by rows or by columns, whichever are fewer.
    """
    width = min(nbytes, _WIDEST)
    source, made = content.cast(_CODES[width]), memoryview(bytearray(content.nbytes))
    found, each = made.cast(_CODES[width]), nbytes // width
    rows, columns = prod(shape[:-1]), prod(shape[1:])
    for n in range(each):
        old, new = source[n::each], found[n::each]
        if rows <= columns:
            for row, at in enumerate(_offsets(shape[:-1])):
                new[at::rows] = old[row * shape[-1] : (row + 1) * shape[-1]]
        else:
            for column, at in enumerate(_offsets(shape[1:])):
                new[at * shape[0] : (at + 1) * shape[0]] = old[column::columns]
    return made


def _offsets(shape: Sequence[int]) -> Iterator[int]:
    """Return the new offsets of elements when the first index runs fastest instead of the last."""
    steps = [prod(shape[:n]) for n in range(len(shape))]
    ranges = [range(0, n * step, step) for n, step in zip(shape, steps, strict=True)]
    inner: Sequence[int] = ranges.pop()
    while ranges and len(ranges[-1]) * len(inner) <= _MOST_LISTED:
        inner = [a + b for a in ranges.pop() for b in inner]
    return (a + b for a in map(sum, product(*ranges)) for b in inner)
