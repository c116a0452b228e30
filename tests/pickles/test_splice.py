"""splice(): uses of strings are spelled anew, and nothing else changes its meaning."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import _weights_only_unpickler

from ckptmove.errors import UnsupportedError
from ckptmove.pickles.compare import difference
from ckptmove.pickles.fitting import _change, balance_length
from ckptmove.pickles.nodes import Call, List, Text, Tuple
from ckptmove.pickles.splice import Respelling, splice
from ckptmove.pickles.walk import walk
from tests.making.building import Stored, dumps, loads, opcodes_of
from tests.making.checkpoints import MAKERS, save
from tests.making.saving import as_a_tagger_returns
from tests.oracles.sameness import assert_same_tree

TAGS = ["cpu", "cuda:0", "cuda:1", "mps", "meta", "privateuseone:15"]
FREE_PROTOCOLS = (2, 3, 4, 5)

# Known to torch's weights_only unpickler and to libtorch's; all that is ever written.
WRITTEN = {
    *("BINUNICODE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
    *("BININT", "BININT1", "BININT2", "TUPLE1"),
}


def uses_of(data: bytes) -> list[Text]:
    """Where the location of each persistent id is pushed."""
    uses = []
    for persistent in walk(data).persistents:
        assert isinstance(persistent.pid, Tuple)
        use = persistent.pid.items[3]
        assert isinstance(use, Text)
        uses.append(use)
    return uses


def respell(data: bytes, moves: Mapping[int, str], *, exact: bool) -> bytes | None:
    """Move some of the persistent ids, by their number; the result is checked in every way."""
    uses, new = uses_of(data), Respelling()
    for number, text in moves.items():
        new.text(uses[number], text)
    result = splice(data, new, exact=exact)
    if result is not None:
        assert len(result) == len(data) or not exact
        assert_respelled(data, result, moves)
        assert_expected(data, result, new.texts)
    return result


def assert_respelled(data: bytes, result: bytes, moves: Mapping[int, str]) -> None:
    """To the standard library's unpicklers, the locations are new, and the rest is as it was."""
    old, new = loads(data), loads(result)
    assert new.locations == [moves.get(n, was) for n, was in enumerate(old.locations)]
    assert_same_tree(old.tree, new.tree)
    Strict(io.BytesIO(result)).load()
    before, after = opcodes_of(data), opcodes_of(result)
    assert set(after - before) <= WRITTEN
    assert {name: after[name] for name in ("MEMOIZE", "FRAME", "BINPERSID", "STOP")} == {
        name: before[name] for name in ("MEMOIZE", "FRAME", "BINPERSID", "STOP")
    }


class Strict(pickle._Unpickler):
    """In Python, where an opcode that crosses the end of a frame is an error."""

    def persistent_load(self, pid: Any) -> Any:
        return pid


def assert_expected(data: bytes, result: bytes, texts: dict[int, str]) -> None:
    """Our comparison agrees, and would not if anything else had been expected."""
    old, new = walk(data), walk(result)
    assert difference(old, new, texts, {}) is None
    for at, text in itertools.islice(texts.items(), 8):
        assert difference(old, new, {**texts, at: f"{text}?"}, {}) is not None
    if any(texts.get(use.at, use) != use for use in uses_of(data)):
        assert difference(old, new, {}, {}) is not None


# Trees of storages, and of strings that are the same objects as their locations


@st.composite
def saved_trees(draw: st.DrawFn) -> object:
    """Some storages, each perhaps used often, among values of the user's."""
    tags = [
        as_a_tagger_returns(draw(st.sampled_from(TAGS))) for _ in range(draw(st.integers(1, 5)))
    ]
    numel = st.sampled_from([0, 4, 300, 70_000])
    storages = [Stored(str(n), tag, draw(numel)) for n, tag in enumerate(tags)]
    strings = st.sampled_from([*tags, "cpu", "mps", "storage", "FloatStorage", "0", ""])
    leaves = st.one_of(
        st.sampled_from(storages), st.sampled_from(storages), strings, st.integers(-1, 70_000)
    )
    tree = draw(st.recursive(leaves, _containers, max_leaves=12))
    return draw(st.sampled_from([[tree, storages], [storages, tree], tree, (storages[0], tree)]))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=4)
    keys = st.sampled_from(["cpu", "mps", "weight", "storage", 0, 300])
    twice = children.map(lambda child: [child, child])
    return lists | lists.map(tuple) | st.dictionaries(keys, children, max_size=4) | twice


