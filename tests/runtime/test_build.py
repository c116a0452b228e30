"""built(): what torch.load makes of the same file, and nothing that the file asks to be run."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import fractions
import os
import pathlib
import pickle
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import CkptmoveError, CorruptError, UnsupportedError
from ckptmove.pickles.nodes import Call, Dict, Global, List, Node, Persistent, Set, Text, Tuple
from ckptmove.pickles.walk import walk
from ckptmove.runtime.build import build_object
from ckptmove.runtime.opaque import Opaque
from ckptmove.runtime.rebuild import plain_tensor
from tests.making.building import at_most
from tests.making.checkpoints import MAKERS, save
from tests.making.relaying import rezipped
from tests.oracles.readers import load, loads_safely
from tests.oracles.sameness import assert_same_tree
from tests.whole.test_memory import PROJECT

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

#: What torch allows beside its list, once it was imported: that stays a name here.
REGISTERED = ("dtensor_state_dict", "nested_jagged")


def build_file(path: Path, *, strict: bool = False) -> Any:
    """What a zip checkpoint holds, with storages read from it as they are."""
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        storages: dict[str, torch.UntypedStorage] = {}

        def storage_of(node: Persistent) -> torch.UntypedStorage:
            assert isinstance(node.pid, Tuple)
            key = str(node.pid.items[2])
            if key not in storages:
                content = archive.read(names[f"data/{key}"])
                storages[key] = storage_with(content)
            return storages[key]

        return build_object(walk(archive.read(names["data.pkl"])).root, storage_of, strict=strict)


def storage_with(content: bytes) -> torch.UntypedStorage:
    if not content:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().untyped_storage()


def build_pickle(saved: object, protocol: int = 2, *, strict: bool = False) -> Any:
    """What a plain pickle of an object becomes."""
    return build_node(walk(pickle.dumps(saved, protocol)).root, strict=strict)


def build_node(root: Node, *, strict: bool = False) -> Any:
    """What a graph becomes whose storages are 64 bytes: a large number, and zeros."""
    content = storage_with(b"\x64".ljust(64, b"\0"))
    return build_object(root, lambda _: content, strict=strict)


@pytest.mark.sample(70)
@pytest.mark.parametrize("name", [name for name in sorted(MAKERS) if name not in REGISTERED])
def test_as_torch_loads_it(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "saved.pt", MAKERS[name]())
    safe = loads_safely(path)
    made = build_file(path, strict=safe)
    if safe or not holds_opaque(made):
        assert_same_tree(load(path, weights_only=safe), made)


def holds_opaque(root: object) -> bool:
    """Whether there is one anywhere."""
    todo, met = [root], set()
    while todo:
        each: Any = todo.pop()
        if id(each) in met:
            continue
        met.add(id(each))
        if isinstance(each, Opaque):
            return True
        if isinstance(each, dict):
            todo += [*each, *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset, collections.deque)):
            todo += each
        todo += list(getattr(each, "__dict__", {}).values())
    return False


PLAIN: dict[str, Callable[[], object]] = {
    "scalars": lambda: [None, True, 0, -1, 1 << 80, 1.5, -0.0, float("nan"), "", "\ud800", b"\0"],
    "containers": lambda: [(), (1,), [], {}, set(), {1, "a"}, frozenset({(1, 2)}), {1: {2: 3}}],
    "bytes": lambda: [b"", bytes(range(256)), bytearray(), bytearray(b"\xff\0")],
    "numbers": lambda: [complex(1, -0.0), range(3, 9, 2), slice(1, None, -1)],
    "ordered": lambda: collections.OrderedDict([("b", 1), ("a", 2)]),
    "counter": lambda: collections.Counter("hello"),
    "defaultdict": lambda: collections.defaultdict(list, {"a": [1]}),
    "defaultdict without": lambda: collections.defaultdict(None, {1: 2}),
    "deque": lambda: [collections.deque([1, 2], maxlen=2), collections.deque()],
    "namespace": lambda: argparse.Namespace(lr=0.1, betas=(0.9, 0.999)),
    "decimal": lambda: [decimal.Decimal("-0.10"), decimal.Decimal("NaN").copy_abs().is_nan()],
    "fraction": lambda: [fractions.Fraction(-3, 7), fractions.Fraction(5)],
    "uuid": lambda: uuid.UUID(int=77),
    "paths": lambda: [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\x"), Path("d")],
    "times": lambda: [
        *(datetime.date(2024, 2, 29), datetime.timedelta(1, 2, 3), datetime.time(1, 2, 3, 4)),
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X")),
    ],
    "types": lambda: [int, dict, torch.float32, torch.device("cuda:1"), torch.Size([1, 2])],
    "uuid as key": lambda: {uuid.UUID(int=5): 1},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_is_made(name: str, protocol: int) -> None:
    saved = PLAIN[name]()
    assert_same_tree(saved, build_pickle(saved, protocol, strict=True))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["f8", ">f4", "i2", "?", "u8", "c16", "U3", "S2", "f2"])
def test_arrays_are_made(dtype: str, protocol: int) -> None:
    array = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype)
    saved = [array, array.T, array[0, 0], array[:0], array[0, 0].reshape(()), array.dtype]
    made = build_pickle(saved, protocol, strict=True)
    loaded = pickle.loads(pickle.dumps(saved, protocol))  # numpy makes some little-endian
    for ours, theirs in zip(loaded, made, strict=True):
        assert type(ours) is type(theirs)
        assert str(getattr(ours, "dtype", ours)) == str(getattr(theirs, "dtype", theirs))
        if isinstance(ours, np.generic | np.ndarray):
            assert ours.shape == theirs.shape
            assert ours.tobytes("A") == theirs.tobytes("A")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_of_objects_are_not_made(protocol: int) -> None:
    saved = [np.array([{}], dtype=object), np.zeros(2, [("a", "i4")])]
    assert all(isinstance(each, Opaque) for each in build_pickle(saved, protocol))


class Config:
    """Somebody's class."""

    def __init__(self) -> None:
        self.lr, self.me = 0.1, [self]


