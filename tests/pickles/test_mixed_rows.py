"""Long dicts, and long rows of integers among other things, take little and stay as they are."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import time
import tracemalloc
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

import pytest

import ckptmove
from ckptmove.errors import CorruptError
from ckptmove.pickles.emit import emit
from ckptmove.pickles.flag_row import FlagRow
from ckptmove.pickles.nodes import Dict, List
from ckptmove.pickles.opcodes.mixed_rows import MixedRow
from ckptmove.pickles.opcodes.pairs import Pairs, with_each_changed
from ckptmove.pickles.walk import walk
from tests.making.bombs import MODULUS

NUMBERS = [-1, 70_000, 1 << 62, -(1 << 62)]
VALUES: list[Any] = [*NUMBERS, *NUMBERS, None, True, 0.5, "a", 1 << 70, b"b"]
PAIRS: dict[str | int, Any] = {
    **{f"name {n}": VALUES[n % len(VALUES)] for n in range(5000)},
    **{n: n for n in range(5000)},
    "cuda:0": "cpu",
}


def row(length: int) -> list[Any]:
    random_ = random.Random(length)
    return [random_.choice(VALUES) for _ in range(length)]


@pytest.mark.parametrize("kind", ["row", "flags", "pairs"])
def test_a_compact_row_is_like_a_list(kind: str) -> None:
    """Whatever is done to it."""
    random_ = random.Random(0)
    new: list[Any] = row(40)
    compact: MutableSequence[Any] = MixedRow(new)
    if kind == "flags":
        new = [random_.choice((True, False, None)) for _ in range(40)]
        compact = FlagRow(new)
    if kind == "pairs":
        new, compact = [(n, each) for n, each in enumerate(new)], Pairs()
        compact.extend(new)
    plain = list(new)
    for _ in range(400):
        at, item = random_.randrange(-len(plain), len(plain)), random_.choice(new)
        match random_.randrange(6):
            case 0:
                compact[at] = plain[at] = item
            case 1:
                compact.insert(at, item)
                plain.insert(at, item)
            case 2 if len(plain) > 9:
                del compact[at], plain[at]
            case 3:
                compact[at : at + 3] = plain[at : at + 3] = [item, item]
            case 4:
                compact.append(item)
                plain.append(item)
            case _:
                assert compact[at] == plain[at]
                assert list(compact[at : at + 5]) == plain[at : at + 5]
        assert list(map(repr, compact)) == list(map(repr, plain))
        assert list(map(repr, reversed(compact))) == list(map(repr, plain[::-1]))
        assert len(compact) == len(plain)


@pytest.mark.sample(1)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_long_values_come_back(protocol: int, tmp_path: Path) -> None:
    """From pickles, to pickles, to safetensors and back."""
    value = {"row": row(9000), "pairs": PAIRS, "bytes": [b"\xff%d" % n for n in range(300)]}
    root = walk(pickle.dumps(value, protocol)).root
    assert isinstance(root, Dict)
    assert isinstance(root.get("row"), List)
    assert isinstance(root.get("row").items, MixedRow)  # type: ignore[union-attr]
    assert isinstance(root.get("pairs").pairs, Pairs)  # type: ignore[union-attr]
    assert repr(pickle.loads(emit(root))) == repr(value)
    first, tree, again = (tmp_path / name for name in ("a.pkl", "a.safetensors", "b.pt"))
    first.write_bytes(pickle.dumps(value, protocol))
    ckptmove.convert(first, tree)
    ckptmove.convert(tree, again)
    assert ckptmove.diff(first, again).equal
    assert repr(ckptmove.load(again)) == repr(value)
    ckptmove.relocate(first, tmp_path / "c.pkl", to="cuda:1")
    assert pickle.loads((tmp_path / "c.pkl").read_bytes()).keys() == value.keys()


def test_what_differs_in_long_values_is_named(tmp_path: Path) -> None:
    value: dict[str, Any] = {"row": row(9000), "pairs": dict(PAIRS)}
    other = copy.deepcopy(value)
    other["row"][8000] = "other"
    other["pairs"]["name 4321"] = "another"
    for name, each in (("a.pkl", value), ("b.pkl", other)):
        (tmp_path / name).write_bytes(pickle.dumps(each))
    found = ckptmove.diff(tmp_path / "a.pkl", tmp_path / "b.pkl")
    assert {each.name for each in found.differences} == {"row.8000", "pairs.name 4321"}


@pytest.mark.slow
def test_a_long_dict_takes_little() -> None:
    """Each pair a hundred bytes, of which its key is sixty; as a tuple it would take twice that."""
    saved = pickle.dumps({f"{n:06}": 1 << 40 | n for n in range(200_000)}, 4)
    tracemalloc.start()
    try:
        found = walk(saved)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found.root, Dict)
    assert taken < 110 * 200_000


def test_what_is_emitted_is_freed_at_once() -> None:
    """Without a search for garbage, which does not run while a checkpoint is open."""
    root = walk(pickle.dumps(PAIRS)).root
    gc.disable()
    try:
        tracemalloc.start()
        emit(root)
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert left < most / 10


def test_changes_are_made_in_place() -> None:
    root = walk(pickle.dumps(PAIRS)).root
    assert isinstance(root, Dict)
    same = with_each_changed(root.pairs, lambda node: "b" if node == "a" else node)
    assert same is root.pairs
    assert {key: value for key, value in same if value == "b"}.keys() == {
        key for key, value in PAIRS.items() if value == "a"
    }


@pytest.mark.parametrize("how", ["at once", "one by one", "set", "frozenset", "in batches"])
def test_keys_that_collide_are_refused_while_the_pickle_is_read(how: str) -> None:
    keys = [pickle.dumps(n * MODULUS, 2)[2:-1] for n in range(1, 2000)]
    opcodes = {
        "at once": b"}(" + b"".join(key + b"N" for key in keys) + b"u",
        "one by one": b"}" + b"".join(key + b"Ns" for key in keys),
        "set": b"\x8f(" + b"".join(keys) + b"\x90",
        "frozenset": b"(" + b"".join(keys) + b"\x91",
        "in batches": b"}" + b"".join(b"(" + key + b"Nu" for key in keys),
    }
    with pytest.raises(CorruptError, match="too many keys with the same hash"):
        walk(b"\x80\4" + opcodes[how] + b".")


def test_keys_that_share_a_large_tuple_are_refused_at_once() -> None:
    large, started = b"(" + b"K\1" * 4000 + b"tq\1", time.process_time()
    with pytest.raises(CorruptError, match="the keys of a dict are too large"):
        walk(large + b"0}(" + b"h\1N" * 1000 + b"u.")
    assert time.process_time() - started < 2
    walk(b"}(" + b"".join(b"(" + b"K%c" % n * 30 + b"tN" for n in range(200)) + b"u.")