moves_of = st.dictionaries(st.integers(0, 30), st.sampled_from(TAGS), max_size=8)


def limited(data: bytes, moves: Mapping[int, str]) -> dict[int, str]:
    """The moves of persistent ids that there are."""
    count = len(walk(data).persistents)
    assume(count)
    return {number % count: text for number, text in moves.items()}


@given(saved_trees(), moves_of, st.sampled_from(FREE_PROTOCOLS), st.booleans(), st.booleans())
def test_any_uses_can_be_spelled_anew(
    saved: object, moves: dict[int, str], protocol: int, python: bool, squeezed: bool
) -> None:
    data = dumps(saved, protocol, python=python)
    data = pickletools.optimize(data) if squeezed else data
    respell(data, limited(data, moves), exact=True)
    assert respell(data, limited(data, moves), exact=False) is not None


@given(saved_trees(), moves_of, moves_of, st.booleans())
def test_twice_is_as_good_as_once(
    saved: object, first: dict[int, str], second: dict[int, str], exact: bool
) -> None:
    data = dumps(saved)
    first, second = limited(data, first), limited(data, second)
    once = respell(data, first, exact=exact)
    if once is not None:
        twice = respell(once, second, exact=exact)
        if twice is not None:
            assert_respelled(data, twice, {**first, **second})


@given(saved_trees(), moves_of)
def test_the_same_input_gives_the_same_bytes(saved: object, moves: dict[int, str]) -> None:
    data = dumps(saved)
    once, again = (respell(data, limited(data, moves), exact=False) for _ in range(2))
    assert once == again


# Real checkpoints


def pickle_of(path: Path) -> bytes:
    """The record data.pkl."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{path.stem}/data.pkl")


def understood_by_weights_only() -> set[str]:
    """The opcodes that torch's unpickler for untrusted files has a branch for."""
    source = getsource(_weights_only_unpickler.Unpickler.load)
    return set(re.findall(r"\b([A-Z][A-Z0-9_]+)\[0\]", source))


def test_all_that_is_written_is_understood_by_torch() -> None:
    assert understood_by_weights_only() >= WRITTEN
    assert "MEMOIZE" not in understood_by_weights_only()


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", MAKERS)
def test_what_torch_saves_has_room_for_every_device(name: str, tmp_path: Path) -> None:
    known = understood_by_weights_only()
    for old in ("cpu", "cuda:0"):
        data = pickle_of(save(tmp_path / "made.pt", MAKERS[name](), old))
        for new in ("cpu", "cuda:0", "cuda:15", "mps", "meta", "privateuseone:15"):
            respelling = Respelling()
            for use in uses_of(data):
                respelling.text(use, new)
            result = splice(data, respelling, exact=True)
            assert result is not None
            assert len(result) == len(data)
            assert difference(walk(data), walk(result), respelling.texts, {}) is None
            assert set(opcodes_of(result)) <= known | set(opcodes_of(data))
            assert {str(use) for use in uses_of(result)} <= {new}


# Who defines a shared string, and who recalls it

LITERAL = b"X\x03\x00\x00\x00cpu"


