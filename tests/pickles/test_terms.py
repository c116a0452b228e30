"""Terms: every graph comes back from its JSON the same, and nothing else is taken for one."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptmove.errors import CkptmoveError, CorruptError, UnsupportedError
from ckptmove.pickles.compare import difference
from ckptmove.pickles.nodes import (
    Blob,
    Call,
    Dict,
    Global,
    List,
    Mapping,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
)
from ckptmove.pickles.terms import (
    Term,
    check_texts,
    extent_of,
    from_terms,
    parse_term,
    term_json,
    to_terms,
)
from ckptmove.pickles.terms.text import _LONG_RUN, LEAST_BRACKETS, LEAST_TEXTS, MAX_DEPTH, long_runs
from ckptmove.pickles.walk import Pickle, walk
from tests.conftest import examples
from tests.making.building import at_most, dumps
from tests.making.strategies import Checkpoint, checkpoint_trees, trees
from tests.pickles.test_walk import OPCODES, VALUES, holding_itself, pickled

PROTOCOLS = range(6)
DONE = b"PK\3\4" + bytes(60)  # what a checkpoint of its own starts with


def unknown(_: Node) -> None:
    """A caller that knows no leaf."""


def no_leaf(term: dict[str, Any]) -> Node:
    """A caller that made no leaf."""
    raise CorruptError(f"{term['$'][:20]!r} is nothing known")


def there_and_back(root: Node) -> Node:
    """What is read of the JSON of a graph."""
    text = term_json(to_terms(root, unknown))
    assert text.isascii()
    assert term_json(to_terms(root, unknown)) == text
    made = from_terms(parse_term(text), no_leaf)
    assert term_json(to_terms(made, unknown)) == text
    return made


def reading(text: str) -> Node:
    """The graph that JSON stands for."""
    return from_terms(parse_term(text), no_leaf)


def read(term: Term) -> Node:
    """The graph that a term stands for."""
    return reading(json.dumps(term))


def nodes_of(root: Node) -> Iterator[Node]:
    """All nodes but scalars, each once."""
    met: set[int] = set()
    todo: list[Node] = [root]
    while todo:
        node = todo.pop()
        if id(node) in met or node is None or isinstance(node, (bool, int, float, str, bytes)):
            continue
        met.add(id(node))
        yield node
        if isinstance(node, (List, Tuple, Set, Call)):
            todo += node.items
        if isinstance(node, Mapping):
            todo += [each for pair in node.pairs for each in pair]
        if isinstance(node, Call):
            todo += [node.function, node.args, node.kwargs, node.state]
        if isinstance(node, Persistent):
            todo.append(node.pid)


def with_one_empty_tuple(root: Node) -> Node:
    """The graph as Python would have it: there is but one empty tuple, and one of each name."""
    one: dict[object, Node] = {}

    def only(node: Node) -> Node:
        if isinstance(node, Global):
            return one.setdefault((node.module, node.name), node)
        if isinstance(node, Tuple) and not node.items:
            return one.setdefault((), node)
        return node

    for node in list(nodes_of(root)):
        if isinstance(node, (List, Tuple, Set, Call)):
            node.items = list(map(only, node.items))
        if isinstance(node, Mapping):
            node.pairs = [(only(key), only(value)) for key, value in node.pairs]
        if isinstance(node, Call):
            node.function, node.args = only(node.function), only(node.args)
            node.kwargs, node.state = only(node.kwargs), only(node.state)
        if isinstance(node, Persistent):
            node.pid = only(node.pid)
    return root


def assert_same(root: Node, made: Node) -> None:
    """Two graphs are the same, and aliased in the same way."""
    walked = Pickle(root, (), (), (), (), (), 0, False, frozenset(), False, 0)
    assert difference(walked, walked._replace(root=made), {}, {}) is None


def assert_comes_back(data: bytes) -> None:
    """A pickle's graph comes back."""
    root = with_one_empty_tuple(walk(data).root)
    assert_same(root, there_and_back(root))


# -- there and back --------------------------------------------------------------------------------


