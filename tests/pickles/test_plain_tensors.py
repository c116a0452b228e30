"""Plain tensors that are walked at once give what they give opcode by opcode."""

from __future__ import annotations

import random
import struct
import zipfile
from array import array
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmove.errors import CkptmoveError
from ckptmove.pickles.compare import difference
from ckptmove.pickles.nodes import Blob, Call, Dict, Global, List, Persistent, Set, Text, Tuple
from ckptmove.pickles.opcodes.machine import Machine
from ckptmove.pickles.opcodes.plain_tensors import PlainTensor, is_compact
from ckptmove.pickles.opcodes.tensor_machine import TensorMachine
from ckptmove.pickles.splice import Respelling, splice
from ckptmove.pickles.walk import Pickle, walk
from ckptmove.sources.budget import Budget, Excess
from tests.conftest import examples


def said(pickle: Pickle) -> list[object]:
    """All that a walk tells, with a number for each node by which it is told from others.

    It leaves out where tuples were closed and hooks were made, which nobody asks of a tensor's.
    """
    numbers: dict[int, int] = {}
    told: list[object] = []
    todo: list[Any] = [pickle.root, *pickle.globals, *pickle.persistents]
    for call in pickle.calls:
        todo += [call.hooks, call] if isinstance(call, PlainTensor) else [call]
    todo += [*pickle.blobs, *pickle.dropped]
    todo.reverse()
    while todo:
        node = todo.pop()
        if isinstance(node, Text):
            told.append((str(node), node.at))
            continue
        if node is None or isinstance(node, (bool, int, float, str, bytes, array)):
            told.append(repr(node))
            continue
        known = id(node) in numbers
        number = numbers.setdefault(id(node), len(numbers))
        told.append(number)
        if known:
            continue
        held: list[Any] = []
        if isinstance(node, Global):
            told.append((node.qualname, node.at))
        elif isinstance(node, Persistent):
            told.append(node.at)
            held = [node.pid]
        elif isinstance(node, Call):
            at = 0 if node.qualname == "collections.OrderedDict" else node.at
            told.append((node.opcode, at, node.built, len(node.pairs), len(node.items)))
            held = [node.function, node.args, node.kwargs, node.state, *node.items]
            held += [each for pair in node.pairs for each in pair]
        elif isinstance(node, Dict):
            told.append(("dict", len(node.pairs)))
            held = [each for pair in node.pairs for each in pair]
        elif isinstance(node, (Tuple, List, Set)):
            told.append((type(node).__name__, len(node.items)))
            held = list(node.items)
        else:
            assert isinstance(node, Blob)
            told.append((node.at, node.nbytes, node.content))
        todo += reversed(held)
    slots = sorted(pickle.recalled or [-1])
    odd = pickle.textual, pickle.python2
    return [told, sorted(pickle.shared_texts), pickle.protocol, pickle.nbytes, slots, odd]


def outcome(data: bytes, machine: type[Machine], base: int) -> object:
    """What a walk gives or raises."""
    try:
        return said(walk(data, base, machine_type=machine))
    except CkptmoveError as error:
        return type(error), str(error)


def assert_same(data: bytes, base: int = 0) -> None:
    """Both machines give the same."""
    assert outcome(data, TensorMachine, base) == outcome(data, Machine, base)


def pickle_of(saved: object) -> bytes:
    """What torch pickles of an object."""
    file = BytesIO()
    torch.save(saved, file)
    with zipfile.ZipFile(file) as records:
        return records.read(next(name for name in records.namelist() if name.endswith("data.pkl")))


def tensors(number: int) -> dict[str, torch.Tensor]:
    """Tensors of many shapes."""
    shapes = [(), (3,), (2, 3), (0,), (2, 3, 1), (1, 2, 3, 4), (300, 2), (70000,)]
    return {f"t{n}": torch.zeros(shapes[n % len(shapes)]) for n in range(number)}


