"""The short ways to read a tree of plain tensors give what the ways for all trees give."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import ckptmove
from ckptmove import formats
from ckptmove.errors import InputError
from ckptmove.formats.safetensors import file as safetensors_file
from ckptmove.formats.safetensors.header import HeaderEntry, read_header
from ckptmove.graph import tree_text
from ckptmove.graph.fingerprint import Content
from ckptmove.graph.plain_tensors import count_tensors
from ckptmove.graph.tree_text import TREE, fingerprint_of
from ckptmove.sources.file import File

SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def weights(seed: int) -> torch.Tensor:
    """A small tensor, of one of a few dtypes and shapes."""
    dtype = (torch.float32, torch.int64, torch.complex128, torch.bfloat16)[seed % 4]
    return torch.full(((2, 3), (), (4,), (0, 2))[seed // 4 % 4], seed).to(dtype)


def trees() -> SearchStrategy[Any]:
    """Nested dicts, lists and tuples of tensors and values."""
    leaves = st.integers(0, 15).map(weights) | st.integers() | st.text(max_size=5) | st.none()
    keys = st.integers(0, 9) | st.text(max_size=5) | st.just("$")
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
        ),
        max_leaves=12,
    )


def converted(state: object, folder: Path) -> Path:
    """The safetensors file of a saved object."""
    torch.save(state, folder / "x.pt")
    target = folder / "x.safetensors"
    ckptmove.convert(folder / "x.pt", target, force=True)
    return target


def slowly(entries: Mapping[str, HeaderEntry], text: str) -> Content:
    """The fingerprint of a tree, by the way for all trees."""
    reader = tree_text._FingerprintReader(entries)
    tree_text._read_tree(reader, text)
    return reader.fingerprint.content()


def outcome(way: Any, entries: Mapping[str, HeaderEntry], text: str) -> tuple[object, ...]:
    """What a way returns, or the error that it raises."""
    try:
        return "content", way(entries, text)
    except InputError as error:
        return type(error), str(error)


def changed(term: Any, order: random.Random) -> Any:
    """A term with a few random changes: of kinds, names, fields and values."""
    if isinstance(term, dict):
        term = {key: changed(each, order) for key, each in term.items()}
        if order.random() < 0.1:
            key = order.choice(["$", "of", "device", "dtype", "shape", "grad", "a"])
            term[key] = order.choice(["tensor", "tuple", "call", "cuda:0", "cpu", 1, [], [2], {}])
        return term
    if isinstance(term, list):
        term = [changed(each, order) for each in term]
        return term * 2 if order.random() < 0.05 else term
    return order.choice([None, "a", "tensor", []]) if order.random() < 0.05 else term


@SETTINGS
@given(state=trees(), seed=st.integers(0, 1 << 30))
def test_fingerprints_agree_for_every_text(state: Any, seed: int, tmp_path: Path) -> None:
    with File.open(converted({"a": state, "w": weights(0)}, tmp_path)) as source:
        header = read_header(source)
    text, order = header.metadata[TREE], random.Random(seed)
    said = json.loads(text)
    others = [json.dumps(said | {"root": changed(said["root"], order)}) for _ in range(8)]
    for each in (text, *others):
        short = outcome(fingerprint_of, header.entries, each)
        assert short == outcome(slowly, header.entries, each)


@SETTINGS
@given(state=trees())
def test_a_tree_of_whole_tensors_is_canonical(state: Any, tmp_path: Path) -> None:
    source, back = converted({"a": state, "w": weights(0)}, tmp_path), tmp_path / "back.pt"
    ckptmove.convert(source, back, force=True)
    content = back.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file.TensorsContainer, "is_canonical", False)
        ckptmove.convert(source, back, force=True)
    assert back.read_bytes() == content
    torch.load(back, weights_only=True)


@SETTINGS
@given(state=trees(), again=st.booleans())
def test_tensors_of_plain_trees_are_counted_as_they_are_listed(
    state: Any, again: bool, tmp_path: Path
) -> None:
    first = {"a": state, "w": weights(0)}
    made = converted([first, first] if again else first, tmp_path)
    for path, whole in ((made, not again and state is None), (made.with_suffix(".pt"), False)):
        with formats.open_checkpoint(path) as found:
            draft = found.draft()
            count = count_tensors(draft.graph.root)
            assert count == len(draft.list_contents().tensors) or (count is None and not whole)