@example([{"cpu": None, "cuda:0": None}], 2, False)  # a key that may name a device is no plain text
@given(VALUES | trees(st.nothing()), st.sampled_from(PROTOCOLS), st.booleans())
def test_what_is_pickled_comes_back(saved: object, protocol: int, optimized: bool) -> None:
    data = pickled(saved, protocol)
    assert_comes_back(pickletools.optimize(data) if optimized else data)


@settings(max_examples=50)
@given(checkpoint_trees())
def test_what_torch_saves_comes_back(checkpoint: Checkpoint) -> None:
    file = io.BytesIO()
    torch.save(checkpoint.tree, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        assert_comes_back(archive.read(name))


@pytest.mark.parametrize("name", sorted(OPCODES.keys() - {"PERSID"}))
def test_what_each_opcode_makes_comes_back(name: str) -> None:
    assert_comes_back(OPCODES[name])


CALL = b"ccollections\nOrderedDict\n)"
ODD: dict[str, bytes] = {
    "the root is shared": b"]q\x00h\x00a.",
    "a tuple in its own list": b"]q\x00h\x00\x85q\x01ah\x01.",
    "a call in its own argument": b"cm\nf\n]q\x00\x85Rq\x010h\x00h\x01ah\x01.",
    "a call in its own state": CALL + b"Rq\x00h\x00b.",
    "a call in its own items": CALL + b"Rq\x00h\x00a.",
    "a call that is its own key": CALL + b"Rq\x00h\x00h\x00s.",
    "a frozenset in its own list": b"]q\x00(h\x00\x91q\x01ah\x01.",
    "arguments that are shared": b"cm\nf\nK\x01\x85q\x00Rh\x00\x86.",
    "arguments that are a call": b"cm\nf\n" + CALL + b"RR.",
    "what is called is a call": CALL + b"R)R.",
    "what is called is None": b"N)R.",
    "keyword arguments": b"cm\nf\n)}U\x01aK\x01s\x92.",
    "no keyword arguments": b"cm\nf\n)N\x92.",
    "the state None": CALL + b"RNb.",
    "items and pairs and a state": CALL + b"RK\x01aK\x02K\x03s}b.",
    "a key twice": b"}U\x01aK\x01sU\x01aK\x02s.",
    "the key $": b"}U\x01$K\x01s.",
    "a key with a surrogate": b"}X\x03\0\0\0\xed\xa0\x80K\x01s.",
    "two surrogates, which JSON takes for one character": b"X\6\0\0\0\xed\xa0\xbd\xed\xb8\x80.",
    "a key that is a list": b"}]q\x00h\x00s.",
    "bytes that may be a checkpoint": b"C" + bytes([len(DONE)]) + DONE + b".",
    "a persistent id twice": b"(K\x01Qq\x00h\x00K\x01Qt.",
    "long text twice": b"(X\x80\0\0\0" + b"x" * 128 + b"q\x00h\x00}h\x00Nst.",
    "long bytes twice": b"(C\x80" + b"x" * 128 + b"q\x00h\x00t.",
    "a long integer twice": b"(\x8a\xf0" + b"x" * 240 + b"q\x00h\x00t.",
    "a long name twice": b"(cm\n" + b"f" * 99 + b"\nq\x00h\x00h\x00)Rt.",
    "a name with a colon": b"cm\nf:g\n.",
    "a name with nothing in it": b"\x8c\0\x8c\0\x93.",
    "an empty set twice": b"(\x8fq\x00h\x00\x8ft.",
}


@pytest.mark.parametrize("name", ODD)
def test_what_no_pickler_writes_comes_back(name: str) -> None:
    assert_comes_back(ODD[name])


def test_a_persistent_id_that_was_a_line_of_text_is_text() -> None:
    made = there_and_back(walk(OPCODES["PERSID"]).root)
    assert isinstance(made, Persistent)
    assert isinstance(made.pid, Text)
    assert made.pid == "12 a"


@pytest.mark.parametrize("bits", [0x7FF8 << 48, 0xFFF8 << 48 | 1, 0x7FF0 << 48 | 1, 1 << 63, 1])
def test_floats_keep_their_bits(bits: int) -> None:
    made = there_and_back(struct.unpack(">d", struct.pack(">Q", bits))[0])
    assert struct.pack(">d", made) == struct.pack(">Q", bits)


@pytest.mark.parametrize("bits", [62, 63, 64])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_of_all_sizes_come_back(bits: int, sign: int) -> None:
    for value in (sign * (1 << bits), sign * ((1 << bits) - 1)):
        made = there_and_back(value)
        assert made == value
        assert type(made) is int
        assert term_json(to_terms(value, unknown)).isascii()


def test_a_state_dict_reads_like_itself() -> None:
    saved = {"step": 3, "lr": 0.1, "on": True, "none": None, "betas": [0.9, -0.0], "né": ("x", b"")}
    assert term_json(to_terms(walk(dumps(saved)).root, unknown)) == (
        '{"step":3,"lr":0.1,"on":true,"none":null,"betas":[0.9,-0.0],"n\\u00e9":{"$":"tuple","of":'
        '["x",{"$":"call","of":"builtins:bytes"}]}}'
    )


def test_the_term_of_each_kind() -> None:
    data = b"(K\x01\x85\x8f(]q\x00h\x00\x91K\x01Q}K\x01NscA\nB\n)\x81G" + struct.pack(
        ">d", -math.inf
    )
    assert to_terms(walk(data + b"C\x01a\x8a\x09" + bytes(8) + b"\x01t.").root, unknown) == {
        "$": "tuple",
        "of": [
            {"$": "tuple", "of": [1]},
            {"$": "set", "of": []},
            {
                "$": "frozenset",
                "of": [{"$": "shared", "as": 0, "of": []}, {"$": "again", "as": 0}],
            },
            {"$": "persistent", "of": 1},
            {"$": "dict", "of": [[1, None]]},
            {"$": "call", "of": "A:B", "how": "NEWOBJ"},
            {"$": "float", "of": "-inf"},
            {"$": "bytes", "of": "YQ=="},
            {"$": "int", "of": "0x10000000000000000"},
        ],
    }


def test_each_use_of_a_string_has_a_place_of_its_own() -> None:
    root = walk(pickled({"cpu": ["cpu", ("cpu", {"cpu": 1, 2: "cpu"})]}, 2)).root
    made = from_terms(to_terms(root, unknown), no_leaf, base=1000)
    places = []
    for node in nodes_of(made):
        inside = node.items if isinstance(node, (List, Tuple)) else []
        if isinstance(node, Dict):
            inside = [each for pair in node.pairs for each in pair]
        places += [each.at for each in inside if isinstance(each, Text)]
        places += [node.at] if isinstance(node, Tuple) else []
    assert len(places) == len(set(places)) == 6
    assert min(places) > 1000


# -- leaves ----------------------------------------------------------------------------------------


def test_leaves_are_asked_for_once_and_in_order_and_nothing_below_them_is() -> None:
    root = walk(b"(K\x01Qq\x00}(U\x01ah\x00U\x01bK\x02QucA\nB\n)RK\x01Ql.").root
    asked: list[Node] = []

    def leaf(node: Node) -> dict[str, Any] | None:
        asked.append(node)
        return {"$": "storage", "n": len(asked)} if isinstance(node, Persistent) else None

    terms = to_terms(root, leaf)
    assert [type(each) for each in asked] == [Persistent, Persistent, Call, Persistent]
    shared = {"$": "shared", "as": 0, "of": {"$": "storage", "n": 1}}
    assert terms[0] == shared
    assert terms[1] == {"a": {"$": "again", "as": 0}, "b": {"$": "storage", "n": 2}}
    assert terms[3] == {"$": "storage", "n": 4}
    made = from_terms(parse_term(term_json(terms)), lambda term: asked[term["n"] - 1])
    assert_same(root, made)


def test_bytes_that_were_passed_over_are_a_leaf_or_refused() -> None:
    root = List([Blob(0, 10, None)])
    assert to_terms(root, lambda node: {"$": "blob"}) == [{"$": "blob"}]
    with pytest.raises(UnsupportedError, match="too many to be held"):
        to_terms(root, unknown)


@pytest.mark.parametrize(
    "data",
    [
        b"(X\1\0\0\0a)R.",
        b"X\1\0\0\0a)R.",
        b"cm\nf\n]R.",
        b"ca:b\nc\n.",
        b"X\3\0\0\0\xed\xa0\x80q\0h\0\x93.",
    ],
    ids=repr,
)
def test_what_has_no_term_is_unsupported(data: bytes) -> None:
    with pytest.raises(UnsupportedError):
        to_terms(walk(data).root, unknown)


# -- what is no term -------------------------------------------------------------------------------

ONE = {"$": "shared", "as": 0, "of": []}
MALFORMED: dict[str, Term] = {
    "no kind": {"$": 5},
    "a kind that is null": {"$": None},
    "a kind that is a list": {"$": []},
    "an unknown kind": {"$": "tensor?"},
    "a tuple of nothing": {"$": "tuple"},
    "a tuple of null": {"$": "tuple", "of": None},
    "a tuple of an object": {"$": "tuple", "of": {}},
    "a tuple with more": {"$": "tuple", "of": [], "as": 0},
    "a tuple with other": {"$": "tuple", "in": []},
    "a set of text": {"$": "set", "of": "ab"},
    "a frozenset of a number": {"$": "frozenset", "of": 1},
    "a dict of an object": {"$": "dict", "of": {}},
    "a dict of keys": {"$": "dict", "of": [1]},
    "a dict of triples": {"$": "dict", "of": [[1, 2, 3]]},
    "a dict of text": {"$": "dict", "of": ["ab"]},
    "an int that is one": {"$": "int", "of": 1},
    "an int in decimal": {"$": "int", "of": "12"},
    "a small int": {"$": "int", "of": "0x7fffffffffffffff"},
    "an int with zeros": {"$": "int", "of": "0x00ffffffffffffffffff"},
    "an int in capitals": {"$": "int", "of": "0xFFFFFFFFFFFFFFFFFF"},
    "an int with white space": {"$": "int", "of": "0xffffffffffffffffff\n"},
    "an int with an underscore": {"$": "int", "of": "0xffff_ffffffffffffff"},
    "a large number": 1 << 63,
    "a float that is one": {"$": "float", "of": 1.5},
    "a finite float": {"$": "float", "of": "1.5"},
    "the name of a NaN": {"$": "float", "of": "nan"},
    "the bits of no NaN": {"$": "float", "of": "0x3ff0000000000000"},
    "the bits of an infinity": {"$": "float", "of": "0x7ff0000000000000"},
    "too few bits": {"$": "float", "of": "0x7ff8"},
    "bytes of a list": {"$": "bytes", "of": []},
    "bytes that are no base64": {"$": "bytes", "of": "a!=="},
    "bytes without padding": {"$": "bytes", "of": "YQ"},
    "bytes with odd bits": {"$": "bytes", "of": "YR=="},
    "bytes that are not ASCII": {"$": "bytes", "of": "é"},
    "text that is no UTF-8": {"$": "text", "of": "/w=="},
    "text that needs no bytes": {"$": "text", "of": "YQ=="},
    "text with a surrogate": "\ud800",
    "a key with a surrogate": {"\udfff": 1},
    "a name without a module": {"$": "name", "of": "f"},
    "a name of a list": {"$": "name", "of": ["m", "f"]},
    "a name with a surrogate": {"$": "name", "of": "m:\ud800"},
    "a call of nothing": {"$": "call"},
    "a call of no name": {"$": "call", "of": "f"},
    "a call with more": {"$": "call", "of": "m:f", "as": 0},
    "a call how": {"$": "call", "of": "m:f", "how": "REDUCE"},
    "a call by an unknown opcode": {"$": "call", "of": "m:f", "how": "POP"},
    "a call by a list": {"$": "call", "of": "m:f", "how": ["NEWOBJ"]},
    "keywords for REDUCE": {"$": "call", "of": "m:f", "kwargs": {}},
    "keywords that are null": {"$": "call", "of": "m:f", "how": "NEWOBJ_EX", "kwargs": None},
    "items that are null": {"$": "call", "of": "m:f", "items": None},
    "pairs that are an object": {"$": "call", "of": "m:f", "pairs": {}},
    "pairs that are none": {"$": "call", "of": "m:f", "pairs": [[1]]},
    "a persistent id of nothing": {"$": "persistent"},
    "again before shared": [{"$": "again", "as": 0}, ONE],
    "again what is not there": [ONE, {"$": "again", "as": 1}],
    "again below zero": [ONE, {"$": "again", "as": -1}],
    "again False": [ONE, {"$": "again", "as": False}],
    "again with more": [ONE, {"$": "again", "as": 0, "of": []}],
    "again text": [ONE, {"$": "again", "as": "0"}],
    "shared from one": {**ONE, "as": 1},
    "shared twice": [ONE, ONE],
    "shared out of order": [ONE, {**ONE, "as": 2}],
    "shared False": {**ONE, "as": False},
    "shared 0.0": {**ONE, "as": 0.0},
    "shared without a number": {"$": "shared", "of": []},
    "shared with more": {**ONE, "to": 1},
    "shared nothing": {"$": "shared", "as": 0},
    "a shared number": {"$": "shared", "as": 0, "of": 5},
    "shared short text": {"$": "shared", "as": 0, "of": "cpu"},
    "a shared empty tuple": {"$": "shared", "as": 0, "of": {"$": "tuple", "of": []}},
    "what is shared is shared": {"$": "shared", "as": 0, "of": {**ONE, "as": 1}},
    "what is shared is met again": [ONE, {"$": "shared", "as": 1, "of": {"$": "again", "as": 0}}],
}
AGAIN = {"$": "again", "as": 0}
KNOTS: dict[str, Term] = {
    "a tuple of itself": {"$": "tuple", "of": [AGAIN]},
    "a frozenset of itself": {"$": "frozenset", "of": [1, AGAIN]},
    "a tuple of a tuple of it": {"$": "tuple", "of": [{"$": "tuple", "of": [AGAIN]}]},
    "a call of itself": {"$": "call", "of": AGAIN},
    "a call with itself": {"$": "call", "of": "m:f", "args": [AGAIN]},
    "a call whose arguments are itself": {"$": "call", "of": "m:f", "args": AGAIN},
    "a call with itself by name": {
        **{"$": "call", "of": "m:f", "how": "NEWOBJ_EX"},
        "kwargs": {"$": "tuple", "of": [AGAIN]},
    },
    "a persistent id of itself": {"$": "persistent", "of": AGAIN},
    "a tuple of what a list in it first holds": {
        "$": "tuple",
        "of": [
            [{"$": "shared", "as": 1, "of": {"$": "tuple", "of": [AGAIN]}}],
            {"$": "again", "as": 1},
        ],
    },
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_refused(name: str) -> None:
    whole = copy.deepcopy(MALFORMED[name])  # a term that is read is emptied
    for term in (whole, [[copy.deepcopy(MALFORMED[name])]], {"a": copy.deepcopy(MALFORMED[name])}):
        with pytest.raises(CorruptError):
            from_terms(term, no_leaf)
    with pytest.raises(CorruptError):
        read(MALFORMED[name])


@pytest.mark.parametrize("name", KNOTS)
def test_what_is_made_of_itself_is_refused(name: str) -> None:
    with pytest.raises(CorruptError, match="made of itself"):
        read({"$": "shared", "as": 0, "of": KNOTS[name]})


def test_what_a_dict_holds_may_be_what_holds_it() -> None:
    root = read({"$": "shared", "as": 0, "of": {"$": "tuple", "of": [{"a": AGAIN}, AGAIN][:1]}})
    assert isinstance(root, Tuple)
    assert isinstance(root.items[0], Dict)
    assert root.items[0].get("a") is root


@pytest.mark.parametrize("term", [math.inf, math.nan, (), b"", {"$": "int", "of": "0x" + "f" * 9}])
def test_what_json_has_not_is_refused(term: Term) -> None:
    with pytest.raises(CorruptError):
        from_terms(term, no_leaf)


# -- hostile JSON ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[1,]",
            "nul",
            '"',
            '"\\',
            '"\\"',
            "'a'",
            "\ufeff1",
            "1 2",
            "[}",
            "]",
            "\\[",
            '"\n"',
        ),
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "[1.5e309]", "01", "+1", "0x1"),
        *('{"a":1,"a":1}', '[{"$":"set","of":[],"of":[1]}]', '{"a":1,"\\u0061":2}', "{1:2}"),
        *(
            "9" * 21,
            "-" + "9" * 5000,
            "9" * 1_000_000,
            "1." + "1" * 1_000_000,
            "1e" + "0" * 99 + "1",
        ),
        *("[" * 501 + "]" * 501, "[" * 1_000_000, '{"a":' * 1_000_000, '["\\"",' * 501),
        "[" * 400 + '{"[":' * 101,
    ],
    ids=lambda text: f"{text[:30]!r}, {len(text)}",
)
def test_json_that_readers_may_disagree_on_is_refused(text: str) -> None:
    with at_most(2), pytest.raises(CorruptError, match=r"^the saved tree"):
        parse_term(text)


