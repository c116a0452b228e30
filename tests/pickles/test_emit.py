"""emit(): graphs as pickles, against the picklers and unpicklers of Python and torch."""

from __future__ import annotations

import copyreg
import math
import pickle
import pickletools
import struct
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import InputError, UnsupportedError
from ckptmove.pickles.compare import difference
from ckptmove.pickles.emit import emit
from ckptmove.pickles.nodes import (
    Blob,
    Call,
    Dict,
    Global,
    List,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
)
from ckptmove.pickles.walk import walk
from ckptmove.sources.budget import Boundless
from tests.making.building import Stored, at_most, dumps, loads, opcodes_of
from tests.making.checkpoints import MAKERS, rezip, save
from tests.oracles.readers import load, loads_safely
from tests.oracles.sameness import assert_same_tree

PROTOCOLS = range(6)

#: What torch's weights_only unpickler and libtorch's both know, but for LONG4.
SAFE = {
    *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2"),
    *("LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL"),
    *("REDUCE", "NEWOBJ", "BUILD", "BINPERSID", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
}

#: Makers whose pickles hold equal strings that were not one object.
UNLIKE = {
    *("conjugate_view", "device_values", "generator", "wrapper_subclass", "dtensor_state_dict"),
    *("adamw_training", "adam_groups", "gan", "named_parameter_optimizer"),
}


def again(data: bytes) -> bytes:
    """The pickle, walked and spelled; it stays so when that is done once more."""
    emitted = emit(walk(data).root)
    assert emit(walk(emitted).root) == emitted
    assert set(opcodes_of(emitted)) <= SAFE
    return emitted


def read(data: bytes) -> Any:
    """What Python makes of a pickle of these tests."""
    return pickle.loads(data)


class Outer:
    class Inner:
        class Innermost:
            pass

    @staticmethod
    def function() -> None: ...


class Thing:
    """An object with a state, like most."""

    def __init__(self, **state: object) -> None:
        self.__dict__.update(state)


class Named:
    """An object that is made with keywords."""

    def __new__(cls, *args: object, **kwargs: object) -> Named:
        new = super().__new__(cls)
        new.__dict__.update(args=args, kwargs=kwargs)
        return new

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return (1, [2]), {"three": self.__dict__.get("kwargs", {}).get("three")}


class Filled(list[Any]):
    """A list with a state."""


# -- any object, by any protocol -------------------------------------------------------------------

# Not ConnectionError and its like, which Python itself writes as OSError by protocol 2.
NAMES = st.sampled_from(
    [
        *(Outer, Outer.Inner, Outer.Inner.Innermost, Outer.function, len, OrderedDict, OSError),
        *(dict.fromkeys, map, zip, math.sqrt, partial, copyreg.pickle, int),
    ]
)
STRINGS = st.sampled_from(["", "a", "cpu", "latin1", "é", "\ud800", "\udc80x", "\n"]) | st.text()
#: Equal strings are one object, as in a module's source.
INTERNED = STRINGS.map(sys.intern)
NANS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
EDGES = st.sampled_from([0, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**39, 2**63, 2**2039 - 1])
INTEGERS = st.integers() | EDGES | EDGES.map(lambda edge: -edge) | EDGES.map(lambda edge: ~edge)
PLAIN = st.none() | st.booleans() | INTEGERS | st.floats() | NANS | INTERNED | NAMES
BYTES = st.binary(max_size=40)
BYTEARRAYS = BYTES.map(bytearray)
HASHABLE = st.integers() | INTERNED | st.tuples(INTERNED, st.integers(0, 3))
SETS = st.sets(HASHABLE, max_size=5) | st.frozensets(HASHABLE, max_size=5)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(children, max_size=5)
        dicts = st.dictionaries(HASHABLE, children, max_size=4)
        states = st.dictionaries(st.sampled_from(["a", "state", "cpu"]), children)
        return st.one_of(
            *(lists, lists.map(tuple), lists.map(deque), lists.map(Filled)),
            *(dicts, dicts.map(OrderedDict), dicts.map(lambda found: defaultdict(list, found))),
            states.map(lambda state: Thing(**state)),
            children.map(lambda child: [child, (child, child), {"again": child}]),
        )

    return st.recursive(leaves, containers, max_leaves=20)


@given(nested(PLAIN | BYTES | BYTEARRAYS | SETS), st.sampled_from(PROTOCOLS))
def test_python_reads_what_it_had_written(saved: Any, protocol: int) -> None:
    data = pickle.dumps(saved, protocol)
    assert_same_tree(read(again(data)), read(data))


@given(nested(PLAIN | SETS))
def test_it_is_what_python_had_written(saved: Any) -> None:
    data = pickle.dumps(saved, 2)
    assert again(data) == data


@given(nested(PLAIN | SETS))
def test_newer_protocols_come_to_what_python_writes_by_the_older(saved: Any) -> None:
    assert again(pickle.dumps(saved, 5)) == again(pickle.dumps(saved, 2))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 999, 1000, 1001, 2000, 2001, 3500])