def trained() -> object:
    """A model with the state of its optimizer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "device": "cpu"}


def views() -> object:
    """Tensors that share a storage, whose key is recalled, and are one and the same."""
    base = torch.zeros(600)
    shared = [base[n : n + 3] for n in range(40)]
    return [base, shared, shared[3], base.view(2, 300).T, torch.nn.Parameter(base)]


def slots() -> object:
    """The state of an optimizer: of each parameter the same, but for some."""
    names = ("step", "exp_avg", "exp_avg_sq")
    state: dict[object, dict[object, object]] = {
        n: {name: torch.zeros(3 * (name != "step")) for name in names} for n in range(30)
    }
    state[3]["max_exp_avg_sq"] = torch.zeros(3)
    state[5]["exp_avg"] = state[4]["exp_avg"]
    state[7] = state[6]
    state[9]["step"] = 3
    state[11] = dict(reversed(state[11].items()))
    state[13]["exp_avg"] = torch.get_rng_state()
    state[15]["exp_avg"] = torch.zeros(3, dtype=torch.uint8)
    state[17]["exp_avg"] = torch.nn.Parameter(torch.zeros(3))
    state[19] = {n: value for n, value in enumerate(state[19].values())}
    state["21"] = state.pop(21)
    groups = [{"params": list(range(30)), "lr": 0.1}]
    return {"optimizer": {"state": state, "param_groups": groups}, "state": {1: state[1]}, 2: state}


def spelled(data: bytes, tag: str, *, exact: bool) -> bytes:
    """Another location for all but every third storage."""
    respelling = Respelling()
    for n, each in enumerate(walk(data, machine_type=Machine).persistents):
        if n % 3:
            assert isinstance(each.pid, Tuple)
            location = each.pid.items[3]
            assert isinstance(location, Text)
            respelling.text(location, tag)
    made = splice(data, respelling, exact=exact)
    assert made is not None
    return made


MAKERS: dict[str, Callable[[], object]] = {
    "tensors": lambda: tensors(120),
    "a model": trained,
    "views": views,
    "slots": slots,
    "dtypes": lambda: [torch.zeros(2, dtype=d) for d in (torch.int8, torch.bool, torch.half) * 20],
}


@cache
def pickled() -> dict[str, bytes]:
    """Pickles of torch, and what relocating makes of them."""
    made = {name: pickle_of(make()) for name, make in MAKERS.items()}
    for name, data in list(made.items()):
        made[f"{name}, on cuda:0"] = spelled(data, "cuda:0", exact=False)
        made[f"{name}, patched"] = spelled(data, "cuda:0", exact=True)
    return made


@pytest.mark.parametrize("name", [f"{n}{end}" for n in MAKERS for end in ("", ", patched")])
def test_torch_s_own_pickles(name: str) -> None:
    data = pickled()[name]
    assert_same(data)
    assert_same(data, 1 << 40)
    compact = sum(map(is_compact, walk(data).calls))
    assert compact > 20, "the fast way was not taken"


def put(slot: int) -> bytes:
    """LONG_BINPUT."""
    return b"r" + struct.pack("<I", slot)


HEAD = (
    b"\x80\x02](ctorch._utils\n_rebuild_tensor_v2\nq\0X\x07\0\0\0storageq\1ctorch\nFloatStorage\n"
    b"q\2X\x03\0\0\0cpuq\3ccollections\nOrderedDict\nq\4)q\5"
)
PUTS = [put(n) for n in range(6, 13)]


def tensor(puts: list[bytes], **other: bytes) -> bytes:
    """The sequence of a tensor, with these PUTs, and other opcodes than usual."""
    parts = {
        "function": b"h\0", "marks": b"((", "word": b"h\1", "cls": b"h\2",
        "key": b"X\1\0\0\0" + b"7", "location": b"h\3", "numel": b"K\4",
        "offset": b"K\0", "shape": b"K\2K\2\x86", "stride": b"K\2K\1\x86", "grad": b"\x89",
        "hooks": b"h\4", "call": b")R",
    } | other  # fmt: skip
    p = dict(enumerate(puts))
    at = parts.__getitem__
    return b"".join((
        at("function"), at("marks"), at("word"), at("cls"), at("key"), p[0], at("location"),
        at("numel"), b"t", p[1], b"Q", at("offset"), at("shape"), p[2], at("stride"), p[3],
        at("grad"), at("hooks"), at("call"), p[4], b"t", p[5], b"R", p[6],
    ))  # fmt: skip


ODD: dict[str, bytes] = {
    "as usual": tensor(PUTS),
    "without puts": tensor([b""] * 7),
    "some puts": tensor([b"", put(9), b"", b"", put(12), b"", b""]),
    "short puts": tensor([b"q%c" % n for n in range(6, 13)]),
    "puts out of order": tensor(PUTS[::-1]),
    "puts twice": tensor([PUTS[0]] * 7),
    "far puts": tensor([put(1 << 20)] * 7),
    "a put of a slot in use": tensor([put(1), *PUTS[1:]]),
    "a put of the location before it is recalled": tensor([put(3), *PUTS[1:]]),
    "a negative size": tensor(PUTS, shape=b"J\xff\xff\xff\xffK\2\x86"),
    "a negative offset": tensor(PUTS, offset=b"J\xff\xff\xff\xff"),
    "large": tensor(PUTS, numel=b"\x8a\5\0\0\0\0\1", shape=b"\x8a\5\0\0\0\0\1K\2\x86"),
    "negative and large": tensor(PUTS, numel=b"\x8a\5\0\0\0\0\xff"),
    "of other lengths": tensor(PUTS, stride=b"K\1\x85"),
    "an empty shape": tensor(PUTS, shape=b")", stride=b")"),
    "an empty shape without puts": tensor([b""] * 7, shape=b")", stride=b")"),
    "marked": tensor(PUTS, shape=b"(K\2K\2t", stride=b"(K\2K\2t"),
    "marked, closed otherwise": tensor(PUTS, shape=b"(K\2K\2\x86"),
    "too few in a tuple": tensor(PUTS, shape=b"K\2\x86"),
    "a long shape": tensor(PUTS, shape=b"(" + b"K\1" * 12 + b"t", stride=b"(" + b"K\1" * 12 + b"t"),
    "a key of another length": tensor(PUTS, key=b"X\2\0\0\0007"),
    "a long key": tensor(PUTS, key=b"X\x0d\0\0\0" + b"7" * 13),
    "a key that is recalled": tensor([b"", *PUTS[1:]], key=b"h\3"),
    "a location of another length": tensor(PUTS, location=b"X\5\0\0\0cuda:0"),
    "a literal location": tensor(PUTS, location=b"X\6\0\0\0cuda:0"),
    "a location with a put": tensor(PUTS, location=b"X\6\0\0\0cuda:0" + put(13)),
    "a location recalled with a put": tensor(PUTS, location=b"h\3" + put(5)),
    "a location that is none": tensor(PUTS, location=b"h\1"),
    "a location that was never filled": tensor(PUTS, location=b"h\xf0"),
    "another word": tensor(PUTS, word=b"h\3"),
    "no class": tensor(PUTS, cls=b"h\1"),
    "a class that is a function": tensor(PUTS, cls=b"h\0"),
    "no hooks": tensor(PUTS, hooks=b"h\2"),
    "hooks of another kind": tensor(PUTS, hooks=b"h\0"),
    "another function": tensor(PUTS, function=b"h\4"),
    "a mark too many": tensor(PUTS, marks=b"(((") + b"1",
    "cut off": tensor(PUTS)[:-20],
    "built": tensor(PUTS) + b"}b",
    "set": tensor(PUTS) + b"h\3h\3s",
    "filled": tensor(PUTS) + b"h\3a",
    "dropped": tensor(PUTS) + b"0N",
    "a recall that is spelled as what is before it": b"K\1" * 200
    + b"]r\x52\0\0\0"
    + tensor([*[b""] * 5, b"q\x68", b""])
    + b"h\x52h\x52",
}
#: Recalls of what lies in a tensor, and something done to it.
ODD |= {f"slot {n}": tensor(PUTS) + b"h%c" % n for n in range(6, 13)}
ODD |= {f"slot {n} twice": tensor(PUTS) + b"h%ch%c" % (n, n) for n in range(6, 13)}
ODD |= {f"slot {n} put again": tensor(PUTS) + b"h%cr\x20\0\0\0" % n for n in range(6, 13)}
ODD |= {f"slot {n} refilled": tensor(PUTS) + b"K\1q%ch%c" % (n, n) for n in range(6, 13)}
ODD |= {f"slot {n} of some": tensor([put(7), b"", put(9), b"", *PUTS[4:]]) + b"h%c" % n
        for n in range(6, 13)}  # fmt: skip
ODD |= {
    "hooks that are set": tensor(PUTS) + b"h\x0ah\3K\1s",
    "hooks that are built": tensor(PUTS) + b"h\x0a}b",
    "a name that is put anew": tensor(PUTS) + b"K\1q\4" + tensor([b""] * 7),
    "a location that is put anew": tensor(PUTS) + b"X\4\0\0\0metaq\3" + tensor([b""] * 7),
    "a class that is put anew": tensor(PUTS) + b"ctorch\nIntStorage\nq\2" + tensor([b""] * 7),
    "a function that is named anew": tensor(PUTS)
    + b"ctorch._utils\n_rebuild_tensor_v2\nq\0"
    + tensor([b""] * 7),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("again", [False, True])
def test_odd_sequences(name: str, again: bool) -> None:
    body = ODD[name]
    if again:  # what is known of the usual sequence must not be taken for this
        body = tensor([b""] * 7) + body + tensor([b""] * 7)
    assert_same(HEAD + body + b"e.")
    assert_same(HEAD + body + b"h\3e." + body)


def test_before_any_empty_tuple() -> None:
    assert_same(HEAD.replace(b")q\5", b"") + tensor(PUTS) + b"e.")
    assert_same(HEAD.replace(b"ccollections\nOrderedDict\nq\4", b"N0") + tensor(PUTS) + b"e.")


def test_tensors_of_one_storage_are_of_the_budget_too() -> None:
    """Those that name a storage of their own make it grow instead."""
    named = b"".join(tensor([b""] * 7, key=b"X\2\0\0\0%02d" % n) for n in range(100))
    recalled = tensor([b""] * 7, key=b"h\6") * 100
    left = []
    for each in (named, recalled):
        budget = Budget()
        before = budget.room
        walk(HEAD + b"X\1\0\0\0007q\6" + each + b"e.", budget=budget)
        left.append(budget.room - before)
    assert left[1] < 0 < left[0]
    budget._room = 0
    with pytest.raises(Excess):
        walk(HEAD + b"X\1\0\0\0007q\6" + recalled + b"e.", budget=budget)


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(300), deadline=None)
def test_mutated_pickles(dice: random.Random) -> None:
    made = pickled()
    data = bytearray(made[dice.choice(sorted(made))])
    opcodes = b"((hjXKMJ\x8atQ\x85\x86\x87)R\x88\x89qr0123aesbuN."
    for _ in range(dice.choice([1, 2, 3, 8])):
        at, length = dice.randrange(len(data)), dice.choice([1, 1, 2, 5, 80, 200])
        how = dice.random()
        if how < 0.4:
            data[at] = dice.choice(opcodes)
        elif how < 0.55:
            data[at] = dice.randrange(40)
        elif how < 0.7:
            del data[at : at + length]
        elif how < 0.85:
            start = dice.randrange(len(data))
            data[at:at] = data[start : start + length]
        else:
            start = dice.randrange(len(data))
            data[at : at + length] = data[start : start + length]
    assert_same(bytes(data))


def test_what_differs_is_seen_as_opcode_by_opcode() -> None:
    data = pickle_of(tensors(4))
    seen = 0
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            differs = [
                difference(
                    walk(data, machine_type=kind), walk(bytes(changed), machine_type=kind), {}, {}
                )
                for kind in (Machine, TensorMachine)
            ]
        except CkptmoveError:
            continue
        assert (differs[0] is None) == (differs[1] is None), (at, data[at - 9 : at + 9])
        seen += differs[0] is not None
    assert seen > 100