def test_brackets_in_strings_are_not_deep() -> None:
    inside = "[" * 1000 + '\\"[\\' * 1000
    assert parse_term(json.dumps([inside, {inside: 1}])) == [inside, {inside: 1}]


@pytest.mark.parametrize(
    "text", ['"' * 300_001, '"' + '\\"' * 300_000, "\\" * 300_001, '"["' * 99_999]
)
def test_strings_without_end_take_no_time(text: str) -> None:
    with at_most(5), pytest.raises(CorruptError):
        parse_term(text)


def test_too_many_brackets_and_texts_are_refused() -> None:
    within = LEAST_BRACKETS
    assert len(parse_term("[" + "[]," * (within - 2) + "[]]")) == within - 1
    for text in ("[" + "[]," * (2 * within) + "[]]", "[" + '"",' * (4 * LEAST_TEXTS) + '""]'):
        with pytest.raises(CorruptError, match="than its length can need"):
            parse_term(text)
    with pytest.raises(UnsupportedError, match="lists and objects in JSON than its length"):
        term_json([[]] * (2 * within))


def nested(levels: int) -> List:
    """A list in a list …"""
    root = List([])
    for _ in range(levels - 1):
        root = List([root])
    return root


def test_the_length_of_what_is_met_again_is_foretold() -> None:
    """Texts at least and characters at most, so that nothing is refused that could be written."""
    shared = ["a" * 100, b"\xff" * 100, (1, 2), {"k": "v"}]
    other = ['\n"\\é😀\ud800', "short", None, True, 0.1, float("nan"), -(1 << 600), b"ab", {1, 2}]
    keys = {"plain": 1, (3, 4): 2, None: [5]}
    saved = [shared * 20_000, other, [1, 2, 3], [other[2]] * 100, keys, Random]
    told = list[tuple[int, int]]()
    root = walk(pickle.dumps(saved, 4)).root
    text = term_json(to_terms(root, unknown, None, lambda *each: told.append(each)))
    ((texts, characters),) = told
    assert 0.7 * (extent_of(text).quotes // 2) < texts <= extent_of(text).quotes // 2
    assert len(text) <= characters < 1.5 * len(text)


def test_what_would_be_refused_is_not_spelled() -> None:
    root = walk(pickle.dumps(["a" * 100] * 300_000, 4)).root
    with pytest.raises(UnsupportedError, match="far more texts"):
        to_terms(root, unknown, 0, check_texts)  # without room to spell anything


@pytest.mark.slow
def test_the_deepest_tree_comes_back_and_a_deeper_one_is_refused() -> None:
    assert_same(nested(MAX_DEPTH), there_and_back(nested(MAX_DEPTH)))
    for levels in (MAX_DEPTH + 1, 1500, 100_000):
        terms = to_terms(nested(levels), unknown)
        with pytest.raises(UnsupportedError, match="nested more than 500 levels deep"):
            term_json(terms)
        made = from_terms(terms, no_leaf)
        assert sum(1 for _ in nodes_of(made)) == levels


@pytest.mark.parametrize("made", [Tuple, List], ids=["tuples", "lists"])
def test_billion_laughs_stay_small(made: type[Tuple | List]) -> None:
    def both(node: Node) -> Node:
        return List([node, node]) if made is List else Tuple([node, node], 0)

    root: Node = both(Text("ha", 0))
    for _ in range(100):
        root = both(root)
    with at_most(2):
        text = term_json(to_terms(root, unknown))
        assert len(text) < 10_000
        assert_same(root, reading(text))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "pushed",
    [
        *(b"X\0\0\x01\0" + b"a" * 0x10000, b"X\0\0\x01\0" + "é".encode() * 0x8000),
        *(b"B\0\0\x01\0" + b"a" * 0x10000, b"\x8b\0\0\x01\0" + b"a" * 0x10000),
    ],
    ids=["text", "more text", "bytes", "int"],
)
def test_what_is_long_is_spelled_once(pushed: bytes) -> None:
    data = b"(" + pushed + b"q\x00" + b"h\x00" * 10_000 + b"}h\x00Ns" * 10_000 + b"l."
    root = walk(data).root
    with at_most(5):
        text = term_json(to_terms(root, unknown))
        assert len(text) < 2_000_000
        assert_same(root, reading(text))