@pytest.mark.sample(40)
@pytest.mark.parametrize("protocol", FREE_PROTOCOLS)
@pytest.mark.parametrize("moved", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("user_at", range(4))
def test_a_user_string_is_one_with_locations(user_at: int, moved: set[int], protocol: int) -> None:
    saved: list[object] = [Stored(str(n), "cpu") for n in range(3)]
    saved[user_at:user_at] = ["cpu", {"cpu": "cpu"}]
    data = dumps(saved, protocol)
    assert data.count(b"\x03cpu" if protocol > 3 else LITERAL) == 1
    for exact, new in itertools.product((True, False), ("cuda:0", "mps", "cpu")):
        respell(data, dict.fromkeys(moved, new), exact=exact)
    different = dict(zip(moved, ("cuda:0", "mps", "privateuseone:15"), strict=False))
    assert respell(data, different, exact=False) is not None


@pytest.mark.parametrize("exact", [True, False])
def test_a_text_that_many_use_is_spelled_once(exact: bool) -> None:
    data = dumps([Stored(str(n), "cpu") for n in range(100)])
    result = respell(data, dict.fromkeys(range(100), "privateuseone:15"), exact=exact)
    assert result is not None
    assert result.count(b"privateuseone:15") == 1


def test_slots_above_255_are_used_where_they_must_be() -> None:
    twice = [[n] for n in range(300)]
    data = dumps([twice, twice[::-1], [Stored(str(n), "cpu") for n in range(300)], "cpu"])
    moves = {n: TAGS[n % len(TAGS)] for n in range(300)}
    result = respell(data, moves, exact=False)
    assert result is not None
    assert respell(result, dict.fromkeys(range(300), "mps"), exact=False) is not None


@pytest.mark.slow
def test_frames_grow_and_shrink_with_what_is_in_them() -> None:
    many = [[Stored(str(n), f"cuda:{n % 3}"), n, "x" * 90] for n in range(2_000)]
    for protocol in (4, 5):
        data = dumps([many, "y" * 70_000, Stored("last", "cpu")], protocol)
        assert opcodes_of(data)["FRAME"] > 2
        for new in ("meta", "privateuseone:15"):
            result = respell(data, dict.fromkeys(range(1, 2_001, 3), new), exact=False)
            assert result is not None
            assert len(result) != len(data)


def test_bytes_after_the_pickle_stay() -> None:
    data = dumps([Stored("0", "cpu"), "cpu"]) + b"rest"
    new = Respelling()
    new.text(uses_of(data)[0], "cuda:0")
    result = splice(data, new, exact=False)
    assert result is not None
    assert result.endswith(b".rest")


ODD: dict[str, tuple[bytes, bytes, bytes]] = {
    "in two slots": (b"", b"q\x05q\x06", b"h\x05h\x06\x86"),
    "in one slot, twice": (b"", b"q\x05q\x05", b"h\x05h\x05\x86"),
    "by counting, though the protocol is old": (b"", b"\x94", b"h\x00h\x00\x86"),
    "by counting, after a slot with a number": (b"q\x00", b"\x94", b"h\x01h\x01\x86"),
    "by counting, after slots to spare": (
        b"".join(bytes([ord("q"), slot]) for slot in range(20)),
        b"\x94",
        b"U\x01x\x94h\x15h\x14\x87",
    ),
    "in a slot that is filled again": (b"", b"q\x05", b"h\x05U\x01xq\x05h\x05\x87"),
    "as protocol 0 does": (b"", b"p7\n", b"g7\ng7\n\x86"),
    "as protocols 0 and 2 do": (b"", b"q\x07p7\n", b"h\x07g7\n\x86"),
}


@pytest.mark.parametrize("protocol", FREE_PROTOCOLS)
@pytest.mark.parametrize("way", ODD)
def test_an_odd_way_to_memoise_is_respelled_or_refused(way: str, protocol: int) -> None:
    """No pickler of its protocol writes these; either the result is right, or there is none."""
    before, memoised, recalled = ODD[way]
    head = b"(X\x07\x00\x00\x00storage" + before + b"ctorch\nFloatStorage\nX\x01\x00\x00\x000"
    pid = head + LITERAL + memoised + b"K\x04tQ"
    data = bytes([0x80, protocol]) + b"(" + pid + recalled + b"t."
    assert loads(data).locations == ["cpu"]
    for exact, new in itertools.product((True, False), TAGS):
        with contextlib.suppress(UnsupportedError):
            respell(data, {0: new}, exact=exact)


# torch.device


class Spelled:
    """Pickles as the `torch.device` of these arguments, which others may hold as well."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> tuple[object, ...]:
        return torch.device, self.args


@pytest.mark.parametrize("protocol", FREE_PROTOCOLS)
@pytest.mark.parametrize("args", [("cpu",), ("cuda",), ("cuda", 1), ("cuda", 300), ("cuda:1",)])
@pytest.mark.parametrize("new", ["cpu", "cuda:0", "mps", "privateuseone:15"])
@pytest.mark.parametrize("user_first", [True, False])
def test_a_device_is_spelled_anew_in_either_form(
    args: tuple[Any, ...], new: str, user_first: bool, protocol: int
) -> None:
    device = Spelled(*args)
    saved = [device, {"device": device, "kind": args[0]}, [1, 2, 300], *args]
    data = dumps([args[0], saved] if user_first else [saved], protocol)
    old = walk(data)
    call = device_call(old.root)
    for exact in (False, True):
        respelling = Respelling()
        respelling.device(data, call, new)
        result = splice(data, respelling, exact=exact)
        if result is None:
            assert exact
            continue
        assert len(result) == len(data) or not exact
        assert set(opcodes_of(result) - opcodes_of(data)) <= WRITTEN
        moved, found = torch.device(new), loads(result).tree
        wanted = [moved, {"device": moved, "kind": args[0]}, [1, 2, 300], *args]
        assert_same_tree([args[0], wanted] if user_first else [wanted], found)
        assert difference(old, walk(result), {}, {id(call): new}) is None
        assert difference(old, walk(result), {}, {id(call): "xpu:7"}) is not None


def device_call(root: object) -> Call:
    """The first device in a list, however deep."""
    while isinstance(root, List):
        root = root.items[0] if not isinstance(root.items[0], Text) else root.items[1]
    assert isinstance(root, Call)
    return root


@pytest.mark.parametrize(
    "args",
    [b")", b"K\x01\x85", b"U\x04cuda\x8a\x01\x01\x86", b"(U\x04cudaK\x01t", b"U\x04cudaNN\x87"],
)
def test_a_device_made_in_another_way_is_refused(args: bytes) -> None:
    data = b"\x80\x02ctorch\ndevice\n" + args + b"R."
    call = walk(data).root
    assert isinstance(call, Call)
    with pytest.raises(UnsupportedError):
        Respelling().device(data, call, "cuda:0")


# The choice of what to drop and widen


@pytest.mark.parametrize("by", [-3, -2, -1, 1, 2, 3])
@pytest.mark.parametrize("number", [0, 255, 256, 65535, 65536, -1, -(1 << 31)])
@pytest.mark.parametrize("code", ["K", "M", "J"])
def test_the_number_after_a_string_makes_up_for_its_change(code: str, number: int, by: int) -> None:
    width = {"K": 1, "M": 2, "J": 4}[code]
    try:
        spelled = code.encode() + number.to_bytes(width, "little", signed=code == "J")
    except OverflowError:
        return
    text = b"X\6\0\0\0cuda:1"
    data = b"\x80\2(" + text + b"q\0r\1\1\0\0" + spelled + b"t."
    pieces = {3: (len(text), text + b"x" * -by if by < 0 else text[:-by])}
    found = balance_length(data, pieces)
    fits = width + by in (1, 2, 4) and 0 <= number < 1 << 8 * (width + by)
    assert len(found) == fits
    for at, (nbytes, new) in found.items():
        assert at == data.index(spelled + b"t.")
        assert len(new) - nbytes == by
        assert walk(data[:at] + new + data[at + nbytes :]).root.items[1] == number  # type: ignore[union-attr]
    assert not balance_length(data, pieces | {data.index(spelled + b"t."): (len(spelled), b"")})


@pytest.mark.parametrize("coins", [(2, 5), (1, 2, 3), (3, 5), (4, 5), (3, 4, 5), (1, 4, 5)])
def test_any_change_that_can_be_made_is_found(coins: tuple[int, ...]) -> None:
    for counts in itertools.product(range(9 if len(coins) < 3 else 6), repeat=len(coins)):
        purse = dict(zip(coins, counts, strict=True))
        ways = itertools.product(*(range(count + 1) for count in counts))
        possible = {sum(c * n for c, n in zip(coins, way, strict=True)) for way in ways}
        for amount in range(max(possible) + 3):
            found = _change(amount, {coin: list(range(n)) for coin, n in purse.items()})
            assert (found is not None) == (amount in possible)
            if found is not None:
                assert sum(coin * count for coin, count in found.items()) == amount
                assert all(0 <= count <= purse[coin] for coin, count in found.items())