def test_unknown_objects_are_opaque() -> None:
    saved = Config()
    made = build_pickle({"config": saved, "again": saved, "type": Config})
    config, name = made["config"], made["type"]
    assert isinstance(config, Opaque)
    assert made["again"] is config
    assert config.qualname == name.qualname == f"{__name__}.Config"
    assert config.args == ()
    assert name.args is None
    assert config.state["lr"] == 0.1
    assert config.state["me"] == [config]
    assert repr(config) == f"<Opaque {__name__}.Config() lr me>"
    assert repr(name) == f"<Opaque {__name__}.Config>"
    assert not callable(config)
    assert len({config, name}) == 2


def test_strict_names_what_it_is() -> None:
    with pytest.raises(UnsupportedError, match=r"tests\.runtime\.test_build\.Config is not known"):
        build_pickle([Config()], strict=True)


def test_names_are_shown_on_one_line() -> None:
    made = build_node(Global("evil", "\n\x1b[2J" + "x" * 1000, 0))
    assert repr(made) == "<Opaque 'evil.\\n\\x1b[2J" + "x" * 90 + "...'>"


def test_an_opaque_shows_itself_whatever_it_holds() -> None:
    names = ("", "\ud800" * 300, "\U0010ffff" * 300, "x" * 10**6, "\0")
    contents: tuple[object, ...] = (
        *(None, (), [], {}, 0, "", (torch.ones(2),), torch.ones(2), np.ones(3)),
        {"\ud800" * 200 + str(n): n for n in range(20)},
        {n: n for n in range(10**5)},
    )
    for name in names:
        for content in contents:
            made = Opaque(name, content, content, content)
            made.state = content
            made.items = [made, content] * 1000
            made.pairs = [(made, made)]
            told = repr(made)
            assert told.startswith("<Opaque ")
            assert told.isprintable()
            assert len(told) < 2000
    inside = Opaque("a.B", ())
    inside.args, inside.state = (inside,), {"me": inside}
    assert repr(inside) == "<Opaque a.B(...) me>"


def test_aliases_and_cycles() -> None:
    shared: list[object] = []
    loop: dict[str, object] = {"shared": shared, "tuple": (shared,)}
    loop["self"] = loop
    shared.append((loop, shared))
    made = build_pickle(loop, 2)
    assert made["self"] is made
    assert made["tuple"][0] is made["shared"]
    assert made["shared"][0][0] is made
    assert made["shared"][0][1] is made["shared"]


def test_a_cycle_that_is_entered_at_a_tuple() -> None:
    saved = Config()
    inner: dict[str, object] = {}
    pair = (saved, inner)
    saved.me = pair  # type: ignore[assignment]
    inner["pair"] = pair
    made = build_pickle(pair)
    assert made[0].state == {"lr": 0.1, "me": made}
    assert made[1]["pair"] is made
    assert made[0].state["me"] is made


