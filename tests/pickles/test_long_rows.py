"""Long lists are read, converted and compared as they are, and take but little for each item."""

from __future__ import annotations

import json
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import CorruptError, UnsupportedError
from ckptmove.pickles.emit import emit
from ckptmove.pickles.nodes import Dict, List, Node, Text, Tuple, are_plain
from ckptmove.pickles.opcodes.rows import compact_row, same_numbers
from ckptmove.pickles.terms import from_terms, json_parts, parse_term, term_json, to_terms
from ckptmove.pickles.walk import walk
from ckptmove.torch_pickle.children import visits_of
from tests.making.bombs import headed, zipped

RANDOM = random.Random(0)
ITEMS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "true": lambda: True,
    "byte": lambda: RANDOM.randrange(256),
    "short": lambda: RANDOM.randrange(1 << 16),
    "word": lambda: RANDOM.randrange(-(1 << 31), 1 << 31),
    "float": RANDOM.random,
    "flag": lambda: RANDOM.choice([None, True, False]),
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
    text = f"[null{',768' * count}]"
    assert list(parse_term(text)) == [None, *[768] * count]
    assert _taken(lambda: parse_term(text)) < 16 * count


@pytest.mark.slow
@pytest.mark.parametrize("number", [70_000, 0.5])
def test_numbers_of_a_long_row_take_eight_bytes(number: float, tmp_path: Path) -> None:
    """In a graph, and on the way to JSON and back."""
    count = 300_000
    text = f"[{f'{number},' * count}-1.5]" if number == 0.5 else f"[{f'{number},' * count}-1]"
    assert _taken(lambda: parse_term(text)) < 9 * count
    assert _most_taken(lambda: parse_term(text)) < 20 * count + 6_000_000
    data = pickle.dumps([number] * count, 2)
    walked = walk(data).root
    assert _taken(lambda: walk(data)) < 11 * count
    assert _most_taken(lambda: sum(map(len, json_parts(to_terms(walked, _nothing))))) < 9_000_000
    assert _most_taken(lambda: emit(walked)) < 21 * count


NOT_QUITE_ROWS = {
    "nothing at the end": "[{}1,]",
    "nothing between": "[{},1]",
    "nothing at the start": "[,{}1]",
    "no number": "[{}1-2]",
    "a zero in front": "[{}01]",
    "a large number": "[{}1e999]",
    "a very long number": "[{}1" + "0" * 30 + "]",
    "a very long fraction": "[{}0.5" + "0" * 40 + "]",
    "no number of JSON": "[{}1,NaN]",
    "a constant before": "[NaN,[{}1]]",
    "a constant behind": "[[{}1],NaN]",
    "a constant around": "[Infinity,[{}1]]",
    "a minus before": "-[{}1]",
    "a key": "{{[{}1]:1}}",
    "nothing at the end of a part": '["a",{}]',
    "nothing before a text": '[{}"a",,1]',
    "nothing between parts": '["a",{}1,,"b"]',
    "a large number in a part": '["a",{}1e999]',
    "a constant in another part": '["a",{}1,NaN]',
    "numbers as a pair": '{{"a":{}1}}',
}


@pytest.mark.parametrize("kind", NOT_QUITE_ROWS)
def test_a_row_of_json_is_read_as_strictly_as_the_rest(kind: str) -> None:
    for count in (1, 2000, 100_000):
        with pytest.raises(CorruptError):
            parse_term(NOT_QUITE_ROWS[kind].format("17," * count))


ROW = "1234567,-1," * 2000


@pytest.mark.parametrize(
    "text",
    [
        f"[{ROW}0]",
        f"[{ROW}0.5]",
        f'["a",{ROW}0]',
        f'[{ROW}0,"a"]',
        f'[true,{ROW}0,null,{ROW}1,false,{ROW}2,[],{ROW}3,{{"b":1}},{ROW}4,"a",{ROW}5]',
        f'[["a",{ROW}0],{{"b":["a",{ROW}"a",[{ROW}1,null]]}}]',
        f'["a",{"0.5,-0.0,1e300," * 2000}1e-300,{ROW}0]',
        f"[{ROW}null]",
        f"[{ROW}{1 << 62}]",
        f"[{ROW}{1 - (1 << 63)}]",
        f"[{'0.5,-0.0,1e300,' * 2000}1e-300]",
        f'[[{ROW}0],"[{ROW}0]",[{ROW}0.5,1],"\\\\",[{ROW}1],"\\\\\\"[{ROW}",[{ROW}2]]',
        f'{{"a":[{ROW}0],"b]":{{"NaN":"NaN"}},"c":["\\ud83d\\ude00",[{ROW}1]]}}',
    ],
)
def test_rows_of_json_are_what_python_reads(text: str) -> None:
    said, expected = parse_term(text), json.loads(text)
    assert json.dumps(said, default=list) == json.dumps(expected)
    graph = from_terms(said, lambda _: None)
    assert json.loads(term_json(to_terms(graph, _nothing))) == expected


