"""difference(): each kind of change is seen, and nothing else is."""

from __future__ import annotations

import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable

import pytest

from ckptmove.pickles.compare import difference
from ckptmove.pickles.nodes import Call, List, Node, Text, Tuple
from ckptmove.pickles.walk import Pickle, walk
from tests.making.building import Stored, dumps


def between(old: bytes, new: bytes) -> str | None:
    """The difference, where none is meant to be."""
    return difference(walk(old), walk(new), {}, {})


def real(bits: int) -> bytes:
    """BINFLOAT with these bits."""
    return b"G" + struct.pack(">Q", bits)


def shared(inner: object, *, once: bool) -> bytes:
    """Something that occurs twice, as one object or as two that are equal."""
    pickled = dumps(inner, 2)[2:-1]
    return b"(" + pickled + b"q\x70" + (b"h\x70" if once else pickled) + b"t."


def ordered(note: object) -> OrderedDict[str, int]:
    """A dict with an attribute, as `_metadata` is one."""
    result = OrderedDict(a=1)
    vars(result)["note"] = note
    return result


CALL = b"ccollections\nOrderedDict\n)"
UNLIKE: dict[str, tuple[object, object]] = {
    # values
    "int": ([1], [2]),
    "long int": (2**70, 2**70 + 1),
    "string": (["cpu"], ["cuda"]),
    "a surrogate": (["\ud800"], ["\ud801"]),
    "bytes": (b"C\x01a.", b"C\x01b."),
    "bytearray": (b"\x96\x01" + bytes(7) + b"a.", b"\x96\x01" + bytes(7) + b"b."),
    "float": (1.5, 1.25),
    "the sign of zero": (0.0, -0.0),
    "the payload of a NaN": (real(0x7FF8 << 48 | 1) + b".", real(0x7FF8 << 48 | 2) + b"."),
    "the sign of a NaN": (real(0x7FF8 << 48) + b".", real(0xFFF8 << 48) + b"."),
    "True to False": (True, False),
    "None to nothing": ([None], []),
    # types
    "bool to int": ([True], [1]),
    "zero to False": ([0], [False]),
    "int to float": ([1], [1.0]),
    "int to string": ([1], ["1"]),
    "string to bytes": (b"\x8c\x01a.", b"C\x01a."),
    "None to an empty tuple": (None, ()),
    "list to tuple": ([1], (1,)),
    "set to frozenset": (b"\x8f(K\x01\x90.", b"(K\x01\x91."),
    "dict to OrderedDict": ({"a": 1}, OrderedDict(a=1)),
    "bytes to bytearray": (b"C\x01a.", b"\x96\x01" + bytes(7) + b"a."),
    # structure
    "the order of a list": ([1, 2], [2, 1]),
    "the order of a dict": ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    "a longer list": ([1], [1, 1]),
    "a longer tuple": ((1,), (1, 1)),
    "an element": (b"\x8f(K\x01\x90.", b"\x8f(K\x02\x90."),
    "a key": ({"a": 1}, {"b": 1}),
    "the type of a key": ({1: None}, {True: None}),
    "int key to string key": ({1: None}, {"1": None}),
    "a value deep inside": ({"a": [({"b": 1},)]}, {"a": [({"b": 2},)]}),
    "a pair more": ({"a": 1}, {"a": 1, "b": 2}),
    "a pair set twice": (b"}U\x01aK\x01s.", b"}U\x01aK\x02sU\x01aK\x01s."),
    # aliasing
    "one list to two": (shared([], once=True), shared([], once=False)),
    "two lists to one": (shared([], once=False), shared([], once=True)),
    "one tuple to two": (shared((1, 2), once=True), shared((1, 2), once=False)),
    "one storage to two": (
        shared(Stored("0", "cpu"), once=True),
        shared(Stored("0", "cpu"), once=False),
    ),
    "one of two others": (b"(]q\x00]q\x01h\x00t.", b"(]q\x00]q\x01h\x01t."),
    "a list in itself": (b"]q\x00h\x00a.", b"]]a."),
    # objects
    "a global": (b"ca\nb\n.", b"ca\nc\n."),
    "the module of a global": (b"ca\nb\n.", b"cc\nb\n."),
    "where a module's name ends": (b"ca.b\nc\n.", b"ca\nb.c\n."),
    "a function": (CALL + b"R.", b"ccollections\nCounter\n)R."),
    "the other of two functions": (
        b"ca\nb\nq\x000cc\nd\nq\x010h\x00)R.",
        b"ca\nb\nq\x000cc\nd\nq\x010h\x01)R.",
    ),
    "an argument": (b"ca\nb\nK\x01\x85R.", b"ca\nb\nK\x02\x85R."),
    "an argument more": (b"ca\nb\n)R.", b"ca\nb\nN\x85R."),
    "a keyword argument": (b"ca\nb\n)}U\x01aK\x01s\x92.", b"ca\nb\n)}U\x01aK\x02s\x92."),
    "REDUCE to NEWOBJ": (CALL + b"R.", CALL + b"\x81."),
    "REDUCE lost": (b"ca\nb\n)\x86.", b"ca\nb\n)R)\x86."),
    "a state": (ordered(1), ordered(2)),
    "a state lost": (ordered(1), OrderedDict(a=1)),
    "the state None lost": (CALL + b"RNb.", CALL + b"R."),
    "an item of an object": (CALL + b"RK\x01a.", CALL + b"RK\x02a."),
    "an item of an object lost": (CALL + b"RK\x01a.", CALL + b"R."),
    "a pair of an object": (OrderedDict(a=1), OrderedDict(a=2)),
    "the order of an object's pairs": (OrderedDict(a=1, b=1), OrderedDict(b=1, a=1)),
    # storages
    "a storage's key": (Stored("0", "cpu"), Stored("1", "cpu")),
    "a storage's location": (Stored("0", "cpu"), Stored("0", "cuda:0")),
    "a storage's size": (Stored("0", "cpu", 1), Stored("0", "cpu", 2)),
    "a storage lost": ([Stored("0", "cpu")], [None]),
    "a storage to its id": (b"K\x01\x85Q.", b"K\x01\x85."),
    # what is dropped again, but was run
    "a global that is dropped": (b"ca\nb\n0N.", b"cc\nb\n0N."),
    "a global that is no longer dropped": (b"ca\nb\n0N.", b"N."),
    "a storage that is dropped": (b"K\x01Q0N.", b"K\x02Q0N."),
    "a call that is dropped": (b"ca\nb\nK\x01\x85R0N.", b"ca\nb\nK\x02\x85R0N."),
    "a call that is dropped with a MARK": (b"(ca\nb\nK\x01\x85R1N.", b"(ca\nb\nK\x02\x85R1N."),
    "a call below the root": (b"ca\nb\nK\x01\x85RN.", b"ca\nb\nK\x02\x85RN."),
    "a call that is no more": (b"ca\nb\n)R0N.", b"ca\nb\n)00N."),
}