@pytest.mark.parametrize(
    "make",
    [list, tuple, set, frozenset, deque, Filled, dict.fromkeys, OrderedDict.fromkeys],
    ids=["list", "tuple", "set", "frozenset", "deque", "Filled", "dict", "OrderedDict"],
)
def test_batches_are_those_of_python(make: Callable[[range], object], count: int) -> None:
    data = pickle.dumps(make(range(count)), 2)
    assert again(data) == data


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [b"", b"a", bytes(range(256)), bytearray(), bytearray(b"\xff\0")])
def test_bytes_are_encoded_text(value: bytes, protocol: int) -> None:
    found = read(again(pickle.dumps([value, value, "latin1"], protocol)))
    assert found[0] == value
    assert type(found[0]) is type(value)
    assert found[0] is found[1]


def test_bytes_that_may_be_a_checkpoint_are_encoded_text() -> None:
    inner = pickle.dumps(list(range(50)), 4)
    data = pickle.dumps([inner, inner, bytearray(inner)], 5)
    assert len(walk(data).blobs) == 2
    assert read(again(data)) == [inner, inner, inner]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_names_in_classes_are_found_step_by_step(protocol: int) -> None:
    saved = [Outer.Inner.Innermost, Outer, Outer.Inner, Outer.function, Outer.Inner]
    data = again(pickle.dumps(saved, protocol))
    assert read(data) == saved
    assert data == pickle.dumps(saved, 2)


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_made_with_keywords(protocol: int) -> None:
    saved = Named(1, [2], three=(3,))
    found = read(again(pickle.dumps([saved, saved], protocol)))
    assert found[0] is found[1]
    assert vars(found[0]) == vars(saved)


@pytest.mark.parametrize("args", [b"", b"K\1"], ids=["no arguments", "one"])
@pytest.mark.parametrize("opcode", ["INST", "OBJ"])
def test_objects_of_protocol_0(opcode: str, args: bytes) -> None:
    name = b"%b\nFilled\n" % __name__.encode() if not args else b"builtins\ncomplex\n"
    made = b"c" + name + args + b"o" if opcode == "OBJ" else args + b"i" + name
    data = b"(" + made + b"."
    assert opcode in opcodes_of(data)
    found = read(again(data))
    assert found == read(data)
    assert type(found) is (complex if args else Filled)
    assert ("REDUCE" if args else "NEWOBJ") in opcodes_of(again(data))


@pytest.mark.parametrize("name", [ConnectionError, OSError, map, range, copyreg, pickle.Unpickler])
def test_names_of_python_2_lead_back(name: Any) -> None:
    saved = copyreg.pickle if name is copyreg else name
    assert read(again(pickle.dumps(saved, 4))) is saved


def test_long_integers() -> None:
    data = pickle.dumps([1 << 2040, -(1 << 2039), (1 << 2039) - 1], 2)
    assert emit(walk(data).root) == data
    assert opcodes_of(data)["LONG4"] == 1


# -- aliasing, cycles, depth -----------------------------------------------------------------------


