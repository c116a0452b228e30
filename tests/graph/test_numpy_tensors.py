"""numpy arrays in state dicts become tensors of a safetensors file, and come back as arrays."""

from __future__ import annotations

import base64
import codecs
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckptmove import Opaque, RefusedError, convert, diff, formats, inspect, load, save, validate
from ckptmove.cli import run
from ckptmove.errors import CheckFailed, CkptmoveError, CorruptError
from ckptmove.formats.safetensors.file import SafetensorsFile
from ckptmove.formats.writing import WriteOptions
from ckptmove.graph.array_order import Latest, Order, ReorderedArray
from ckptmove.manifest.manifest import Role
from ckptmove.sources.source import Memory
from tests.graph.test_numpy_weights import arrays
from tests.making import python2

KINDS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
SHAPES = (
    (),
    (0,),
    (1,),
    (5,),
    (2, 0, 3),
    (3, 4),
    (1, 5),
    (4, 1),
    (2, 3, 4),
    (2, 1, 3, 2),
    (50, 40),
)
PROTOCOLS = (2, 3, 4, 5)


def array_of(kind: str, shape: tuple[int, ...], order: str, endian: str) -> Any:
    """No two of its elements the same, as far as there are as many."""
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) * (3 if kind != "?" else 1)
    return np.array(values % 2 if kind == "?" else values, dtype=endian + kind, order=order)  # type: ignore[call-overload]


ARRAYS = st.builds(
    array_of,
    st.sampled_from(KINDS),
    st.sampled_from(SHAPES),
    st.sampled_from("CF"),
    st.sampled_from("<>"),
)


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    """State dicts of arrays at several places, some arrays there twice, tensors and data beside."""
    drawn = draw(st.lists(ARRAYS, min_size=1, max_size=5))
    states = [
        {f"p{n}": each for n, each in enumerate(draw(st.lists(st.sampled_from(drawn), min_size=1)))}
        for _ in range(3)
    ]
    if draw(st.booleans()):
        states[1]["weight"] = torch.ones(2, 3)
    saved: dict[str, Any] = {
        "model": states[0],
        "nested": {"deep": OrderedDict(states[1])},
        "rows": [states[2], {"epoch": 3, "scale": np.float32(0.5), "loose": drawn[0]}],
        "list": drawn,
        "texts": np.array(["a", "bc"]),
        "pair": np.zeros(2, "i4,f8"),
        "rng": np.random.RandomState(0).get_state(),
    }
    return states[0] if draw(st.integers(0, 3)) == 0 else saved