def as_pickle(saved: object) -> bytes:
    """Bytes are a pickle already."""
    return saved if isinstance(saved, bytes) else dumps(saved, 2)


@pytest.mark.parametrize("change", UNLIKE)
def test_a_change_is_seen_both_ways_round(change: str) -> None:
    old, new = map(as_pickle, UNLIKE[change])
    assert between(old, old) is None
    assert between(new, new) is None
    assert between(old, new) is not None
    assert between(new, old) is not None


SAVED = {
    "ints": [0, 1, 255, 256, 70_000, -1, True],
    "text": ["cpu", "cpu", "c" + "pu"],
    "twice": [shared_list := [1.5], shared_list, (shared_list,)],
    "storages": (Stored("0", "cpu"), Stored("1", "cuda:0")),
    "ordered": ordered({"version": 1}),
    "nan": [float("nan"), -0.0],
}
REWRITTEN: dict[str, Callable[[bytes], bytes]] = {
    "in another protocol": lambda _: dumps(SAVED, 4),
    "without unused PUTs": pickletools.optimize,
    "with wider ints": lambda data: data.replace(b"K\xff", b"J\xff\0\0\0"),
    "with wider PUTs": lambda data: data.replace(b"}q\x00", b"}r\0\0\0\0"),
    "with something behind it": lambda data: data + b"rest",
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_what_is_only_spelled_differently_is_the_same(how: str) -> None:
    data = dumps(SAVED, 2)
    other = REWRITTEN[how](data)
    assert other != data
    assert between(data, other) is None


# What is meant to change


def locations(pickle: Pickle) -> list[Text]:
    """Where the storages are, by use."""
    uses = []
    for persistent in pickle.persistents:
        assert isinstance(persistent.pid, Tuple)
        use = persistent.pid.items[3]
        assert isinstance(use, Text)
        uses.append(use)
    return uses


def first(node: Node) -> Node:
    """The first item of a list."""
    assert isinstance(node, List)
    return node.items[0]


def test_an_expected_text_must_be_there_and_nowhere_else() -> None:
    def saved(*tags: str) -> Pickle:
        both = [Stored("0", tags[0]), Stored("1", tags[1])]
        return walk(dumps({"user": tags[2], "storages": both}, 2))

    old = saved("cpu", "cpu", "cpu")
    one, other = (use.at for use in locations(old))
    assert one != other
    moved = {one: "cuda:0", other: "mps"}
    assert difference(old, saved("cuda:0", "mps", "cpu"), moved, {}) is None
    assert difference(old, saved("mps", "cuda:0", "cpu"), moved, {}) is not None
    assert difference(old, saved("cuda:0", "cpu", "cpu"), moved, {}) is not None
    assert difference(old, saved("cuda:0", "mps", "cuda:0"), moved, {}) is not None
    assert difference(old, saved("cpu", "cpu", "cpu"), moved, {}) is not None
    assert difference(old, saved("cuda:0", "cpu", "cpu"), {one: "cuda:0"}, {}) is None
    assert difference(old, saved("cuda:0", "cpu", "cpu"), {other: "cuda:0"}, {}) is not None


DEVICE = b"]ctorch\ndevice\n"


@pytest.mark.parametrize(
    ("args", "same"),
    [
        (b"U\x04cuda\x85R", False),
        (b"U\x06cuda:0\x85R", True),
        (b"U\x06cuda:1\x85R", False),
        (b"U\x04cudaK\x00\x86R", False),
        (b")R", False),
        (b"K\x00\x85R", False),
        (b"U\x06cuda:0\x85\x81", False),
        (b"U\x06cuda:0\x85RNb", False),
    ],
)
def test_an_expected_device_is_made_of_one_string(args: bytes, same: bool) -> None:
    old = walk(DEVICE + b"U\x04cudaK\x01\x86Ra.")
    device = first(old.root)
    assert isinstance(device, Call)
    new = walk(DEVICE + args + b"a.")
    found = difference(old, new, {}, {id(device): "cuda:0"})
    assert (found is None) == same