@pytest.mark.slow
def test_a_long_name_is_spelled_once() -> None:
    data = b"(cm\n" + b"f" * 1900 + b"\nq\x00" + b"h\x00h\x00)R" * 10_000 + b"l."
    root = walk(data).root
    assert len(term_json(to_terms(root, unknown))) < 2_000_000
    assert_same(root, there_and_back(root))


# -- damage ----------------------------------------------------------------------------------------

PIECES = (
    *('{"$":"shared","as":0,"of":', '{"$":"again","as":0}', '{"$":"tuple","of":[', '{"$":"', "]}"),
    *(
        '"as":1',
        '"of":',
        '"call"',
        '"$":',
        "[]",
        "null",
        "-1",
        "1e9",
        '"\\ud800"',
        '"',
        ",",
        "[",
        "]",
    ),
)


@settings(max_examples=examples(300))
@given(VALUES, st.sampled_from((2, 4)), st.randoms(use_true_random=False))
def test_damaged_text_is_refused_or_read(saved: object, protocol: int, dice: Random) -> None:
    text = term_json(
        to_terms(walk(pickled([saved, holding_itself([]), ()], protocol)).root, unknown)
    )
    for _ in range(20):
        made = text
        for _ in range(dice.choice((1, 1, 2, 5))):
            start = dice.randrange(len(made) + 1)
            end = min(len(made), start + dice.choice((0, 1, 1, 5, 20)))
            other = dice.randrange(len(text))
            piece = dice.choice((*PIECES, "", text[other : other + dice.randrange(40)]))
            made = made[:start] + piece + made[end:]
        try:
            root = reading(made)
            again = term_json(to_terms(root, unknown))
        except CkptmoveError:
            continue
        assert_same(with_one_empty_tuple(root), reading(again))