def looping() -> list[Any]:
    ring: list[Any] = [1]
    table: dict[str, Any] = {"ring": ring}
    thing = Thing(table=table)
    filled = Filled([thing])
    filled.me = filled  # type: ignore[attr-defined]
    ordered: dict[str, Any] = OrderedDict(filled=filled, ring=(ring, ring))
    ordered["itself"] = ordered
    ring += [table, ring, thing, ordered, {Thing(ring=ring), None}]
    vars(thing)["itself"] = thing
    return ring


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cycles(protocol: int) -> None:
    found = read(again(pickle.dumps(looping(), protocol)))
    _, table, ring, thing, ordered, made = found
    assert ring is found is table["ring"]
    assert thing.table is table
    assert thing.itself is thing
    assert ordered["itself"] is ordered
    assert ordered["ring"] == (found, found)
    assert ordered["filled"].me is ordered["filled"]
    assert next(each for each in made if each).ring is found


def test_a_cycle_stays_byte_for_byte() -> None:
    data = pickle.dumps(looping(), 2)
    assert again(data) == data


def through(kind: str) -> Node:
    """A list within something that has to be made before it, and is in the list."""
    ring = List([])
    holds: dict[str, Node] = {
        "tuple": Tuple([ring], 0),
        "set": Set([ring], frozen=False),
        "frozenset": Set([ring], frozen=True),
        "persistent": Persistent(Tuple([ring], 0), 0),
        "function": Call(ring, Tuple([], 0), "REDUCE", 0),
        "args": Call(Global("m", "f", 0), Tuple([ring], 0), "NEWOBJ", 0),
        "kwargs": Call(Global("m", "f", 0), Tuple([], 0), "NEWOBJ_EX", 0, ring),
    }
    ring.items.append(holds[kind])
    return holds[kind]


CLOSED = ["tuple", "set", "frozenset", "persistent", "function", "args", "kwargs"]


@pytest.mark.parametrize("kind", CLOSED)
def test_cycles_through_what_is_closed_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="among the parts that it is made of"):
        emit(through(kind))


def test_a_tuple_in_a_list_in_itself_is_fine_from_the_list() -> None:
    ring = through("tuple").items[0]  # type: ignore[union-attr]
    found = read(emit(ring))
    assert found[0][0] is found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda node: List([node]),
        lambda node: Tuple([node], 0),
        lambda node: Set([node], frozen=True),
        lambda node: Persistent(node, 0),
        lambda node: Call(Global("m", "f", 0), Tuple([node], 0), "REDUCE", 0),
        lambda node: Call(node, Tuple([], 0), "REDUCE", 0),
        lambda node: pairing(node),
        lambda node: stating(node),
    ],
    ids=["list", "tuple", "set", "persistent", "args", "function", "dict", "state"],
)
def test_depth(wrap: Callable[[Node], Node]) -> None:
    node: Node = None
    for _ in range(20_000):  # twenty times what Python calls within itself
        node = wrap(node)
    with at_most(seconds=60):
        data = emit(node)
        assert emit(walk(data, budget=Boundless()).root) == data


def pairing(node: Node) -> Dict:
    made = Dict()
    made.pairs.append(("key", node))
    return made


def stating(node: Node) -> Call:
    made = Call(Global("m", "f", 0), Tuple([], 0), "NEWOBJ", 0)
    made.state, made.built = node, True
    return made


def test_what_is_shared_is_spelled_once() -> None:
    node: Node = List([])
    for _ in range(60):
        node = Tuple([node, node], 0)  # 2 ** 60 leaves
    data = emit(node)
    assert len(data) < 1000
    shared = Tuple(["text", Blob(0, 4, b"blob"), b"some bytes", 1.5], 0)
    data = emit(List([shared] * 100_000))
    assert len(data) < 300_000
    found = read(data)
    assert len(found) == 100_000
    assert all(each is found[0] for each in found)


def test_strings_names_and_bytes_are_shared_by_value() -> None:
    def part() -> list[Node]:
        return [Text("one", 1), "".join(["o", "ne"]), Global("torch", "device", 2), bytes([65, 66])]

    once, twice = emit(List(part())), emit(List([*part(), *part()]))
    assert len(twice) == len(once) + 4 * 2