def listed(saved: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays and tensors of state dicts, each under its name."""
    children: list[tuple[Any, Any]] = []
    if isinstance(saved, (dict, list)):
        children = list(saved.items() if isinstance(saved, dict) else enumerate(saved))
    kinds = {type(child) for _, child in children} if isinstance(saved, dict) else set()
    for key, child in children:
        inner = f"{name}.{key}".removeprefix(".")
        if kinds and kinds <= {np.ndarray, torch.Tensor}:
            yield inner, child
        yield from listed(child, inner)


def assert_same(ours: Any, theirs: Any, met: dict[int, Any] | None = None) -> None:
    """The same values, arrays by all that numpy tells of them, and the same objects twice."""
    met = {} if met is None else met
    assert type(ours) is type(theirs)
    if isinstance(ours, (np.ndarray, torch.Tensor, dict, list)):
        assert met.setdefault(id(ours), theirs) is theirs
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
    if isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.dtype.str, ours.shape) == (
            theirs.dtype,
            theirs.dtype.str,
            theirs.shape,
        )
        assert (ours.strides, str(ours.flags)) == (theirs.strides, str(theirs.flags))
        assert ours.tobytes("A") == theirs.tobytes("A")
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, (dict, list, tuple)):
        pairs = zip(ours.values(), theirs.values(), strict=True) if isinstance(ours, dict) else None
        for mine, other in pairs or zip(ours, theirs, strict=True):
            assert_same(mine, other, met)
    elif isinstance(ours, Opaque):
        assert_same(vars_of(ours), vars_of(theirs), met)
    else:
        assert ours == theirs


def vars_of(opaque: Opaque) -> list[Any]:
    return [opaque.qualname, opaque.args, opaque.state]


def there_and_back(saved: object, folder: Path, protocol: int) -> Path:
    """Convert to safetensors and back, and compare with torch's own reading; gives the former."""
    x, y, z = folder / "x.pt", folder / "y.safetensors", folder / "z.pt"
    torch.save(saved, x, pickle_protocol=protocol)
    report = convert(x, y, force=True)
    assert not report.warnings
    convert(y, z, force=True)
    expected = torch.load(x, weights_only=False)
    assert_same(expected, torch.load(z, weights_only=False))
    assert_same(load(x), load(y))
    assert diff(x, y).equal
    assert diff(y, z).equal
    validate(y, against=x).raise_if_failed()
    convert(y, folder / "again.safetensors", force=True)
    assert (folder / "again.safetensors").read_bytes() == y.read_bytes()
    return y


@given(saved=checkpoints(), protocol=st.sampled_from(PROTOCOLS))
@settings(max_examples=25)
def test_arrays_come_back(
    saved: dict[str, Any], protocol: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    written = load_file(there_and_back(saved, tmp_path_factory.mktemp("numpy"), protocol))
    first: dict[int, str] = {}
    for name, value in listed(saved):
        if first.setdefault(id(value), name) != name:
            assert name not in written
        elif isinstance(value, np.ndarray):
            name = name if name in written else name.rpartition(".")[2]  # all are in one state dict
            tensor = written.pop(name).numpy()
            if value.dtype.kind == "c" and value.dtype.itemsize == 16:
                tensor = tensor.view("c16")[..., 0]
            assert tensor.dtype == value.dtype.newbyteorder("=")
            assert np.array_equal(tensor, value)
            assert tensor.shape == value.shape
    assert all(name.endswith("weight") or name.startswith(("list.", "rows.1")) for name in written)


def test_names_are_those_of_the_state_dict(tmp_path: Path) -> None:
    model = {"a.weight": np.ones((2, 3), "f4"), "a.bias": torch.ones(2), "n": np.array(3)}
    saved = {"model": model, "epoch": 3, "rng": np.random.RandomState(0).get_state()}
    y = there_and_back(saved, tmp_path, 2)
    assert load_file(y).keys() == model.keys()
    for path in (tmp_path / "x.pt", y):
        entries = {entry.state_key: entry for entry in inspect(path).tensors}
        assert entries.keys() == model.keys()
        assert (entries["n"].kind, entries["n"].role) == ("numpy.ndarray", Role.ARRAY)
        assert (entries["n"].dtype, entries["n"].shape) == ("int64", ())


def test_estimators_come_back(tmp_path: Path) -> None:
    """What people save of sklearn's and skorch's: settings, texts and arrays in one dict."""
    history = [{"epoch": 1, "loss": np.float64(0.5), "order": np.arange(3)}]
    coefficients = np.asfortranarray(np.random.default_rng(0).normal(size=(70, 80)))
    saved = {
        "coef_": coefficients,
        "intercept_": np.zeros(3),
        "classes_": np.array(["cat", "dog", "eel"]),
        "history": history,
        "net": {"module": {"w": np.ones((2, 2), "f4"), "b": torch.ones(2)}, "lr": np.float32(0.1)},
        "tree": np.zeros(4, [("left", "i8"), ("threshold", "f8")]),
    }
    for protocol in PROTOCOLS:
        y = there_and_back(saved, tmp_path, protocol)
        written = load_file(y)
        assert {"w", "b", "coef_"} <= written.keys()
        assert np.array_equal(written["coef_"].numpy(), coefficients)


def test_a_changed_array_is_found_and_named(tmp_path: Path) -> None:
    torch.save({"model": arrays(), "t": torch.ones(2)}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "y.safetensors")
    for key in ("f4", "fortran", "long", "bool", "scalar", "c8"):
        changed = load(tmp_path / "y.safetensors")
        place = (0,) * changed["model"][key].ndim
        changed["model"][key][place] = not changed["model"][key][place]
        save(changed, tmp_path / "z.pt", force=True)
        save(load(tmp_path / "y.safetensors"), tmp_path / "same.safetensors", force=True)
        (found,) = diff(tmp_path / "same.safetensors", tmp_path / "z.pt").differences
        assert found.name == f"model.{key}"
        with pytest.raises(CheckFailed):
            validate(tmp_path / "z.pt", against=tmp_path / "same.safetensors").raise_if_failed()


def test_an_array_that_became_two_is_found(tmp_path: Path) -> None:
    array = np.ones(3)
    torch.save({"a": array, "b": array, "c": np.ones(3)}, tmp_path / "one.pt")
    torch.save({"a": array, "b": np.ones(3), "c": np.ones(3)}, tmp_path / "two.pt")
    convert(tmp_path / "one.pt", tmp_path / "one.safetensors")
    for one in (tmp_path / "one.pt", tmp_path / "one.safetensors"):
        (found,) = diff(one, tmp_path / "two.pt").differences
        assert (found.kind, found.names) == ("unshared", ("a", "b"))
        (found,) = diff(tmp_path / "two.pt", one).differences
        assert (found.kind, found.names) == ("shared", ("a", "b"))


@pytest.mark.parametrize("shared", ["keep", "duplicate", "error"])
def test_an_array_of_two_names(shared: Any, tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    torch.save({"a": array, "b": array}, tmp_path / "x.pt")
    y = tmp_path / "y.safetensors"
    if shared == "error":
        with pytest.raises(RefusedError, match="'a' and 'b' share their bytes"):
            convert(tmp_path / "x.pt", y, shared=shared)
        return
    report = convert(tmp_path / "x.pt", y, shared=shared)
    names = {"a", "b"} if shared == "duplicate" else {"a"}
    assert load_file(y).keys() == names
    assert all(np.array_equal(load_file(y)[name].numpy(), array) for name in names)
    assert report.shared == ({} if shared == "duplicate" else {"b": "a"})
    found = load(y)
    assert found["a"] is found["b"]


@pytest.mark.parametrize("protocol", [0, 2])
def test_arrays_of_python_2_are_arrays(protocol: int, tmp_path: Path) -> None:
    """Their bytes were strings, be it such as are text."""
    saved = {
        "zeros": np.zeros((2, 3), "f4"),
        "many": np.zeros(3000),
        "letters": np.full((3, 3), 65, "u1"),
        "values": np.arange(2000, dtype="f8"),
    }
    x, y, z = tmp_path / "x.pkl", tmp_path / "y.safetensors", tmp_path / "z.pt"
    x.write_bytes(python2.dumps({"state_dict": saved, "text": "A" * 9}, protocol))
    expected = pickle.loads(x.read_bytes(), encoding="latin1")
    assert not convert(x, y).warnings
    convert(y, z)
    for found in (load(x), load(y), torch.load(z, weights_only=False)):
        assert found["text"] == "A" * 9
        for key, array in expected["state_dict"].items():
            assert np.array_equal(found["state_dict"][key], array)
            assert found["state_dict"][key].dtype == array.dtype
    assert {key: each.numpy().shape for key, each in load_file(y).items()} == {
        key: array.shape for key, array in saved.items()
    }
    assert diff(x, y).equal
    assert diff(x, z).equal


# -- what the tree says ---------------------------------------------------------------------------


def edited(path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A safetensors file whose tree, and tensors, were changed by somebody."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    tree, tensors = json.loads(header["__metadata__"]["ckptmove"]), dict(load_file(path))
    edit(tree["root"], tensors)
    out = path.with_name("edited.safetensors")
    save_file(tensors, out, {"format": "pt", "ckptmove": json.dumps(tree)})
    return out


def blob_of(root: dict[str, Any], key: str) -> dict[str, Any]:
    """What the tree says of the bytes of an array."""
    term: dict[str, Any] = root[key]["state"]["of"][4]
    return term


def small(folder: Path) -> Path:
    """A file of arrays in several orders."""
    saved = {
        "c": np.arange(12, dtype="f4").reshape(3, 4),
        "f": np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4)),
        "big": np.arange(3, dtype=">i4"),
        "z": np.asfortranarray(np.arange(4, dtype="c16").reshape(2, 2)),
        "bytes": np.arange(8, dtype="u1"),
        "w": torch.ones(3),
    }
    torch.save(saved, folder / "small.pt")
    convert(folder / "small.pt", folder / "small.safetensors")
    return folder / "small.safetensors"


def test_what_the_tree_says_of_arrays(tmp_path: Path) -> None:
    told: dict[str, Any] = {}
    edited(small(tmp_path), lambda root, _: told.update({key: blob_of(root, key) for key in "cfz"}))
    assert told == {
        "c": {"$": "blob", "of": "c"},
        "f": {"$": "blob", "of": "f", "fortran": True},
        "z": {"$": "blob", "of": "z", "fortran": True, "dtype": "complex128"},
    }


def test_files_with_arrays_in_their_tree_are_read(tmp_path: Path) -> None:
    """As ckptmove wrote them: short bytes in the tree, long ones a tensor of bytes."""
    y = small(tmp_path)
    held = torch.load(tmp_path / "small.pt", weights_only=False)

    def undo(root: dict[str, Any], tensors: dict[str, Any]) -> None:
        for key in ("c", "f", "bytes"):
            content = held[key].tobytes("A")
            del tensors[key]
            blob = blob_of(root, key)
            blob.clear()
            if key == "f":
                tensors["bytes.0"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                blob.update({"$": "blob", "of": "bytes.0"})
            else:
                blob.update({"$": "bytes", "of": base64.b64encode(content).decode()})

    former = edited(y, undo)
    assert_same(load(former), load(y))
    assert diff(former, y).equal
    validate(former, against=tmp_path / "small.pt").raise_if_failed()
    convert(former, tmp_path / "new.safetensors")
    assert load_file(tmp_path / "new.safetensors").keys() == load_file(y).keys()


def say(key: str, **said: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda root, _: blob_of(root, key).update(said)


def swap(key: str, tensor: torch.Tensor) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.update({key: tensor})


def state(key: str, at: int, value: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda root, _: root[key]["state"]["of"].__setitem__(at, value)


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "another shape": swap("c", torch.ones(4, 3)),
    "fewer dimensions": swap("c", torch.ones(12)),
    "too few": swap("c", torch.ones(3, 3)),
    "another dtype": swap("c", torch.ones(3, 4, dtype=torch.int32)),
    "another width": swap("c", torch.ones(3, 4, dtype=torch.float64)),
    "too few bytes": swap("bytes", torch.ones(7, dtype=torch.uint8)),
    "a shape that is none": state("c", 1, {"$": "tuple", "of": [3, -4]}),
    "a dtype that is none": state("c", 2, "f4"),
    "a tensor's bytes": lambda root, _: root.update(c={"$": "blob", "of": "c"}),
    "in Fortran's order": state("c", 3, True),
    "in C's order": state("f", 3, False),
    "an order of one": say("big", fortran=True),
    "an order that is none": say("c", fortran=1),
    "an order that can't be": say("c", fortran=[True]),
    "swapped": say("c", big_endian=True),
    "not swapped": say("big", big_endian=False),
    "a dtype of no array": say("f", dtype="bfloat16"),
    "a dtype of another size": say("f", dtype="complex128"),
    "a dtype that can't be": say("f", dtype=["float32"]),
    "something else": say("c", stride=[1, 3]),
    "no carrier": swap("z", torch.ones(2, 4, dtype=torch.float64)),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("lie", LIES)
def test_lies_about_arrays_are_refused(
    lie: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(small(tmp_path), LIES[lie])
    for read in (inspect, load):
        with pytest.raises(CorruptError):
            read(path)
    assert run(["convert", str(path), str(tmp_path / "back.pt")]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) <= 300


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (2, 1, 3, 2), (5000, 2), (2, 5000), (2,) * 14])
@pytest.mark.parametrize("kind", ["u1", "i2", "f4", "c8", "f8", "c16"])
def test_elements_are_put_in_order(kind: str, shape: tuple[int, ...]) -> None:
    """Read back from anywhere, and one array at a time."""
    values = np.random.default_rng(0).integers(0, 250, shape)
    for endian in "<>":
        array = np.asfortranarray(values.astype(endian + kind))
        content = values.astype(kind).tobytes()
        dtype = array.dtype.newbyteorder("=").name
        order = Order(dtype, shape, True, endian == ">" and kind != "u1")
        latest = Latest()
        first, second = (ReorderedArray(Memory(content, "x"), order, latest) for _ in range(2))
        assert first.read(0, array.nbytes) == array.tobytes("F")
        assert latest.held is None
        assert first.read(3, 5) == array.tobytes("F")[3:8]
        assert second.window(4, 4).read(0, 4) == array.tobytes("F")[4:8]
        assert latest.held is not None
        assert latest.held[0] is second


def test_from_safetensors_to_safetensors_arrays_are_copied(tmp_path: Path) -> None:
    """They are in the right order there: nothing is gathered, nor held in memory."""
    with formats.open_checkpoint(small(tmp_path)) as found:
        writing = SafetensorsFile().plan_write(found.draft(), WriteOptions("model"))
        (plan,) = writing.files.values()
    assert not plan.gathers
    assert sum(each.nbytes for each in plan.copies) == sum(
        each.nbytes for each in inspect(tmp_path / "small.safetensors").tensors
    )


class Undecodable:
    """Bytes that are the encoding of a text in which there are letters that it lacks."""

    def __reduce__(self) -> Any:
        return codecs.encode, ("\u0100" * 4, "latin1")


class Broken:
    """An array that no numpy could make."""

    def __reduce__(self) -> Any:
        reduced: Any = np.ones(1, "f4").__reduce__()
        make, args, (version, shape, dtype, order, _) = reduced
        return make, args, (version, shape, dtype, order, Undecodable())


def test_an_array_of_no_bytes_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": Broken(), "b": np.ones(2)}, 2))
    for n, bare in enumerate((False, True)):
        try:
            convert(tmp_path / "x.pkl", tmp_path / f"{n}.safetensors", bare=bare)
        except CkptmoveError:
            continue
        assert load_file(tmp_path / f"{n}.safetensors").keys() == {"b"}
