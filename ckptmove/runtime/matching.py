"""Find renamed tensors: the same bytes under another name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..graph.compare.difference import ComparedTensor, can_cast
from .compare_tensors import Comparison

_Key = tuple[str, tuple[int, ...]]


def match_renamed(
    old: Sequence[ComparedTensor],
    new: Sequence[ComparedTensor],
    comparison: Comparison,
    *,
    cast: bool,
) -> Iterator[tuple[ComparedTensor, ComparedTensor]]:
    """Pairs of tensors with the same dtype, shape and bytes; each tensor is in one pair at most.

    Composite tensors are left out; with `cast`, the dtypes may differ. Raises like
    `Comparison.compare`.
    """
    groups: dict[_Key, tuple[list[ComparedTensor], list[ComparedTensor]]] = defaultdict(
        lambda: ([], [])
    )
    for side, tensors in enumerate((old, new)):
        for held in tensors:
            if held.shown is not None:
                groups[_key(held, cast)][side].append(held)
    for olds, news in groups.values():
        if olds and news:
            yield from _equal_pairs(olds, news, comparison)


def _key(held: ComparedTensor, cast: bool) -> _Key:
    dtype = held.tensor.dtype
    if cast and can_cast(dtype, dtype):
        dtype = "complex" if dtype.startswith("complex") else "float"
    return dtype, held.tensor.shape


def _equal_pairs(
    olds: list[ComparedTensor], news: list[ComparedTensor], comparison: Comparison
) -> Iterator[tuple[ComparedTensor, ComparedTensor]]:
    if len(olds) == len(news):  # usually only a prefix has changed
        rest: tuple[list[ComparedTensor], list[ComparedTensor]] = [], []
        for old, new in zip(olds, news, strict=True):
            assert old.shown is not None
            assert new.shown is not None
            if comparison.compare(old.shown, new.shown).same:
                yield old, new
            else:
                rest[0].append(old)
                rest[1].append(new)
        olds, news = rest
    waiting: dict[tuple[str, bytes], list[ComparedTensor]] = defaultdict(list)
    for new in reversed(news):
        assert new.shown is not None
        dtype = new.tensor.dtype
        waiting[dtype, comparison.digest(new.shown, dtype)].append(new)
    dtypes = dict.fromkeys(dtype for dtype, _ in waiting)
    for old in olds:
        assert old.shown is not None
        for dtype in dtypes:
            found = waiting.get((dtype, comparison.digest(old.shown, dtype)))
            if found:
                yield old, found.pop()
                break
