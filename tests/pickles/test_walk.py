"""walk(): what a pickle would build, against the unpickler of the standard library."""

from __future__ import annotations

import codecs
import io
import pickle
import pickletools
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import InputError, UnsupportedError
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
from ckptmove.sources.budget import Boundless, Excess
from tests.making.building import CODES, opcodes_of
from tests.making.python2 import text_or_bytes
from tests.oracles.sameness import assert_same_tree

PROTOCOLS = range(6)

# What the pickles of these tests may call: the standard library's own.
CALLS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": codecs.encode,
    "builtins.bytearray": bytearray,
    "builtins.bytes": bytes,
    "builtins.complex": complex,
    "builtins.frozenset": frozenset,
    "builtins.set": set,
    "collections.OrderedDict": OrderedDict,
}


class Values:
    """Turns inert nodes back into the values they stand for; what is one node is one value."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def value(self, node: Node) -> Any:
        """The value of a node."""
        if isinstance(node, Text):
            return str(node)
        if node is None or isinstance(node, (bool, int, float, str, bytes)):
            return node
        if id(node) not in self._made:
            self._make(node)
        return self._made[id(node)]

    def _make(self, node: Blob | Global | Tuple | List | Set | Dict | Call | Persistent) -> None:
        if isinstance(node, Global):
            made: Any = CALLS.get(node.qualname, node.qualname)
        elif isinstance(node, Tuple):
            made = tuple(map(self.value, node.items))
            made = self._made.get(id(node), made)  # it may hold itself, within a list
        elif isinstance(node, Set):
            made = (frozenset if node.frozen else set)(map(self.value, node.items))
        elif isinstance(node, List):
            made = self._made[id(node)] = []
            made.extend(map(self.value, node.items))
        elif isinstance(node, Dict):
            made = self._made[id(node)] = {}
            made.update((self.value(key), self.value(value)) for key, value in node.pairs)
        elif isinstance(node, Persistent):
            made = ("persistent", self.value(node.pid))
        else:
            assert isinstance(node, Call)
            made = self._call(node)
        self._made[id(node)] = made

    def _call(self, node: Call) -> Any:
        kwargs = self.value(node.kwargs) or {}
        made = self._made[id(node)] = self.value(node.function)(*self.value(node.args), **kwargs)
        for item in node.items:
            made.add(self.value(item)) if isinstance(made, set) else made.append(self.value(item))
        for key, value in node.pairs:
            made[self.value(key)] = self.value(value)
        if node.built:
            vars(made).update(self.value(node.state))
        return made


class _Pickles(pickle.Unpickler):
    """The oracle; persistent ids become pairs, extensions their names."""

    def persistent_load(self, pid: Any) -> Any:
        return ("persistent", pid)


def assert_walks_as_it_unpickles(data: bytes) -> None:
    """Equal values, of the same types and shared in the same way."""
    walked = walk(data)
    assert walked.nbytes == len(data)
    assert_same_tree(_Pickles(io.BytesIO(data)).load(), Values().value(walked.root))


def pickled(saved: object, protocol: int, pickler: Any = pickle.Pickler) -> bytes:
    """The pickle of `saved` by the pickler in C, or the one in Python."""
    file = io.BytesIO()
    pickler(file, protocol).dump(saved)
    return file.getvalue()


# Values, as picklers write them


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers(-1, 70_000) | st.tuples(st.integers(0, 2))
    lists, dicts = st.lists(children, max_size=4), st.dictionaries(keys, children, max_size=4)
    sets = st.sets(keys, max_size=4)
    twice = children.map(lambda child: [child, (child, child), {"again": child}])
    return st.one_of(
        *(lists, lists.map(tuple), dicts, dicts.map(OrderedDict), sets, sets.map(frozenset)),
        *(twice, lists.map(holding_itself), dicts.map(holding_itself)),
    )


def holding_itself(value: Any) -> Any:
    """A list or dict that is its own last element, and once more within a tuple."""
    if isinstance(value, list):
        value += [value, (1, value)]
    else:
        value["self"], value["pair"] = value, (value, value)
    return value


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.sampled_from([0, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31), 1 << 3000])
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=6)
    | st.sampled_from(["cpu", "\ud800", "a\nb", "\\u0041", "\0", "é", "x" * 300])
    | st.binary(max_size=6)
    | st.sampled_from([b"\x80" * 300])
    | st.binary(max_size=6).map(bytearray),
    _containers,
    max_leaves=12,
)


@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler], ids=["C", "Python"])
@given(saved=VALUES, protocol=st.sampled_from(PROTOCOLS), optimized=st.booleans())
def test_what_is_pickled_is_walked(
    pickler: Any, saved: object, protocol: int, optimized: bool
) -> None:
    data = pickled(saved, protocol, pickler)
    assert_walks_as_it_unpickles(pickletools.optimize(data) if optimized else data)


@pytest.mark.sample(1)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_frames_and_what_lies_between_them(protocol: int) -> None:
    shared = ["frame", 1.5]
    saved = [[f"{n:9}", shared, n] for n in range(9_000)]
    data = pickled([saved, b"b" * 70_000, "s" * 70_000, shared, saved[0]], protocol)
    assert opcodes_of(data)["FRAME"] == (0 if protocol < 4 else 4)
    assert_walks_as_it_unpickles(data)


# Opcodes, each

OPCODES: dict[str, bytes] = {
    "INT": b"(I12\nI-3\nI01\nI00\nl.",
    "BININT": b"J\xff\xff\xff\xff.",
    "BININT1": b"K\xff.",
    "BININT2": b"M\xff\xff.",
    "LONG": b"(L123L\nL-1L\nL0\nl.",
    "LONG1": b"(\x8a\x00\x8a\x01\xff\x8a\x02\xff\x00l.",
    "LONG4": b"\x8b\x03\x00\x00\x00\x01\x02\x83.",
    "STRING": b"(S'a\\x41\\n'\nS\"'\"\nl.",
    "BINSTRING": b"T\x02\x00\x00\x00ab.",
    "SHORT_BINSTRING": b"U\x03cpu.",
    "BINBYTES": b"B\x02\x00\x00\x00\xff\x00.",
    "SHORT_BINBYTES": b"C\x01\xff.",
    "BINBYTES8": b"\x8e\x01" + bytes(7) + b"\xff.",
    "BYTEARRAY8": b"\x96\x01" + bytes(7) + b"\xff\x94h\x00\x86.",
    "NONE": b"N.",
    "NEWTRUE": b"\x88.",
    "NEWFALSE": b"\x89.",
    "UNICODE": b"(V\\u20ac\nV\xe9\nV\nl.",
    "SHORT_BINUNICODE": b"\x8c\x03\xe2\x82\xac.",
    "BINUNICODE": b"X\x03\x00\x00\x00\xed\xa0\x80.",
    "BINUNICODE8": b"\x8d\x01" + bytes(7) + b"a.",
    "FLOAT": b"(F1.5\nF-0.0\nFnan\nF-inf\nl.",
    "BINFLOAT": b"G\x7f\xf8\x00\x00\x00\x00\x00\x01.",
    "EMPTY_LIST": b"].",
    "APPEND": b"]K\x01aK\x02a.",
    "APPENDS": b"](K\x01K\x02e(e.",
    "LIST": b"((lK\x01l.",
    "EMPTY_TUPLE": b"))\x86.",
    "TUPLE": b"(K\x01K\x02K\x03K\x04t.",
    "TUPLE1": b"K\x01\x85.",
    "TUPLE2": b"K\x01K\x02\x86.",
    "TUPLE3": b"K\x01K\x02K\x03\x87.",
    "EMPTY_DICT": b"}.",
    "DICT": b"(K\x02NK\x01Nd.",
    "SETITEM": b"}K\x02NsK\x01NsK\x02K\x03s.",
    "SETITEMS": b"}(K\x02NK\x01Nu(u.",
    "EMPTY_SET": b"\x8f.",
    "ADDITEMS": b"\x8f(K\x01K\x02\x90.",
    "FROZENSET": b"(K\x01K\x02\x91.",
    "POP": b"NK\x01K\x020(0\x86.",
    "DUP": b"]2\x86.",
    "MARK": b"N(K\x01(K\x02tt\x86.",
    "POP_MARK": b"N(K\x01(K\x0211.",
    "GET": b"]p7\ng7\n\x86.",
    "BINGET": b"]q\x07h\x07\x86.",
    "LONG_BINGET": b"]r\x07\x01\x00\x00j\x07\x01\x00\x00\x86.",
    "PUT": b"]p300\nNp300\ng300\n\x87.",
    "BINPUT": b"]q\xffNq\xffh\xff\x87.",
    "LONG_BINPUT": b"]r\xff\xff\x00\x00j\xff\xff\x00\x00\x86.",
    "MEMOIZE": b"]q\x05\x94}\x94h\x05h\x01h\x02\x87\x86\x86.",
    "GLOBAL": b"ccollections\nOrderedDict\n)R.",
    "STACK_GLOBAL": b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93)R.",
    "REDUCE": b"cbuiltins\ncomplex\nK\x01K\x02\x86R.",
    "BUILD": b"ccollections\nOrderedDict\n)R}U\x01aK\x01sb.",
    "INST": b"(K\x01K\x02ibuiltins\ncomplex\n.",
    "OBJ": b"(cbuiltins\ncomplex\nK\x01K\x02o.",
    "NEWOBJ": b"ccollections\nOrderedDict\n)\x81K\x01K\x02s.",
    "NEWOBJ_EX": b"cbuiltins\ncomplex\n)}\x92.",
    "PROTO": b"\x80\x05\x80\x02N.",
    "STOP": b"NN.",
    "FRAME": b"\x80\x04\x95\x02" + bytes(7) + b"NN\x95\x02" + bytes(7) + b"\x86.",
    "PERSID": b"P12 a\n.",
    "BINPERSID": b"K\x01K\x02\x86Q.",
}
NOT_IN_A_FILE = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}


def test_there_is_an_example_of_each_opcode() -> None:
    assert OPCODES.keys() | NOT_IN_A_FILE == {opcode.name for opcode in pickletools.opcodes}


@pytest.mark.parametrize("name", OPCODES)
def test_each_opcode_does_what_it_does_in_python(name: str) -> None:
    data = OPCODES[name]
    assert opcodes_of(data)[name]
    if name in ("NEWOBJ", "NEWOBJ_EX"):  # CALLS has functions, which are called another way
        call = walk(data).root
        assert isinstance(call, Call)
        assert call.opcode == name
    assert_walks_as_it_unpickles(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\x82\x01.", "1"), (b"\x83\x01\x01.", "257"), (b"\x84\1\0\0\1.", "16777217")],
)
def test_an_extension_code_is_a_name_that_would_be_imported(data: bytes, code: str) -> None:
    walked = walk(data)
    assert [(each.module, each.name) for each in walked.globals] == [("copyreg extension", code)]
    assert walked.root is walked.globals[0]


@pytest.mark.parametrize("data", [b"\x97.", b"N\x98.", b"\x80\x06N.", b"\x80\xffN."])
def test_what_no_file_can_hold_is_unsupported(data: bytes) -> None:
    with pytest.raises(UnsupportedError):
        walk(data)


def test_a_string_knows_where_each_of_its_uses_was_pushed() -> None:
    root = walk(b"(X\x03\x00\x00\x00cpuq\x00h\x00j\x00\x00\x00\x00l.").root
    assert isinstance(root, List)
    assert [(item, item.at) for item in root.items if isinstance(item, Text)] == [
        ("cpu", 1),
        ("cpu", 11),
        ("cpu", 13),
    ]


@pytest.mark.parametrize("data", [b"S'\xc3\xa9'\n.", b"T\2\0\0\0\xc3\xa9.", b"U\2\xc3\xa9."])
def test_strings_of_python_2_are_taken_for_utf_8_as_torch_takes_them(data: bytes) -> None:
    assert walk(data).root == pickle.loads(data, encoding="utf-8") == "é"


def test_names_and_storages_are_listed_in_order_though_they_are_dropped() -> None:
    walked = walk(b"cos\nsystem\n0K\x01Q0(ccopy_reg\nx\nK\x02Q1cbuiltins\nset\n.rest")
    names = [each.qualname for each in walked.globals]
    assert names == ["os.system", "copyreg.x", "builtins.set"]
    assert [each.pid for each in walked.persistents] == [1, 2]
    assert (walked.nbytes, walked.protocol) == (48, 0)


def test_a_string_to_import_from_may_be_of_any_module_name() -> None:
    walked = walk(b"\x80\x04\x8c\x0b__builtin__\x8c\x03a.b\x93.")
    assert [(each.module, each.name) for each in walked.globals] == [("__builtin__", "a.b")]
    assert walked.protocol == 4


class _Plain(pickle._Unpickler):
    """Unpickles in Python, so that a slot of 2^32 - 1 takes no memory; imports nothing."""

    def find_class(self, _module: str, _name: str) -> Any:
        raise TypeError("no names here")

    def _decode_string(self, value: bytes) -> Any:
        return text_or_bytes(value)

    def persistent_load(self, pid: Any) -> Any:
        return ("persistent", pid)


def test_damaged_pickles_mean_what_they_mean_to_python() -> None:
    """Where Python finds fault with structure, so do we; where both read on, they read the same."""
    dice = random.Random(1)
    saved = [1, 70_000, [{}, {2: "cpu", "cpu": ("cpu", 1.5)}], b"b", {1, 2}, None, True, 2**70]
    pickles = [pickled(saved[: 8 if n > 3 else 3], n) for n in PROTOCOLS]
    both = 0
    for _ in range(8_000):
        data = bytearray(dice.choice(pickles))
        for _ in range(dice.choice([1, 2])):
            at = dice.randrange(len(data))
            data[at : at + dice.choice([0, 1, 2])] = dice.choice([*CODES.values(), b"\0", b""])
        try:
            root = walk(bytes(data)).root
        except InputError:
            continue
        unpickler = _Plain(io.BytesIO(data), encoding="utf-8")
        try:
            value = unpickler.load()
        except (TypeError, AttributeError):  # unhashable, not callable: values, not structure
            continue
        except (ValueError, pickle.UnpicklingError) as error:
            if "extension code" in str(error) or "EXT" in str(error):
                continue
            raise
        assert_same_tree(value, Values().value(root))
        both += 1
    assert both > 500


def test_an_ordered_dict_of_python_2_is_one() -> None:
    pairs = b"](](U\1aK\1e](U\1bK\2ee"
    root = walk(b"\x80\x02ccollections\nOrderedDict\n" + pairs + b"\x85R.").root
    assert isinstance(root, Call)
    assert root.qualname == "collections.OrderedDict"
    assert root.pairs == [("a", 1), ("b", 2)]


def test_a_list_that_many_dicts_are_made_of_is_not_copied_for_each() -> None:
    times = 5000
    pairs = b"](" + b"](K\0K\0e" * times + b"eq\0"
    calls = b"(" + b"ccollections\nOrderedDict\nh\0\x85R" * times + b"t."
    data = b"\x80\x02" + pairs + b"0" + calls
    with pytest.raises(Excess):  # each call would copy it
        walk(data)
    root = walk(data, budget=Boundless()).root
    assert isinstance(root, Tuple)
    assert sum(len(call.pairs) for call in root.items if isinstance(call, Call)) <= len(data)
