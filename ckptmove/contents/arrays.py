"""Recognise numpy arrays among the inert calls of a pickle.

An array is `_reconstruct(ndarray, (0,), b'b')` with the state `(1, shape, dtype, whether it is in
Fortran's order, bytes)`; since protocol 5 `_frombuffer(bytes, dtype, shape, order)`. A dtype is
`dtype('f4', False, True)` with the state `(3, '<', None, …)`. Source: numpy,
_core/src/multiarray/methods.c (`array_reduce`), descriptor.c (`arraydescr_reduce`).
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import NamedTuple

from ..dtypes import nbytes_of
from ..manifest import Storage
from ..pickles.nodes import Blob, Call, Global, Node, Text, Tuple
from .pids import is_size
from .strided import MOST_DIMENSIONS, Tensor, contiguous_stride
from .uses import ENCODE, LATIN_1

KIND = "numpy.ndarray"
_NAMES = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
_BUFFERS = {f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")}
_DTYPES = {
    **{"f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"},
    **{f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)},
    **{f"u{n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
    "b1": "bool",
}


class Array(NamedTuple):
    """A numpy array.

    Attributes:
        dtype: torch's name of the element type.
        shape: elements per dimension.
        fortran: whether the first index runs fastest.
        big_endian: whether its elements are.
        content: its bytes, or what stands for them: text where the pickle is of Python 2, or a call
            that encodes text, which a canonical graph has not.
    """

    dtype: str
    shape: tuple[int, ...]
    fortran: bool
    big_endian: bool
    content: bytes | str | Blob | Call

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return nbytes_of(prod(self.shape), self.dtype)

    @property
    def stride(self) -> tuple[int, ...]:
        """In elements."""
        if self.fortran:
            return contiguous_stride(self.shape[::-1])[::-1]
        return contiguous_stride(self.shape)


class Arrays:
    """The arrays of a checkpoint as tensors.

    Attributes:
        storages: what stands for the bytes of each, which are part of a pickle, by id.
    """

    def __init__(self, others: Collection[str]) -> None:
        """Args:
        others: the ids of the checkpoint's storages.
        """
        self.storages: dict[str, Storage] = {}
        self._others = others
        self._known: dict[int, Tensor] = {}

    def tensor(self, node: Call) -> Tensor | None:
        """The array that a node is, as a tensor; None where it is none."""
        array = None if id(node) in self._known else array_of(node)
        if array is not None:
            key = f"numpy/{len(self._known)}"
            while key in self._others:
                key += "~"
            self.storages[key] = Storage(key, "cpu", array.nbytes, array.dtype, None)
            self._known[id(node)] = Tensor(
                dtype=array.dtype,
                shape=array.shape,
                device="cpu",
                nbytes=array.nbytes,
                kind=KIND,
                stride=array.stride,
                storage=key,
            )
        return self._known.get(id(node))


def array_of(node: Node) -> Array | None:
    """The array that a node is; None where it is none, or no tensor could be like it."""
    if not isinstance(node, Call) or not isinstance(node.args, Tuple) or node.pairs or node.items:
        return None
    args = node.args.items
    if node.qualname in _NAMES and isinstance(node.state, Tuple) and len(node.state.items) == 5:
        cls = args[0] if args else None
        if not isinstance(cls, Global) or cls.qualname != "numpy.ndarray":
            return None
        _, shape, dtype, order, content = node.state.items
        return _array(shape, dtype, order is True, content)
    if node.qualname in _BUFFERS and len(args) == 4 and not node.built:
        content, dtype, shape, order = args
        return _array(shape, dtype, order == "F", content)
    return None


def _array(shape: Node, dtype: Node, fortran: bool, content: Node) -> Array | None:
    sizes = shape.items if isinstance(shape, Tuple) else None
    element = _dtype(dtype)
    if isinstance(content, Call) and content.qualname == "builtins.bytearray":
        items = content.args.items if isinstance(content.args, Tuple) else []
        content = items[0] if len(items) == 1 else b"" if not items else None
    if sizes is None or element is None or len(sizes) > MOST_DIMENSIONS:
        return None
    counts = tuple(n for n in sizes if isinstance(n, int) and is_size(n))
    if len(counts) != len(sizes) or not isinstance(content, (bytes, str, Blob, Call)):
        return None
    array = Array(element[0], counts, fortran, element[1], content)
    return array if _nbytes(content) == array.nbytes else None


def _nbytes(content: bytes | str | Blob | Call) -> int | None:
    """How many bytes there are, if that can be told without a look at each."""
    if isinstance(content, Blob):
        return content.nbytes
    if isinstance(content, bytes):
        return len(content)
    if isinstance(content, str):
        return len(content) if content.isascii() else None
    args = content.args.items if isinstance(content.args, Tuple) else []
    if content.qualname == "builtins.bytes" and not args:
        return 0
    if content.qualname != ENCODE or len(args) != 2 or args[1] not in LATIN_1:
        return None
    return len(args[0]) if isinstance(args[0], Text) else None


def _dtype(node: Node) -> tuple[str, bool] | None:
    """The dtype of an array, and whether it is big-endian; None for one that torch has not."""
    if not isinstance(node, Call) or node.qualname != "numpy.dtype":
        return None
    args = node.args.items if isinstance(node.args, Tuple) else []
    state = node.state.items if isinstance(node.state, Tuple) else []
    if not args or not isinstance(args[0], str) or len(state) < 5 or state[2:5] != [None] * 3:
        return None
    name = _DTYPES.get(str(args[0]))
    return None if name is None or state[1] not in ("<", ">", "|") else (name, state[1] == ">")
