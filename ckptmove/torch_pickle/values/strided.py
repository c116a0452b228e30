"""Describe a tensor: dtype, shape, stride, and where its elements are in a storage."""

from functools import lru_cache
from math import prod
from sys import intern
from typing import NamedTuple

from ...errors import CorruptError
from ...manifest.dtypes import nbytes_of
from ...manifest.manifest import Role
from ...manifest.paths import Key
from ...pickles.nodes import Call, Node, Text
from .persistent_ids import StorageId

#: The most dimensions of a tensor; torch has no limit when reading, but numpy and autograd have.
MOST_DIMENSIONS = 64


class Child(NamedTuple):
    """A node that belongs to a tensor: a part of a composite tensor, or an attribute."""

    key: Key
    node: Node
    role: Role | None = None


class Tensor(NamedTuple):
    """The tensor that a call would rebuild; the fields are those of `TensorEntry`."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int
    kind: str = "tensor"
    layout: str = "strided"
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage: str | None = None
    requires_grad: bool = False
    spelled: tuple[Text | Call, ...] = ()
    #: nodes that belong to it
    children: tuple[Child, ...] = ()
    #: whether its children are its content
    composite: bool = False


def tensor_at(
    storage: StorageId,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: str | None = None,
    requires_grad: bool = False,
    children: tuple[Child, ...] = (),
) -> Tensor:
    """A strided tensor in a storage, or in a part of one; CorruptError if it reaches outside.

    Strides and offset are in elements; `dtype` is that of the tensor, if it differs from the
    storage's.
    """
    dtype = dtype or storage.dtype or "uint8"
    nbytes = size_of(shape, dtype)
    if reach_of(shape, stride, offset, dtype) > storage.nbytes:
        raise CorruptError(f"a tensor reaches outside its storage {storage.id!r}")
    at, device = offset + storage.view_at, intern(str(storage.location))
    return Tensor(  # by place, since there may be very many
        *(dtype, shape, device, nbytes, "tensor", "strided", stride, at, storage.id),
        requires_grad,
        (),
        children,
    )


@lru_cache(1 << 7)  # many tensors look alike; but sizes can be chosen to have equal hashes
def size_of(shape: tuple[int, ...], dtype: str) -> int:
    """The size in bytes of the elements of a shape; CorruptError if that is impossible."""
    return nbytes_of(count_of(shape), dtype)


@lru_cache(1 << 7)
def reach_of(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: str) -> int:
    """How many bytes a storage must have for a tensor with this shape, stride and offset."""
    if 0 in shape:
        return 0
    last = offset
    for n, step in zip(shape, stride, strict=True):
        last += (n - 1) * step
    return nbytes_of(last + 1, dtype)


@lru_cache(1 << 7)
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stride of a contiguous tensor of this shape, in elements."""
    stride, step = [0] * len(shape), 1
    for n in reversed(range(len(shape))):
        stride[n] = step
        step *= max(1, shape[n])
    return tuple(stride)


@lru_cache(1 << 7)
def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements are contiguous; strides of dimensions of size 1 do not matter."""
    pairs = zip(shape, stride, contiguous_stride(shape), strict=True)
    return 0 in shape or all(size == 1 or step == usual for size, step, usual in pairs)


def count_of(shape: tuple[int, ...]) -> int:
    """The number of elements of a shape; CorruptError if there are more than torch can count."""
    numel = prod(shape)
    if numel >= 1 << 59:  # so that bytes can be counted too
        raise CorruptError("a tensor claims more elements than are possible")
    return numel