CANARY = """
import sys
from pathlib import Path
import torch
from tests.runtime.test_build import build_file
before = set(sys.modules)
made = build_file(Path(sys.argv[1]))
print(made)
assert not {"canary", "turtle"} & (set(sys.modules) - before)
"""


@pytest.mark.usefixtures("warm")
def test_nothing_is_imported_or_run(tmp_path: Path) -> None:
    (tmp_path / "canary.py").write_text("open('sung', 'w')\ndef sing(*_): open('sung', 'w')\n")
    torch.save({"a": torch.ones(2)}, tmp_path / "saved.pt")
    pickled = b"\x80\x02}(X\1\0\0\0accanary\nsing\n)RX\1\0\0\0bcturtle\nTurtle\nu."
    path = rezipped(
        tmp_path / "saved.pt",
        tmp_path / "made.pt",
        lambda name, old: pickled if name.endswith("data.pkl") else old,
    )
    done = subprocess.run(
        [sys.executable, "-c", CANARY, path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{PROJECT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{'a': <Opaque canary.sing()>, 'b': <Opaque turtle.Turtle>}\n"
    assert not (tmp_path / "sung").exists()


# Graphs that no pickler makes


def call(name: str, *args: Node, state: Node = None, opcode: str = "REDUCE") -> Call:
    """A call of a name."""
    made = Call(global_of(name), Tuple(list(args), 0), opcode, 0)
    made.state, made.built = state, state is not None
    return made


def global_of(name: str) -> Global:
    module, _, inner = name.rpartition(".")
    return Global(module, inner, 0)


def storage(kind: str = "FloatStorage") -> Persistent:
    items: list[Node] = ["storage", global_of(f"torch.{kind}"), Text("0", 0), Text("cpu", 0), 16]
    return Persistent(Tuple(items, 0), 0)


def numbers(*items: int) -> Tuple:
    return Tuple(list(items), 0)


def tensor(
    shape: Node, stride: Node, offset: Node = 0, kind: str = "FloatStorage", hooks: Node = None
) -> Call:
    hooks = hooks or call("collections.OrderedDict")
    name = "torch._utils._rebuild_tensor_v2"
    return call(name, storage(kind), offset, shape, stride, False, hooks)


def dict_of(*pairs: tuple[Node, Node]) -> Dict:
    made = Dict()
    made.pairs = list(pairs)
    return made


def deep(depth: int, leaf: Node = 1) -> Node:
    node: Node = leaf
    for _ in range(depth):
        node = Tuple([node], 0)
    return node


def laughs(depth: int) -> Node:
    node: Node = 1
    for _ in range(depth):
        node = Tuple([node, node], 0)
    return node


def of_itself() -> Tuple:
    made = Tuple([], 0)
    made.items.append(made)
    return made


INTS = "LongStorage"
PARAMETER = "torch._utils._rebuild_parameter_with_state"
HOSTILE: dict[str, Callable[[], Node]] = {
    "outside": lambda: tensor(numbers(17), numbers(1)),
    "far outside": lambda: tensor(numbers(2), numbers(1 << 62)),
    "negative": lambda: tensor(numbers(2), numbers(-1), 1),
    "negative offset": lambda: tensor(numbers(2), numbers(1), -1),
    "huge": lambda: tensor(numbers(1 << 40, 1 << 40), numbers(0, 0)),
    "strides": lambda: tensor(numbers(1), numbers(1, 1)),
    "shape of text": lambda: tensor(Tuple(["a"], 0), numbers(1)),
    "not a storage": lambda: call("torch._utils._rebuild_tensor", 1, 0, numbers(1), numbers(1)),
    "too few": lambda: call("torch._utils._rebuild_tensor_v2", storage()),
    "hooks": lambda: tensor(numbers(1), numbers(1), hooks=List([])),
    "data": lambda: call(
        PARAMETER,
        *(tensor(numbers(1), numbers(1)), True, None),
        dict_of(("data", tensor(numbers(2), numbers(1)))),
    ),
    "class": lambda: call(
        PARAMETER,
        *(tensor(numbers(1), numbers(1)), True, None),
        dict_of(("__class__", global_of("torch.Tensor"))),
    ),
    "quantized": lambda: call(
        "torch._utils._rebuild_qtensor",
        *(storage("QInt8Storage"), 0, numbers(1 << 33), numbers(0)),
        *(Tuple([global_of("torch.per_tensor_affine"), 1.0, 0], 0), False, None),
    ),
    "sparse": lambda: call(
        "torch._utils._rebuild_sparse_tensor",
        call("torch.serialization._get_layout", "torch.sparse_coo"),
        Tuple(
            [
                tensor(numbers(1, 2), numbers(2, 1), kind=INTS),
                tensor(numbers(2), numbers(1)),
                numbers(0),
            ],
            0,
        ),
    ),
    "nested": lambda: call(
        "torch._utils._rebuild_nested_tensor",
        tensor(numbers(16), numbers(1)),
        tensor(numbers(1, 1), numbers(1, 1), kind=INTS),
        tensor(numbers(1, 1), numbers(1, 1), kind=INTS),
        tensor(numbers(1), numbers(1), kind=INTS),
    ),
    "type of type": lambda: call(
        "torch._tensor._rebuild_from_type_v2",
        global_of("torch.Tensor"),
        global_of("torch.Tensor"),
        numbers(1 << 40),
        None,
    ),
    "list as key": lambda: dict_of((List([]), 1)),
    "list in set": lambda: Set([List([])], frozen=False),
    "list in frozenset": lambda: Set([Tuple([List([])], 0)], frozen=True),
    "deep key": lambda: dict_of((deep(100_000), 1)),
    "laughing key": lambda: dict_of((laughs(60), 1)),
    "laughing set": lambda: call("builtins.set", List([laughs(60)])),
    "tuple in itself": of_itself,
    "state": lambda: call("argparse.Namespace", state=List([]), opcode="NEWOBJ"),
    "state of a date": lambda: call("datetime.date", 1, 1, 1, state=dict_of(("a", 1))),
    "state of an array": lambda: call(
        "numpy.core.multiarray._reconstruct",
        *(global_of("numpy.ndarray"), numbers(0), b"b"),
        state=Tuple([1, numbers(1 << 40), call("numpy.dtype", "f8"), False, b""], 0),
    ),
    "state of a dtype": lambda: call(
        "numpy.dtype",
        "f8",
        state=Tuple([3, "<", None, Tuple(["a"], 0), dict_of(), 1 << 40, 1, 63], 0),
    ),
    "pid": lambda: Persistent(Tuple(["module", 1], 0), 0),
    "one text, in many copies": lambda: List(
        [call("_codecs.encode", text, "latin1") for text in [Text("x" * (1 << 20), 0)] * 400]
    ),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs_are_errors(name: str) -> None:
    with at_most(20), pytest.raises(CkptmoveError):
        build_node(HOSTILE[name]())


REFUSED: dict[str, Callable[[], Node]] = {
    "bytearray": lambda: call("builtins.bytearray", 1 << 40),
    "bytes": lambda: call("builtins.bytes", 1 << 40),
    "list of a range": lambda: call("builtins.list", call("builtins.range", 1 << 40)),
    "tensor": lambda: call("torch.Tensor", 1 << 40),
    "storage": lambda: call("torch.storage.UntypedStorage", 1 << 40),
    "codec": lambda: call("_codecs.encode", "text", "rot13"),
    "fraction": lambda: call("fractions.Fraction", "1e999999999"),
    "decimal": lambda: call("decimal.Decimal", "1" * 10_000),
    "function": lambda: call("os.system", "touch canary"),
    "eval": lambda: call("builtins.eval", "1"),
    "getattr": lambda: call("builtins.getattr", global_of("os.path"), "join"),
    "factory": lambda: call("collections.defaultdict", global_of("os.getcwd")),
    "counter": lambda: call("collections.Counter", List([1])),
    "call of a call": lambda: Call(call("os.getcwd"), Tuple([], 0), "REDUCE", 0),
    "wrapper": lambda: call(
        "torch._tensor._rebuild_from_type_v2",
        global_of("torch._utils._rebuild_wrapper_subclass"),
        global_of("canary.Tensor"),
        Tuple([], 0),
        None,
    ),
    "object array": lambda: call(
        "numpy.core.multiarray._reconstruct",
        *(global_of("numpy.ndarray"), numbers(0), b"b"),
        state=Tuple([1, numbers(1), call("numpy.dtype", "O8"), False, List([1])], 0),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_be_called_is_opaque(name: str) -> None:
    with at_most(20):
        made = build_node(REFUSED[name]())
    assert isinstance(made, Opaque)
    assert repr(made).startswith("<Opaque ")
    with pytest.raises(UnsupportedError):
        build_node(REFUSED[name](), strict=True)


@pytest.mark.slow
def test_deep_graphs_are_built() -> None:
    with at_most(20):
        made = build_node(deep(200_000, List([])))
    for _ in range(200_000):
        (made,) = made
    assert made == []


def test_one_long_text_stays_one() -> None:
    text = Text("x" * 1000, 0)
    made = build_node(List([text] * 3))
    assert type(made[0]) is str
    assert made[0] is made[1] is made[2]


def test_bare_storages_are_shared() -> None:
    made = build_node(List([storage(), storage(), tensor(numbers(2), numbers(1))]))
    assert made[0] is made[1]
    assert isinstance(made[0], torch.TypedStorage)
    assert made[0].dtype == torch.float32
    assert made[2].data_ptr() == made[0]._data_ptr()


def test_a_tensor_that_is_none_is_corrupt() -> None:
    with pytest.raises(CorruptError, match="reaches outside its storage"):
        build_node(HOSTILE["outside"]())


# Graphs of real files, with some of their nodes in the place of others

ODD: list[Node] = [0, 1, -1, 1 << 40, 1 << 62, -(1 << 63), 1 << 64, None, True, "", "x", b"ab", 0.5]
SEEDS = (
    *("sparse_coo", "sparse_csr", "nested_strided", "quantized_per_channel_qint8", "meta_tensor"),
    *("parameter_with_attributes", "collections_kinds", "numpy_values", "python_objects"),
    *("recursive", "conjugate_view", "tensor_with_attributes", "adamw_training"),
)


@pytest.fixture(scope="module")
def pickles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The pickle of each."""
    found = {}
    for name in SEEDS:
        path = save(tmp_path_factory.mktemp("seeds") / "saved.pt", MAKERS[name]())
        with zipfile.ZipFile(path) as archive:
            inner = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
            found[name] = archive.read(inner)
    return found


@given(st.sampled_from(SEEDS), st.randoms(use_true_random=False))
def test_rearranged_graphs_are_built_or_are_errors(
    pickles: dict[str, bytes], name: str, random: Random
) -> None:
    root = walk(pickles[name]).root
    nodes = nodes_of(root)
    for _ in range(random.randint(1, 3)):
        rearrange(random.choice(nodes), nodes, random)
    with contextlib.suppress(CkptmoveError):
        build_node(root)


def test_a_stride_that_torch_has_no_number_for_is_left_to_all_checks() -> None:
    """Where a dimension has one element, any stride reaches no further."""
    storage = torch.UntypedStorage(8)
    assert plain_tensor(storage, "float32", 0, (1,), ((1 << 63) - 1,), False) is not None
    assert plain_tensor(storage, "float32", 0, (1,), (1 << 63,), False) is None


def nodes_of(root: Node) -> list[Any]:
    """All that are more than a scalar."""
    todo: list[Any] = [root]
    met: dict[int, Any] = {}
    while todo:
        node = todo.pop()
        if isinstance(node, (Tuple, List, Set, Dict, Call, Global)) and id(node) not in met:
            met[id(node)] = node
            todo += getattr(node, "items", ())
            todo += [each for pair in getattr(node, "pairs", ()) for each in pair]
            if isinstance(node, Call):
                todo += [node.function, node.args, node.state]
    return list(met.values())


def rearrange(node: Any, nodes: list[Any], random: Random) -> None:
    """Put another node, or an odd value, somewhere in it."""
    other = random.choice(nodes if random.random() < 0.6 else ODD)
    if isinstance(node, Call):
        field = random.choice(["function", "args", "state", "items"])
        if field == "items":
            node.items = [*node.items, other]
        else:
            setattr(node, field, other)
            node.built = node.built or field == "state"
    elif isinstance(node, Dict) and node.pairs:
        at = random.randrange(len(node.pairs))
        key, value = node.pairs[at]
        node.pairs[at] = random.choice([(other, value), (key, other)])
    elif getattr(node, "items", None):
        items = list(node.items)  # long rows of numbers are arrays, which hold nothing else
        items[random.randrange(len(items))] = other
        node.items = items
