"""JSON is read strictly, and written with the same meaning and, if possible, length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptmove import CorruptError
from ckptmove.formats.archives.documents import Document

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


def document(root: Any, **options: Any) -> Document:
    return Document("x.json", json.dumps(root, **options).encode())


@given(trees, st.booleans(), st.booleans())
@example("\x7f", False, False)
def test_without_changes_it_says_the_same(root: Any, ascii: bool, spaced: bool) -> None:
    separators = None if spaced else (",", ":")
    text = json.dumps(root, ensure_ascii=ascii, separators=separators).encode()
    made = Document("x.json", text).rewrite({})
    assert json.loads(made) == root
    assert len(made) == len(text)
    assert not spaced or made == text


def test_it_keeps_its_length_where_white_space_allows() -> None:
    root = {"device": {"type": "cuda", "index": 0}, "more": [1, 2]}
    spaced, dense = document(root), document(root, separators=(",", ":"))
    for found in (spaced, dense):
        device = found.root["device"]
        longer, shorter = {"type": "privateuseone"}, {"type": "cpu"}
        assert len(found.rewrite({id(device): shorter})) == found.nbytes
        made = found.rewrite({id(device): longer})
        assert json.loads(made) == {**root, "device": {"type": "privateuseone", "index": 0}}
    index = {"type": "cpu", "index": None}
    assert len(spaced.rewrite({id(spaced.root["device"]): index})) == spaced.nbytes
    assert len(dense.rewrite({id(dense.root["device"]): index})) == dense.nbytes + 2


def test_any_other_difference_is_found() -> None:
    root: Any = {"a": [1, {"b": "x", "c": None}], "d": 0.5}
    mine = document(root)
    changes = {id(mine.root["a"][1]): {"b": "y"}}
    assert mine.differs(document(root), changes)
    assert not mine.differs(document({"a": [1, {"b": "y", "c": None}], "d": 0.5}), changes)
    others: list[Any] = [
        {"a": [1, {"b": "y", "c": None}], "d": 1},
        {"a": [1, {"b": "y", "c": False}], "d": 0.5},
        {"a": [1, {"b": "y"}], "d": 0.5},
        {"a": [1, {"b": "y", "c": None}, 2], "d": 0.5},
        {"a": [True, {"b": "y", "c": None}], "d": 0.5},
        {"d": 0.5, "a": [1, {"b": "y", "c": None}]},
        {"a": [1, {"b": "z", "c": None}], "d": 0.5},
        [],
    ]
    assert all(mine.differs(document(other), changes) for other in others)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b'{"a": 1, "a": 1}', b"1e999", b"-1e999", b"[" * 100_000, b"9" * 5000],
    ids=repr,
)
def test_what_readers_may_disagree_on_is_refused(text: bytes) -> None:
    with pytest.raises(CorruptError, match=r"^the record 'x.json'"):
        Document("x.json", text)
