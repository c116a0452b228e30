"""Long lists are read, converted and compared as they are, and take but little for each item."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import CorruptError, UnsupportedError
from ckptmove.graph.edges import plainly_same
from ckptmove.pickles.nodes import List, Node, Text, Tuple
from ckptmove.pickles.terms import parsed, to_terms
from ckptmove.pickles.walk import walk
from tests.making.bombs import headed, zipped

RANDOM = random.Random(0)
ITEMS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "true": lambda: True,
    "byte": lambda: RANDOM.randrange(256),
    "short": lambda: RANDOM.randrange(1 << 16),
    "word": lambda: RANDOM.randrange(-(1 << 31), 1 << 31),
    "float": RANDOM.random,
    "mixed": lambda: RANDOM.choice([None, True, False, 1, 300, 70_000, -1, 1 << 40, 0.5, "a"]),
}
LENGTHS = (1, 2, 3, 4, 15, 16, 17, 18, 19, 271, 272, 273, 274, 4400)


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_rows_are_those_that_pickle_reads(kind: str, protocol: int) -> None:
    for length in LENGTHS:
        row = [ITEMS[kind]() for _ in range(length)]
        for saved in (row, tuple(row)):
            root = walk(pickle.dumps(saved, protocol)).root
            assert isinstance(root, (List, Tuple))
            assert [*map(repr, root.items)] == [*map(repr, row)]


@pytest.mark.parametrize("opcode", [b"N", b"K\1", b"M\1\1", b"J\1\1\1\1", b"G" + bytes(8)])
@pytest.mark.parametrize("short", [1, 2])
def test_a_row_ends_with_its_frame(opcode: bytes, short: int) -> None:
    """However many numbers are read at once."""
    content = b"(" + opcode * 40
    whole = b"\x80\4\x95" + struct.pack("<Q", len(content)) + content + b"l."
    assert isinstance(walk(whole).root, List)
    if len(opcode) > short:
        straddled = b"\x80\4\x95" + struct.pack("<Q", len(content) - short) + content + b"l."
        with pytest.raises(CorruptError, match="straddles"):
            walk(straddled)


def _taken(work: Callable[[], object]) -> int:
    tracemalloc.start()
    kept = work()
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return nbytes


def _most_taken(work: Callable[[], object]) -> int:
    work()
    tracemalloc.start()
    work()
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return nbytes


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(b"M\0\3", id="numbers of 16 bits"),
        pytest.param(b"h\0", id="a text that names no device"),
    ],
)
def test_what_is_met_again_takes_a_reference(again: bytes) -> None:
    count = 200_000
    data = b"\x80\2]\x8c\5labelq\0a(" + again * count + b"e."
    walk(data[:20] + b".")
    assert _taken(lambda: walk(data)) < 12 * count + 4_000_000


def test_equal_short_numbers_of_a_long_tree_are_one() -> None:
    """Read from JSON as well, where each is text."""
    count = 300_000
    text = f"[{'768,' * count}-1]"
    assert parsed(text) == [*[768] * count, -1]
    assert _taken(lambda: parsed(text)) < 16 * count


def test_a_row_of_numbers_is_its_own_term() -> None:
    graph = List([768] * 600_000)
    assert _most_taken(lambda: to_terms(graph, lambda node: None)) < 3_000_000


def test_rows_are_compared_in_parts() -> None:
    old: list[Node] = [768] * 600_000
    new = old[:]
    assert plainly_same(old, new)
    assert _most_taken(lambda: plainly_same(old, new)) < 5_000_000
    assert plainly_same([], [])
    assert not plainly_same(old, new[:-1])
    for kind, other in ((768, 769), (1, True), (0.0, -0.0), (0, 0.0), (None, 0)):
        for at in (0, 1 << 16, len(old) - 1):
            old[at], new[at] = kind, other
            assert not plainly_same(old, new)
            new[at] = kind
            old[at] = new[at] = 768


def test_a_device_is_a_string_of_its_own_wherever_it_is() -> None:
    root = walk(b"\x80\2]\x8c\6cuda:1q\0ah\0ah\0a.").root
    assert isinstance(root, List)
    assert len({item.at for item in root.items if isinstance(item, Text)}) == 3


def test_a_string_with_uses_that_are_one_is_not_rewritten(tmp_path: Path) -> None:
    """A pickler duplicates none; to rewrite one of two such uses would change the other."""
    path = tmp_path / "twice.pt"
    tensor = (
        b"(ctorch._utils\n_rebuild_tensor_v2\n"
        b"((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0\x30X\3\0\0\0cpuK\1tQ"
        b"K\0K\1\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    path.write_bytes(zipped(b"\x80\2" + tensor + b"X\3\0\0\0cpu2l.", more={"data/0": bytes(4)}))
    ckptmove.relocate(path, tmp_path / "out.pt", to="cuda:0")
    with pytest.raises(UnsupportedError, match="can't be told apart"):
        ckptmove.relocate(path, tmp_path / "all.pt", to="cuda:0", values=True)


def _labels() -> object:
    names = [f"label {n}" for n in range(10)]
    return [names[n % 10] for n in range(30_000)]


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(list(range(300_000)), id="numbers"),
        pytest.param([f"token {n:x}" for n in range(100_000)], id="texts"),
        pytest.param(_labels(), id="labels"),
        pytest.param([(), None, 0.5, -0.0] * 20_000, id="mixed"),
    ],
)
def test_real_long_lists_pass(saved: object, tmp_path: Path) -> None:
    path, there, back = (tmp_path / name for name in ("a.pt", "a.safetensors", "b.pt"))
    path.write_bytes(zipped(pickle.dumps({"rows": saved}, 2)))
    ckptmove.inspect(path)
    ckptmove.relocate(path, tmp_path / "c.pt", to="cuda:0", force=True)
    ckptmove.convert(path, there)
    ckptmove.convert(there, back)
    assert ckptmove.diff(path, back).equal


def test_an_item_of_a_long_row_that_differs_is_found(tmp_path: Path) -> None:
    one, other = tmp_path / "a.pkl", tmp_path / "b.pkl"
    first, second, shared = [1], [1], "x" * 1000
    rows: list[object] = [*[first] * 30_000, (), "a", 0.0, 7, shared, shared, *[first] * 3]
    one.write_bytes(pickle.dumps(rows, 2))
    rows[30_001:30_004] = ["b", -0.0, 8]
    rows[-2] = second
    other.write_bytes(pickle.dumps([*rows, "more"], 2))
    found = ckptmove.diff(one, other)
    said = [(str(each.kind), each.name) for each in found.differences]
    assert said == [
        ("unshared", "0"),
        ("value", "30001"),
        ("value", "30002"),
        ("value", "30003"),
        ("value added", "30009"),
    ]


def test_many_real_tensors_pass_and_far_too_many_do_not(tmp_path: Path) -> None:
    """A header of more tensors than its file can be for is refused before any is made."""
    for each, count, refused in ((4, 9000, False), (0, 30_000, True)):
        path = tmp_path / f"{each}.safetensors"
        header = ",".join(
            f'"model.layers.{n}.weight":{{"dtype":"F32","shape":[{each}],'
            f'"data_offsets":[{4 * each * n},{4 * each * (n + 1)}]}}'
            for n in range(count)
        )
        path.write_bytes(headed(f"{{{header}}}".encode(), bytes(4 * each * count)))
        if refused:
            with pytest.raises(CorruptError, match="30,000 tensors without bytes"):
                ckptmove.inspect(path)
        else:
            assert len(ckptmove.inspect(path).tensors) == 9000
