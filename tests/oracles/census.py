"""Every tensor of a loaded object, with its facts: what a manifest of the file has to say."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import ANY

import torch

from tests.oracles.sameness import COMPRESSED

Path = tuple[object, ...]
PLAIN_KEYS = (str, int, float, type(None))


class Found(NamedTuple):
    """A tensor or storage, where it hangs, and the path of the tensor it is a part of."""

    path: Path
    value: Any
    part_of: Path | None


class Census:
    """A walk through a loaded object that enters each container once, as pickle does.

    Keys are those of containers and the names of attributes. `ANY` stands for what no path can
    hold: a key that is an object, or that object itself.
    """

    def __init__(self, root: object) -> None:
        self.found: list[Found] = []
        self._again: list[tuple[Path, object]] = []
        self._first: dict[int, Path] = {}
        self._above: list[int] = []
        self._holding: set[int] = set()
        self._kept: list[object] = []  # so that no id is used again
        self._visit(root, (), None)

    def again(self) -> Iterator[tuple[Path, Path]]:
        """Where a container that holds tensors occurs again, and where first."""
        for path, node in self._again:
            if id(node) in self._holding:
                yield path, self._first[id(node)]

    def _visit(self, node: Any, path: Path, part_of: Path | None) -> None:
        self._kept.append(node)
        self._above.append(id(node))
        if isinstance(node, torch.Tensor):
            self._add(node, path, part_of)
            for name, part in parts(node):
                self._visit(part, (*path, name), path)
            for name, value in attributes(node):
                self._visit(value, (*path, name), path if is_wrapper(node) else part_of)
        elif isinstance(node, (torch.UntypedStorage, torch.TypedStorage)):
            self._add(node, path, part_of)
        elif isinstance(node, torch.Generator):
            self._visit(node.get_state(), (*path, "<state>", 2), part_of)
        elif inside := list(children(node)):
            if self._first.setdefault(id(node), path) is not path:
                self._again.append((path, node))
                inside = []
            for keys, child in inside:
                self._visit(child, (*path, *keys), part_of)
        self._above.pop()

    def _add(self, value: object, path: Path, part_of: Path | None) -> None:
        self.found.append(Found(path, value, part_of))
        self._holding.update(self._above)


def children(node: Any) -> Iterator[tuple[Path, object]]:
    """What a container or object holds, by key."""
    if isinstance(node, (type, types.FunctionType, types.BuiltinFunctionType)):
        return
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        yield from ((("<args>", n), each) for n, each in enumerate(node))
    elif isinstance(node, (list, tuple, deque)):
        yield from (((n,), each) for n, each in enumerate(node))
    else:
        yield from (((name,), each) for name, each in getattr(node, "__dict__", {}).items())
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(key, PLAIN_KEYS):
                yield (key,), value
            else:
                yield (repr(key) if type(key) is tuple else ANY,), value
                yield (ANY, "<key>"), key


def attributes(tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
    """The attributes and slots of a tensor, and its inner tensors if it is a wrapper."""
    if not tensor.is_nested:
        state: Any = torch._utils._get_obj_state(tensor)
        for some in state if isinstance(state, tuple) else [state]:
            yield from (some or {}).items()


def parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that make up a composite tensor; none for a view of one storage."""
    if tensor.layout is torch.jagged:
        yield from (("values", tensor.values()), ("offsets", tensor._offsets))  # type: ignore[attr-defined]
        yield from tensor._metadata_cache.items()  # type: ignore[attr-defined]
    elif tensor.is_nested:
        yield from (("values", tensor.values()), ("sizes", tensor._nested_tensor_size()))
        yield "strides", tensor._nested_tensor_strides()
        yield "offsets", tensor._nested_tensor_storage_offsets()
    elif tensor.layout in COMPRESSED:
        for method in COMPRESSED[tensor.layout]:
            yield method.removeprefix("_"), getattr(tensor, method)()
    elif tensor.is_quantized and tensor.qscheme() is not torch.per_tensor_affine:
        yield "scales", tensor.q_per_channel_scales()
        yield "zero_points", tensor.q_per_channel_zero_points()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the values are other tensors in its attributes."""
    return hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """The storage of a tensor or storage; None if the bytes are not in one storage."""
    if isinstance(value, torch.TypedStorage):
        return value._untyped_storage
    if isinstance(value, torch.UntypedStorage):
        return value
    plain = value.layout is torch.strided and not value.is_nested
    return (
        value.untyped_storage() if plain and not value.is_meta and not is_wrapper(value) else None
    )


def facts(tensor: torch.Tensor) -> dict[str, object]:
    """What a manifest says about a tensor alone."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    layout = str(tensor.layout).removeprefix("torch.")
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": _shape(tensor),
        "stride": tensor.stride() if plain else (),
        "offset": tensor.storage_offset() if plain else 0,
        "requires_grad": tensor.requires_grad,
        "kind": _kind(tensor),
        "layout": "nested" if tensor.is_nested and layout == "strided" else layout,
        "nbytes": _nbytes(tensor),
    }


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """With -1 for sizes that differ along a batch."""
    if tensor.layout is torch.jagged:
        return tuple(size if type(size) is int else -1 for size in tensor.shape)
    if tensor.is_nested:
        return (tensor.size(0), *[-1] * (tensor.dim() - 1))
    return tuple(tensor.shape)


def _kind(tensor: torch.Tensor) -> str:
    own = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter"}
    qualname = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return own.get(type(tensor), qualname)


def _nbytes(tensor: torch.Tensor) -> int:
    """Of the elements without gaps, or of the parts of a composite tensor."""
    if tensor.is_nested:
        return _nbytes(dict(parts(tensor))["values"])
    if tensor.layout is not torch.strided:
        return sum(_nbytes(part) for _, part in parts(tensor))
    packed = {torch.quint4x2: 2, torch.quint2x4: 4}.get(tensor.dtype, 1)
    return tensor.numel() * tensor.itemsize // packed
