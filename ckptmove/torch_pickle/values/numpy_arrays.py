"""Recognize numpy arrays among the inert calls of a pickle.

An array is `_reconstruct(ndarray, (0,), b'b')` with the state `(1, shape, dtype, whether it is in
Fortran order, bytes)`; since protocol 5 `_frombuffer(bytes, dtype, shape, order)`. A dtype is
`dtype('f4', False, True)` with the state `(3, '<', None, …)`. Source: numpy,
_core/src/multiarray/methods.c (`array_reduce`), descriptor.c (`arraydescr_reduce`).
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import NamedTuple, TypeGuard

from ...manifest.dtypes import nbytes_of
from ...manifest.manifest import Storage
from ...pickles.nodes import Blob, Call, Global, Node, Tuple
from ..callables.uses import ENCODE, LATIN_1
from .persistent_ids import is_size
from .strided import MOST_DIMENSIONS, Tensor, contiguous_stride

KIND = "numpy.ndarray"
#: The keys that lead from an array to its bytes, if they are in its state.
CONTENT_AT = ("<state>", 4)
_NAMES = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
_BUFFERS = {f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")}
_DTYPES = {
    **{"f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"},
    **{f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)},
    **{f"u{n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
    "b1": "bool",
}
#: torch's names of the dtypes that both torch and numpy have.
DTYPES = frozenset(_DTYPES.values())


class Array(NamedTuple):
    """A numpy array."""

    #: torch's name of the dtype
    dtype: str
    shape: tuple[int, ...]
    #: whether the first index varies fastest
    fortran: bool
    big_endian: bool
    #: text in a pickle of Python 2; or, except in a canonical graph, a call that encodes text
    content: bytes | str | Blob | Call

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return nbytes_of(prod(self.shape), self.dtype)

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride in elements."""
        if self.fortran:
            return contiguous_stride(self.shape[::-1])[::-1]
        return contiguous_stride(self.shape)


class Arrays:
    """The numpy arrays of a checkpoint, listed as tensors."""

    def __init__(self, others: Collection[str]) -> None:
        """`others` are the ids of the checkpoint's storages."""
        #: storages that stand for the bytes of arrays, which are part of a pickle
        self.storages: dict[str, Storage] = {}
        self._others = others
        self._known: dict[int, Tensor] = {}

    def tensor(self, node: Call) -> Tensor | None:
        """The array of a node as a tensor; None if the node is not an array."""
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
    """The array of a node; None if it is not an array, or has no equivalent tensor."""
    said = _array_fields(node)
    return None if said is None else _array(*said)


def content_of(node: Node) -> Blob | None:
    """The long bytes of an array with a dtype of torch, even if their number is wrong."""
    said = _array_fields(node)
    if said is None or _dtype(said[1]) is None:
        return None
    content = _unwrapped(said[3])
    return content if isinstance(content, Blob) else None


def _array_fields(node: Node) -> tuple[Node, Node, bool, Node] | None:
    """Shape, dtype, whether it is in Fortran order, and bytes of an array."""
    if not isinstance(node, Call) or node.pairs or node.items:
        return None
    named = node.qualname in _NAMES
    if not (named or node.qualname in _BUFFERS) or not isinstance(node.args, Tuple):
        return None
    args = node.args.items
    if named and isinstance(node.state, Tuple) and len(node.state.items) == 5:
        cls = args[0] if args else None
        if not isinstance(cls, Global) or cls.qualname != "numpy.ndarray":
            return None
        _, shape, dtype, order, content = node.state.items
        return shape, dtype, order is True, content
    if not named and len(args) == 4 and not node.built:
        content, dtype, shape, order = args
        return shape, dtype, order == "F", content
    return None


def put_content(node: Call, content: bytes | Blob) -> None:
    """Replace the bytes of an array that `array_of` recognizes."""
    holder, at = (node.state, CONTENT_AT[1]) if node.built else (node.args, 0)
    assert isinstance(holder, Tuple)
    old = holder.items[at]
    if _is_wrapped(old):
        old.args = Tuple([content], 0)
        return
    made = Tuple([*holder.items[:at], content, *holder.items[at + 1 :]], holder.at)
    if node.built:
        node.state = made
    else:
        node.args = made


def _is_wrapped(content: Node) -> TypeGuard[Call]:
    return isinstance(content, Call) and content.qualname == "builtins.bytearray"


def _unwrapped(content: Node) -> Node:
    """The bytes from which a bytearray is made."""
    if not _is_wrapped(content):
        return content
    items = content.args.items if isinstance(content.args, Tuple) else []
    return items[0] if len(items) == 1 else b"" if not items else None


def _array(shape: Node, dtype: Node, fortran: bool, content: Node) -> Array | None:
    sizes = shape.items if isinstance(shape, Tuple) else None
    element = _dtype(dtype)
    content = _unwrapped(content)
    if sizes is None or element is None or len(sizes) > MOST_DIMENSIONS:
        return None
    counts = tuple(n for n in sizes if isinstance(n, int) and is_size(n))
    if len(counts) != len(sizes) or not isinstance(content, (bytes, str, Blob, Call)):
        return None
    array = Array(element[0], counts, fortran, element[1], content)
    return array if _nbytes(content) == array.nbytes else None


def _nbytes(content: bytes | str | Blob | Call) -> int | None:
    """The number of bytes, if it is known without reading each character."""
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
    return len(args[0]) if isinstance(args[0], str) else None


def _dtype(node: Node) -> tuple[str, bool] | None:
    """The dtype of an array, and whether it is big-endian; None for a dtype that torch lacks."""
    if not isinstance(node, Call) or node.qualname != "numpy.dtype":
        return None
    args = node.args.items if isinstance(node.args, Tuple) else []
    state = node.state.items if isinstance(node.state, Tuple) else []
    if not args or not isinstance(args[0], str) or len(state) < 5 or state[2:5] != [None] * 3:
        return None
    name = _DTYPES.get(str(args[0]))
    return None if name is None or state[1] not in ("<", ">", "|") else (name, state[1] == ">")
