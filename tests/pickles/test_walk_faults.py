"""walk() on pickles that are broken or built to do harm: always one kind of error, never much of
anything."""

from __future__ import annotations

import contextlib
import pickle
import random
import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptmove.errors import CorruptError, InputError
from ckptmove.pickles.fetch import fetch
from ckptmove.pickles.gaps import FetchedPickle
from ckptmove.pickles.nodes import List, Tuple
from ckptmove.pickles.walk import Pickle, walk, walk_at
from ckptmove.sources.budget import Budget
from ckptmove.sources.source import Memory
from tests.conftest import examples
from tests.making.building import CODES, Stored, at_most, dumps

SAVED = {
    "ints": [0, 255, 65_535, -1, 2**31, 2**80, True],
    "text": ("a", "ü€", "x" * 300),
    "more": [b"b" * 300, bytearray(b"c"), {1, 2}, frozenset({3}), None, 1.5, 1j],
    "tree": OrderedDict([((1, 2), [{}, (), []])]),
    "storages": [Stored("0", "cpu"), "cpu", Stored("1", "cuda:0")],
}
PICKLES = {protocol: dumps(SAVED, protocol) for protocol in range(1, 6)}
PICKLES[0] = pickle.dumps({**SAVED, "storages": None}, 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("protocol", PICKLES)
def test_cut_anywhere_it_is_corrupt(protocol: int) -> None:
    data = PICKLES[protocol]
    walk(data)
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            walk(data[:end])


FRAME = CODES["FRAME"]
FAULTS: dict[str, bytes] = {
    "nothing": b"",
    "only STOP": b".",
    "no STOP": b"N",
    "a byte that is no opcode": b"\x80\x02\xffN.",
    "zero": b"\0",
    "a text": b"This is no pickle",
    # the stack
    "POP of nothing": b"0N.",
    "DUP of nothing": b"2.",
    "TUPLE1 of nothing": b"\x85.",
    "TUPLE2 of one": b"N\x86.",
    "TUPLE3 of two": b"NN\x87.",
    "APPEND to nothing": b"Na.",
    "SETITEM to nothing": b"NNs.",
    "REDUCE of one": b"NR.",
    "NEWOBJ of one": b")\x81.",
    "NEWOBJ_EX of two": b")}\x92.",
    "BUILD of one": b"}b.",
    "BINPERSID of nothing": b"Q.",
    "STACK_GLOBAL of one": b"\x8c\x01a\x93.",
    "STOP above a MARK": b"N(.",
    "BINPUT of nothing": b"q\x00N.",
    "LONG_BINPUT of nothing": b"r\0\0\0\0N.",
    "PUT of nothing": b"p0\nN.",
    "MEMOIZE of nothing": b"\x94N.",
    # marks
    "TUPLE without MARK": b"NNt.",
    "LIST without MARK": b"l.",
    "DICT without MARK": b"d.",
    "APPENDS without MARK": b"]Ne.",
    "SETITEMS without MARK": b"}NNu.",
    "ADDITEMS without MARK": b"\x8fN\x90.",
    "FROZENSET without MARK": b"\x91.",
    "POP_MARK without MARK": b"N1.",
    "OBJ without MARK": b"Nio.",
    "OBJ of nothing": b"(o.",
    "INST without MARK": b"ia\nb\n.",
    "two closed, one opened": b"(NtNt.",
    "an opcode that reaches below a MARK": b"N(a.",
    "a tuple that reaches below a MARK": b"NN(\x86.",
    "APPENDS to what is below two MARKs": b"](((Ne.",
    "a PUT of what is below a MARK": b"N(q\x00.",
    # targets
    "APPEND to a tuple": b")Na.",
    "APPEND to a dict": b"}Na.",
    "APPEND to a string": b"\x8c\x01aNa.",
    "APPENDS to a set": b"\x8f(Ne.",
    "APPENDS to None": b"N(Ne.",
    "APPEND to a global": b"ca\nb\nNa.",
    "APPEND to a storage": b"NQNa.",
    "SETITEM of a list": b"]NNs.",
    "SETITEMS of a tuple": b")(NNu.",
    "SETITEMS of three": b"}(NNNu.",
    "DICT of three": b"(NNNd.",
    "ADDITEMS to a list": b"](N\x90.",
    "ADDITEMS to a frozenset": b"(\x91(N\x90.",
    "BUILD of a list": b"]}b.",
    "BUILD of a dict": b"}}b.",
    "BUILD of a string": b"\x8c\x01a}b.",
    "BUILD of a global": b"ca\nb\n}b.",
    "BUILD twice": b"ca\nb\n)R}b}b.",
    "BUILD twice through the memo": b"ca\nb\n)Rq\x00}b(h\x00}bt\x86.",
    # the memo
    "GET of an empty slot": b"g0\n.",
    "BINGET of an empty slot": b"]q\x01h\x00.",
    "LONG_BINGET of an empty slot": b"j\xff\xff\xff\xff.",
    "BINGET before its PUT": b"(h\x00]q\x00t.",
    "PUT under a negative number": b"]p-1\n.",
    "GET of a negative number": b"]p-1\ng-1\n.",
    # frames
    "a frame within a frame": FRAME + struct.pack("<Q", 11) + FRAME + struct.pack("<Q", 1) + b"N.",
    "a frame longer than the rest": FRAME + struct.pack("<Q", 3) + b"N.",
    "a pickle that ends within its frame": FRAME + struct.pack("<Q", 3) + b"N.N.",
    "a frame of 2^64 - 1": FRAME + b"\xff" * 8 + b"N.",
    "a number across the end of a frame": FRAME + struct.pack("<Q", 2) + b"J\0\0\0\0.",
    "a string across the end of a frame": FRAME + struct.pack("<Q", 3) + b"\x8c\x03cpu.",
    "a line across the end of a frame": FRAME + struct.pack("<Q", 3) + b"I1234\n.",
    "a frame that begins at the end of another's argument": (
        FRAME + struct.pack("<Q", 2) + b"\x8c\x09" + FRAME + struct.pack("<Q", 1) + b"N."
    ),
    # lengths
    "BINUNICODE longer than the rest": b"X\x02\0\0\0a.",
    "BINUNICODE of 2^32 - 1": b"X\xff\xff\xff\xffa.",
    "SHORT_BINUNICODE longer than the rest": b"\x8c\x05a.",
    "BINUNICODE8 of 2^62": b"\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "BINUNICODE8 of 2^64 - 1": b"\x8d" + b"\xff" * 8 + b"a.",
    "BINBYTES longer than the rest": b"B\x05\0\0\0a.",
    "BINBYTES8 of 2^63": b"\x8e" + struct.pack("<Q", 1 << 63) + b"a.",
    "BYTEARRAY8 of 2^64 - 1": b"\x96" + b"\xff" * 8 + b"a.",
    "BINSTRING longer than the rest": b"T\xff\xff\xff\x7fa.",
    "LONG1 longer than the rest": b"\x8a\xff\x01.",
    "LONG4 longer than the rest": b"\x8b\xff\xff\xff\x7f\x01.",
    "LONG4 of a negative length": b"\x8b\xff\xff\xff\xff\x01.",
    # text and numbers
    "text that is not UTF-8": b"X\x01\0\0\0\xff.",
    "text that ends within a character": b"\x8c\x02\xe2\x82.",
    "a global that is not UTF-8": b"c\xff\nb\n.",
    "a bad escape": b"V\\u12\n.",
    "a string without quotes": b"Sabc\n.",
    "a string with one quote": b"S'\n.",
    "a string whose quotes differ": b"S'a\"\n.",
    "a string with a bad escape": b"S'\\x1'\n.",
    "a line without end": b"I1",
    "a GLOBAL without name": b"cos\n.",
    "INT of no number": b"Iabc\n.",
    "INT of nothing": b"I\n.",
    "INT with other digits": "I\uff11\n.".encode(),
    "LONG of no number": b"L1.5L\n.",
    "LONG of two suffixes": b"L1LL\n.",
    "FLOAT of no number": b"Fabc\n.",
    "GET of no number": b"]p0\ngx\n.",
    "PUT of no number": b"]px\n.",
    "INT of 10^5 digits": b"I" + b"9" * 100_000 + b"\n.",
    "LONG of 10^5 digits": b"L" + b"9" * 100_000 + b"L\n.",
    "PUT of 10^5 digits": b"]p" + b"9" * 100_000 + b"\n.",
    "STACK_GLOBAL of a number": b"\x8c\x01aK\x01\x93.",
    "STACK_GLOBAL of bytes": b"C\x01a\x8c\x01b\x93.",
    "the second of two pickles is broken, and asked for": b"(.N.",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_structural_fault_is_corrupt(fault: str) -> None:
    with pytest.raises(CorruptError, match=r"offset [\d,]+ of the pickle"):
        walk(FAULTS[fault])


def test_damaged_anywhere_it_is_walked_or_refused() -> None:
    """Some damage makes another pickle; whatever it makes, no other exception comes out."""
    dice = random.Random(0)
    refused = 0
    count = examples(20_000)
    for _ in range(count):
        data = bytearray(dice.choice(list(PICKLES.values())))
        for _ in range(dice.choice([1, 1, 2, 5])):
            at = dice.randrange(len(data))
            piece = dice.choice(list(CODES.values())) + dice.randbytes(dice.choice([0, 0, 1, 4]))
            data[at : at + dice.choice([0, 1, 1, 3])] = dice.choice([piece, dice.randbytes(1), b""])
        try:
            walk(bytes(data))
        except InputError:
            refused += 1
    assert count // 4 < refused < count * 39 // 40


@given(st.lists(st.sampled_from(sorted(CODES.values())) | st.binary(max_size=3)).map(b"".join))
def test_any_opcodes_are_walked_or_refused(data: bytes) -> None:
    with contextlib.suppress(InputError):
        walk(data)


# Harm


def traced_peak(data: bytes) -> int:
    """Bytes that a walk holds at most, beyond the pickle."""
    walk(b"N.")
    tracemalloc.start()
    try:
        walk(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_string_recalled_often_is_held_once() -> None:
    text = b"x" * 1_000
    data = b"(X" + struct.pack("<I", len(text)) + text + b"q\x00" + b"h\x00" * 100_000 + b"t."
    assert traced_peak(data) < 5 << 20


def test_short_strings_recalled_often_take_no_more_than_a_node_each() -> None:
    text = "\U0001f600".encode() * 64  # the widest of those that have a place for each use
    data = b"(X" + struct.pack("<I", len(text)) + text + b"q\x00" + b"h\x00" * 20_000 + b"t."
    assert traced_peak(data) < 20_000 * 500


def test_doubling_tuples_are_held_once() -> None:
    data = b")" + b"q\x00h\x00\x86" * 5_000 + b"."
    with at_most(60):
        assert traced_peak(data) < 5 << 20


def test_a_high_slot_takes_no_more_than_a_low_one() -> None:
    assert traced_peak(b"]r\xff\xff\xff\xff0j\xff\xff\xff\xff.") < 1 << 16


@pytest.mark.parametrize(
    "declared",
    [b"X\xff\xff\xff\x7f", b"\x8d" + struct.pack("<Q", 1 << 40), b"\x8b\xff\xff\xff\x7f"],
)
def test_nothing_is_allocated_for_bytes_that_are_not_there(declared: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(CorruptError):
        walk(declared + b"x.")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


DEEP = 15_000  # fewer than any file may have of whatever it is


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("down", "up"),
    [
        (b"]", b"a"),
        (b"(", b"t"),
        (b"(", b"l"),
        (b"", b"\x85"),
        (b"}K\x00", b"s"),
        (b"ca\nb\n", b"R"),
        (b"ca\nb\n)R", b"b"),
        (b"", b"Q"),
        (b"(", b"\x91"),
    ],
)
def test_deep_nesting_is_walked_and_freed(down: bytes, up: bytes) -> None:
    with at_most(120):
        root = walk(down * DEEP + b")" + up * DEEP + b".").root
        assert root is not None
        del root


def test_a_deep_tree_is_as_deep_as_it_is() -> None:
    node, depth = walk(b"]" * DEEP + b"a" * (DEEP - 1) + b".").root, 0
    while isinstance(node, List):
        node, depth = node.items[0] if node.items else None, depth + 1
    assert depth == DEEP


def test_opcodes_to_no_effect_come_to_an_end() -> None:
    data = b"N" + b"N0" * 20_000_000 + b"."
    with at_most(60), pytest.raises(CorruptError, match="far denser"):
        walk(data)


def test_slots_that_a_relocation_left_out_are_no_fault() -> None:
    items = [b"X\5\0\0\0abcde\x85r" + struct.pack("<I", 3 * n) for n in range(100_000)]
    root = walk(b"\x80\2(" + b"".join(items) + b"j" + struct.pack("<I", 299_997) + b"t.").root
    assert isinstance(root, Tuple)
    assert len(root.items) == 100_001
    assert root.items[-1] is root.items[-2]


LONG = {"long": b"B" * 70_000, "short": b"T" * 100, "text": "B" * 300}
BARE_AND_LONG = PICKLES | {"long": dumps(LONG, 4)}


def in_memory(memory: Memory) -> tuple[FetchedPickle, Pickle]:
    return walk_at(memory, 0, 0, Budget())


def in_file(memory: Memory) -> tuple[FetchedPickle, Pickle]:
    fetched = fetch(memory, 0)
    return fetched, walk(fetched.data, 0, fetched.gap_sizes(), Budget())


def outcome(
    walked: Callable[[Memory], tuple[FetchedPickle, Pickle]], memory: Memory
) -> tuple[object, ...]:
    try:
        fetched, found = walked(memory)
    except InputError as error:
        return type(error), str(error)
    said = found.nbytes, len(found.calls), len(found.blobs), len(found.globals)
    return fetched.data, fetched.nbytes, fetched.gaps, said


@given(
    st.sampled_from([*BARE_AND_LONG]),
    st.lists(
        st.tuples(st.integers(0, 1 << 20), st.sampled_from(b"BTX\x8e\x95q.\xff\0")), max_size=3
    ),
    st.integers(0, 40),
)
@example(4, [(13931, 46)], 0)  # a STOP within a frame
def test_in_memory_a_pickle_is_what_it_is_in_a_file(
    name: int | str, changes: list[tuple[int, int]], cut: int
) -> None:
    content = bytearray(BARE_AND_LONG[name])
    for at, code in changes:
        content[at % len(content)] = code
    content = content[: len(content) - cut] if cut < 20 else content + b"rest"
    memory = Memory(bytes(content), "x.pkl")
    assert outcome(in_memory, memory) == outcome(in_file, memory)