def test_text_that_stands_for_a_row_is_text() -> None:
    texts = ["\\ud800", '"\\ud800"', '\\"\\ud800"', "\U00010000", "NaN", "[]"]
    graph = List([List([Text(each, 0) for each in texts]), List(compact_row([70_000] * 20))])
    assert json.loads(term_json(to_terms(graph, _nothing))) == [texts, [70_000] * 20]


def _nothing(_: object) -> None:
    """No node is known."""


def test_tuples_of_numbers_are_not_visited_one_by_one() -> None:
    """A list of a million pairs takes as long, and as much, as to walk it."""
    pairs = walk(pickle.dumps([(n, 0.5) for n in range(100)] + [[1, 2], (1, "cuda:0")], 2)).root
    assert isinstance(pairs, List)
    inside, held = visits_of(pairs, {}, {})
    assert list(inside) == [((101,), pairs.items[101])]
    assert held == pairs.items
    row = walk(pickle.dumps([[0.5, None] * 50] * 2, 2)).root
    assert isinstance(row, List)
    leads: dict[int, bool] = {}
    assert not list(visits_of(row, leads, {})[0])
    assert leads == {id(row): False, id(row.items[0]): False}  # a long one is looked at once


def test_a_row_is_looked_at_once_however_often_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(row: Sequence[Node]) -> bool:
        asked.append(len(row))
        return are_plain(row)

    monkeypatch.setattr("ckptmove.torch_pickle.children.are_plain", counted)
    inner = [*range(100), "cuda:0"]
    for content in ([inner] * 1000, dict.fromkeys(range(1000), inner)):
        root = walk(pickle.dumps(content, 2)).root
        assert isinstance(root, (List, Dict))
        asked.clear()
        assert len(list(visits_of(root, {}, {})[0])) == 1000
        assert asked.count(len(inner)) == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "parts",
    [
        ([1, 2], [1 << 40]),
        ([1.5], [2.5]),
        ([1], [1.0]),
        ([1], [True]),
        ([1.0], [None]),
        ([1], [1 << 70]),
        ([-1 << 63], [1]),
        ([1], [-1 << 63]),
        ([1], [300]),
        ([300], [1]),
        ([300], [-1]),
        ([-1], [1 << 40]),
        ([True, None], [False]),
        ([True], [1]),
        ([1], [None]),
        ([float("nan"), -0.0], [1.5]),
    ],
)
def test_rows_grow_by_what_is_appended(parts: tuple[list[object], list[object]]) -> None:
    """As pickles have it: a thousand at once, or one by one."""
    first, more = (part * 20 for part in parts)
    mark = b"\x80\2]("
    for some in (more, more[:1]):
        data = mark + _pushed(first) + b"e(" + _pushed(some) + b"e."
        assert _values(data) == [*map(repr, pickle.loads(data))]
    one_by_one = b"\x80\2]" + b"".join(_pushed([each]) + b"a" for each in [*first * 300, *more])
    assert _values(one_by_one + b".") == [*map(repr, pickle.loads(one_by_one + b"."))]


def _pushed(items: list[object]) -> bytes:
    return b"".join(pickle.dumps(each, 2)[2:-1] for each in items)


def _values(data: bytes) -> list[str]:
    root = walk(data).root
    assert isinstance(root, List)
    assert emit(root) == emit(List(list(root.items)))
    return [*map(repr, root.items)]


def test_a_row_of_numbers_is_its_own_term() -> None:
    graph = List([768] * 600_000)
    assert _most_taken(lambda: to_terms(graph, lambda node: None)) < 3_000_000


@pytest.mark.slow
def test_rows_are_compared_in_parts() -> None:
    old: list[Node] = [768] * 600_000
    new = old[:]
    assert same_numbers(old, new)
    assert _most_taken(lambda: same_numbers(old, new)) < 5_000_000
    assert same_numbers([], [])
    assert not same_numbers(old, new[:-1])
    for kind, other in ((768, 769), (1, True), (0.0, -0.0), (0, 0.0), (None, 0)):
        for at in (0, 1 << 16, len(old) - 1):
            old[at], new[at] = kind, other
            assert not same_numbers(old, new)
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


@pytest.mark.slow
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
