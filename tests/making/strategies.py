"""Random checkpoints: trees of everyday values with tensors that share, and a tag a storage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.making.tensors import DTYPES

TAGS = ("cpu", "cuda:0", "cuda:1", "mps", "xpu:0")
STRINGS = (*TAGS, "storage", "state", "step", "")
SHAPES = ((), (0,), (3, 0, 2), (1,), (2, 3))


@dataclass(frozen=True, repr=False)
class Checkpoint:
    tree: object
    bases: list[torch.Tensor]  #: a tensor for each storage, some of which the tree may not use
    tags: dict[int, str]  #: storage address → tag

    def tag(self, storage: torch.UntypedStorage) -> str:
        return self.tags[storage._cdata]

    def __repr__(self) -> str:
        return f"Checkpoint({self._shown(self.tree)})"

    def _shown(self, node: object) -> str:
        """The tree with tensors by their shape: torch can't print every dtype."""
        if isinstance(node, torch.Tensor):
            where = f"{self.tag(node.untyped_storage())}+{node.storage_offset()}"
            return f"<{node.dtype} {tuple(node.shape)} {node.stride()} {where}>"
        if isinstance(node, dict):
            return f"{{{', '.join(f'{key!r}: {self._shown(node[key])}' for key in node)}}}"
        if isinstance(node, (list, tuple)):
            return f"{type(node).__name__}({', '.join(map(self._shown, node))})"
        return repr(node)


@st.composite
def checkpoint_trees(draw: st.DrawFn) -> Checkpoint:
    """A nested tree, with views on a few storages, each of which has a random tag."""
    bases = draw(st.lists(base_tensors(), min_size=1, max_size=5))
    tags = {base.untyped_storage()._cdata: draw(st.sampled_from(TAGS)) for base in bases}
    views = [draw(views_of(base)) for base in bases for _ in range(2)]
    chosen = st.integers(0, len(views) - 1).map(lambda index: views[index])
    weights = st.lists(chosen, min_size=1, max_size=6)
    return Checkpoint(draw(weights.flatmap(_with_weights(trees(chosen)))), bases, tags)


@st.composite
def base_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A contiguous tensor of any dtype with a storage of its own, full of random bytes."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from(SHAPES) | st.lists(st.integers(0, 4), max_size=3).map(tuple))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(top, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=random)
    return raw.view(dtype).view(shape)


def views_of(base: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """The base, or a view of it, as a tensor or a parameter."""
    return st.tuples(_looks, _wraps).map(lambda both: both[1](both[0](base)))


def _flat_slice(start: int, stop: int, step: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda base: base.view(-1)[start:stop:step]


def _transposed(base: torch.Tensor) -> torch.Tensor:
    return base.movedim(0, -1) if base.dim() else base


def _expanded(base: torch.Tensor) -> torch.Tensor:
    return base[None].expand(3, *base.shape)


def _element(base: torch.Tensor) -> torch.Tensor:
    return base.view(-1)[base.numel() // 2] if base.numel() else base


def _parameter(tensor: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(tensor, requires_grad=tensor.dtype in (torch.float32, torch.bfloat16))


_looks: st.SearchStrategy[Callable[[torch.Tensor], torch.Tensor]] = st.one_of(
    st.sampled_from([lambda base: base, _transposed, _expanded, _element]),
    st.builds(_flat_slice, st.integers(0, 4), st.integers(2, 9), st.integers(1, 3)),
)
_wraps: st.SearchStrategy[Callable[[torch.Tensor], torch.Tensor]] = st.sampled_from(
    [lambda tensor: tensor, lambda tensor: tensor, _parameter]
)


def trees(tensors: st.SearchStrategy[torch.Tensor]) -> st.SearchStrategy[object]:
    """Nested containers with these tensors and everyday values as leaves."""
    return st.recursive(tensors | values(), _containers, max_leaves=12)


def values() -> st.SearchStrategy[object]:
    """Everyday values; the strings are often those that pickles of tensors hold as well."""
    integers = st.integers(-(2**70), 2**70) | st.sampled_from([255, 256, 65_535, 65_536, 2**31])
    return st.none() | st.booleans() | integers | st.floats() | _strings()


def _with_weights(rest: st.SearchStrategy[object]) -> Callable[[list[torch.Tensor]], Any]:
    """A root that surely holds tensors, or the rest alone."""

    def roots(weights: list[torch.Tensor]) -> st.SearchStrategy[object]:
        names = st.sampled_from([range(99), ["weight", "bias", "step", "cpu", "a.b", ""]])
        model = names.map(lambda keys: OrderedDict(zip(keys, weights, strict=False)))
        device = st.sampled_from(TAGS)
        both = st.fixed_dictionaries({"device": device, "model": model, "rest": rest})
        return both | model | rest.map(lambda tree: (tree, weights)) | rest

    return roots


def _strings() -> st.SearchStrategy[str]:
    return st.sampled_from(STRINGS) | st.text(max_size=6)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = _strings() | st.integers(-1, 300) | st.tuples(st.integers(0, 2), _strings())
    lists = st.lists(children, max_size=4)
    dicts = st.dictionaries(keys, children, max_size=4)
    twice = children.map(lambda child: [child, child])
    return lists | lists.map(tuple) | dicts | dicts.map(OrderedDict) | twice