KINDS = ("dict", "tuple", "set", "frozenset", "int", "float", "bytes", "text", "name", "call")
TERMS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(KINDS)},
            optional={"of": inner, "args": inner, "kwargs": inner, "state": inner},
        )
        | st.fixed_dictionaries(
            {"$": st.just("shared"), "as": st.integers(0, 2), "of": inner},
        )
        | st.fixed_dictionaries({"$": st.just("again"), "as": st.integers(0, 2)})
    ),
    max_leaves=15,
)


@settings(max_examples=examples(500))
@given(TERMS)
def test_any_json_is_refused_or_read(term: Term) -> None:
    try:
        root = from_terms(term, no_leaf)
        text = term_json(to_terms(root, unknown))
    except CkptmoveError:
        return
    assert_same(with_one_empty_tuple(root), reading(text))


RUN_PIECES = st.one_of(
    st.sampled_from(['"', "[", "]", ",", "{", "}", "null,", "true,", "false,", "[1,", "x", '",']),
    st.builds(lambda text, times: text * times, st.sampled_from("1,-e."), st.integers(1, 3200)),
    st.builds(
        lambda times, rest: "12,3." * times + rest, st.integers(290, 310), st.text("1,", max_size=3)
    ),
)


@given(st.lists(RUN_PIECES, max_size=12).map("".join))
def test_long_runs_are_found_wherever_they_are(text: str) -> None:
    assert list(long_runs(text)) == [each.span(1) for each in _LONG_RUN.finditer(text)]