def test_a_storage_is_memoised_only_where_it_is_met_again() -> None:
    saved = [Stored("0", "cpu"), Stored("1", "cpu"), Stored("0", "cpu")]
    data = dumps(saved)
    assert again(data) == data  # three ids: each is resolved on its own

    one, other = (
        Persistent(Tuple(["storage", Global("torch", "FloatStorage", 0), key, "cpu", 4], 0), 0)
        for key in "01"
    )
    data = emit(List([one, other, Tuple([other, one, one], 0)]))
    assert emit(walk(data).root) == data
    assert opcodes_of(data)["BINPERSID"] == 2
    found: Any = loads(data).tree
    assert found[2][0] is found[1]
    assert found[2][1] is found[2][2] is found[0]
    puts = {arg for opcode, arg, _ in pickletools.genops(data) if opcode.name == "BINPUT"}
    assert puts == set(range(opcodes_of(data)["BINPUT"]))


# -- what can't be spelled -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Global("a\nb", "c", 0), "can't name"),
        (Global("a", "b\n", 0), "can't name"),
        (Global("a", "\ud800", 0), "can't name"),
        (Global("__builtin__", "set", 0), "can't name '__builtin__.set'"),
        (Global("copyreg extension", "7", 0), "registry"),
        (Blob(0, 1 << 40, None), "passed over"),
    ],
)
def test_what_protocol_2_lacks_is_refused(node: Node, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        emit(node)


@given(st.text(), st.text(alphabet=st.characters(exclude_characters=".")))
def test_a_name_is_read_as_it_was_or_refused(module: str, name: str) -> None:
    try:
        data = emit(Global(module, name, 0))
    except UnsupportedError:
        assert any(char == "\n" or "\ud800" <= char <= "\udfff" for char in module + name)
        return
    found = walk(data).root
    assert isinstance(found, Global)
    assert (found.module, found.name) == (module, name)


# -- what torch saves ------------------------------------------------------------------------------


@pytest.mark.sample(70)
@pytest.mark.parametrize("name", MAKERS)
def test_torch_loads_what_it_had_saved(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", MAKERS[name](), "cpu")
    with zipfile.ZipFile(path) as archive:
        data = next(archive.read(n) for n in archive.namelist() if n.endswith("/data.pkl"))
    old, emitted = walk(data), again(data)
    assert difference(old, walk(emitted), {}, {}) is None
    assert (emitted == data) == (name not in UNLIKE)
    spelled = rezip(path, tmp_path / "b.pt", lambda _: False, partial(_instead, emitted))
    safe = loads_safely(path)
    assert safe == loads_safely(spelled)
    assert_same_tree(load(path, weights_only=safe), load(spelled, weights_only=safe))


def test_safe_loads_take_what_protocol_2_lacks(tmp_path: Path) -> None:
    saved = {
        "bytes": [b"a", b"\xff", bytearray(b"\0\1"), bytearray()],
        "none": [],
        "set": {1, "two"},
        "numbers": [float("nan"), -0.0, 2**70, -(2**2000), 1j],
        "dtype": torch.float8_e4m3fn,
        "shape": torch.Size([1, 2]),
        "counter": Counter("abca"),
        "text": "\ud800 é",
    }
    path = tmp_path / "a.pt"
    torch.save(saved, path)
    for protocol in (2, 3, 4, 5):
        if protocol > 2:
            saved["none"] = [b""]  # which Python writes as `bytes()` before, and torch refuses
        emitted = again(pickle.dumps(saved, protocol))
        spelled = rezip(path, tmp_path / "b.pt", lambda _: False, partial(_instead, emitted))
        assert_same_tree(load(spelled, weights_only=True), saved)


def _instead(new: bytes, _: bytes) -> bytes:
    return new


def test_the_pickles_of_the_corpus(corpus_zip: Path) -> None:
    with zipfile.ZipFile(corpus_zip) as archive:
        inside = [name for name in archive.namelist() if name.endswith(".pkl")]
        pickles = [archive.read(name) for name in inside]
    for data in pickles:
        try:
            old = walk(data)
        except InputError:
            continue
        new = walk(again(data))
        assert old.dropped or difference(old, new, {}, {}) is None
