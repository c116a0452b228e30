"""torch.export archives: every place that names a device is shown, and all move together.

The oracles are `torch.export.load`, running what it gives, and `move_to_device_pass`.
"""

from __future__ import annotations

import json
import logging
import random
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.passes import move_to_device_pass
from torch.export.pt2_archive import _package
from torch.export.pt2_archive._package import load_pt2, package_pt2
from torch.fx import Interpreter

from ckptmove import (
    CkptmoveError,
    CorruptError,
    InputError,
    RefusedError,
    UnsupportedError,
    UntrustedError,
    inspect,
    relocate,
)
from ckptmove.manifest.manifest import Manifest
from tests.conftest import in_turn
from tests.making.exported import EXPORTED_MAKERS, Everything, Views, Wrapped, everything, export
from tests.making.relaying import relay
from tests.oracles.readers import assert_sound_zip

CUDA = "cuda:0"
READABLE = [name for name in EXPORTED_MAKERS if name != "aotinductor"]
made_by = pytest.mark.parametrize("name", READABLE)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch logs that layouts are old, and warns of its own imports."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def loaded(path: Path) -> dict[str, Any]:
    """The programs in a file."""
    with zipfile.ZipFile(path) as archive:
        if "version" in archive.namelist():
            return {"model": torch.export.load(path)}
    return dict(load_pt2(path).exported_programs)


def original(name: str) -> dict[str, Any]:
    """The program that a maker saved, as it is here: it was told to be on CUDA only in the file."""
    if name == "two_programs":
        return {"one": everything(), "two": export(Views())}
    if name in ("views", "extra_files", "subclass"):
        return {"model": export(Wrapped() if name == "subclass" else Views())}
    return {"model": everything()}


def graph_values(manifest: Manifest) -> list[str]:
    """What nodes say of devices, and what is pickled: all but the metadata of tensors."""
    return sorted(v.value for v in manifest.values_naming_devices if "tensor_values" not in v.path)


def documents(path: Path) -> dict[str, Any]:
    """The JSON in a file, by the name of the record without its prefix."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".json")]
        return {
            name.partition("/")[2] or name: json.loads(archive.read(name))
            for name in names
            if "/extra/" not in name
        }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXPORTED_MAKERS)
@pytest.mark.parametrize("tag", ["cpu", CUDA])
def test_everything_that_names_a_device_is_shown(name: str, tag: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt2"
    expected = EXPORTED_MAKERS[name](path, tag)
    manifest = inspect(path)
    assert manifest.format == "torch-export"
    whole = [entry for entry in manifest.tensors if entry.part_of is None]
    assert {entry.name: entry.device for entry in whole} == dict(expected.devices)
    assert graph_values(manifest) == sorted(expected.elsewhere or ())
    data = path.read_bytes()
    for entry in whole:
        if entry.storage is not None and entry.name in expected.storages:
            extent = manifest.storages[entry.storage].extent
            assert extent is not None
            assert data[extent.start : extent.end] == expected.storages[entry.name]


def test_what_it_says_of_tensors_is_what_torch_finds(tmp_path: Path) -> None:
    for name in ("views", "model"):
        path = tmp_path / f"{name}.pt2"
        EXPORTED_MAKERS[name](path, "cpu")
        manifest = inspect(path)
        program = torch.export.load(path)
        entries = {entry.name: entry for entry in manifest.tensors}
        for key, value in {**program.state_dict, **program.constants}.items():
            entry = entries.pop(key)
            assert entry.shape == tuple(value.shape)
            assert entry.stride == value.stride()
            assert entry.offset == value.storage_offset()
            assert entry.dtype == str(value.dtype).removeprefix("torch.")
            assert entry.device == str(value.device)
            assert (entry.kind == "parameter") == isinstance(value, nn.Parameter)
        assert list(entries) == ["sample_inputs.0.0"]
        shared = {entry.name: entry.shared_with for entry in manifest.tensors if entry.shared_with}
        tied = {"model": ("first.weight", "second.weight"), "views": ("part", "tail")}[name]
        assert shared == {tied[0]: (tied[1],), tied[1]: (tied[0],)}
        metas = program.graph_module.graph.nodes
        devices = {
            n.name: str(n.meta["val"].device) for n in metas if hasattr(n.meta.get("val"), "device")
        }
        said = {
            v.path[2]: v.value
            for v in manifest.values_naming_devices
            if v.path[:2] == ("graph", "tensor_values")
        }
        assert said.items() >= devices.items()


@pytest.mark.sample(1)
@made_by
def test_moved_to_the_cpu_it_runs_as_if_exported_there(name: str, tmp_path: Path) -> None:
    path, there = tmp_path / "in.pt2", tmp_path / "there.pt2"
    EXPORTED_MAKERS[name](path, CUDA)
    report = relocate(path, there, to="cpu")
    assert report.method == "patch"
    manifest = inspect(there)
    assert set(manifest.devices) == {"cpu"}
    assert {v.value for v in manifest.values_naming_devices} <= {"cpu"}
    assert_sound_zip(there, path)
    native = tmp_path / "native.pt2"
    originals = original(name)
    package_pt2(native, exported_programs=dict(originals))
    if name not in ("pickled_weights", "plain_zip"):
        assert without_metadata(documents(there)) == without_metadata(documents(native))
    programs, natives = loaded(there), loaded(native)
    assert list(programs) == list(originals)
    for key, program in programs.items():
        x = torch.randn(2, 3)
        assert torch.equal(program.module()(x), originals[key].module()(x))
        assert str(program.graph_module.graph) == str(natives[key].graph_module.graph)


def without_metadata(node: Any) -> Any:
    """JSON without stack traces, which number what was traced."""
    if isinstance(node, list):
        return [without_metadata(each) for each in node]
    if isinstance(node, dict):
        return {k: without_metadata(each) for k, each in node.items() if k != "metadata"}
    return node


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "to"),
    in_turn(
        [(name,) for name in READABLE],
        [(CUDA,), ("xpu:3",), ("privateuseone:15",), ("mps",), ("meta",)],
        2,
    ),
)
def test_there_and_back(name: str, to: str, tmp_path: Path) -> None:
    path, there, back = (tmp_path / f"{n}.pt2" for n in ("in", "there", "back"))
    EXPORTED_MAKERS[name](path, "cpu")
    relocate(path, there, to=to)
    away = inspect(there)
    assert set(away.devices) == {to}
    assert set(graph_values(away)) <= {to, to.partition(":")[0]}
    relocate(there, back, to="cpu")
    assert documents(back) == documents(path)
    before, after = inspect(path), inspect(back)
    assert after.tensors == before.tensors or name in ("pickled_weights", "plain_zip", "subclass")
    assert after.values_naming_devices == before.values_naming_devices
    for key, program in loaded(back).items():
        x = torch.randn(2, 3)
        assert torch.equal(program.module()(x), original(name)[key].module()(x))


@pytest.mark.slow
def test_it_is_what_moving_the_program_gives(tmp_path: Path) -> None:
    path, there, torchs = (tmp_path / f"{n}.pt2" for n in ("in", "there", "torchs"))
    torch.export.save(everything(), path)
    relocate(path, there, to="meta")
    torch.export.save(move_to_device_pass(everything(), torch.device("meta")), torchs)
    ours, theirs = documents(there), documents(torchs)
    assert list(ours) == list(theirs)
    for name, document in ours.items():
        assert normal(document) == normal(theirs[name]), name
    program = torch.export.load(there)
    found = {v.device.type for v in (*program.state_dict.values(), *program.constants.values())}
    assert found == {"meta"}


def normal(node: Any) -> Any:
    """JSON without what `move_to_device_pass` forgets, and what numbers the tensors."""
    if isinstance(node, list):
        return [normal(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("as_string") in ("cpu", "meta"):
        return "a device"
    if list(node) == ["as_device"]:
        return "a device"
    skip = ("metadata", "path_name", "requires_grad")
    return {key: normal(each) for key, each in node.items() if key not in skip}


def on_host(path: Path, patch: pytest.MonkeyPatch) -> Any:
    """The program as torch reads it, with its weights and inputs on the CPU wherever they were."""
    real = torch.load
    with patch.context() as patched:
        patched.setattr(_package, "deserialize_device", lambda _: torch.device("cpu"))
        patched.setattr(torch, "load", lambda f, **k: real(f, **{**k, "map_location": "cpu"}))
        return load_pt2(path).exported_programs["model"]


@pytest.mark.slow
@pytest.mark.parametrize("to", [CUDA, "cuda:3"])
def test_torch_finds_the_whole_graph_there(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, there = tmp_path / "in.pt2", tmp_path / "there.pt2"
    for module in (Everything(), Views()):
        torch.export.save(export(module), path)
        relocate(path, there, to=to, force=True)
        program = on_host(there, monkeypatch)
        values = [node.meta.get("val") for node in program.graph.nodes]
        found = Counter(str(value.device) for value in values if isinstance(value, torch.Tensor))
        assert found.keys() == {to}
    inputs = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    with FakeTensorMode(), torch.no_grad():  # which minds devices, and needs none
        fakes = [torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device) for x in inputs]
        (result,) = Interpreter(program.graph_module).run(*fakes)
    assert str(result.device) == to


# Anything at all


@pytest.mark.slow
def test_whatever_the_json_says_there_is_one_line(program: Path) -> None:
    original = program.read_bytes()
    dice = random.Random(0)
    outcomes: Counter[str] = Counter()
    said: set[str] = set()
    for _ in range(100):
        program.write_bytes(original)
        wanted = dice.choice(["models/", "weights_config", "constants_config"])
        edited(program, lambda name, root: mutated(root, dice) if wanted in name else root)  # noqa: B023
        try:
            relocate(program, program.with_name("out.pt2"), to="cpu", force=True)
            outcomes["moved"] += 1
        except CkptmoveError as error:
            outcomes[type(error).__name__] += 1
            said.add(str(error))
    assert not [text for text in said if "\n" in text or len(text) > 500]
    assert outcomes["UnsupportedError"] > 5
    assert outcomes["CorruptError"] > 5


JUNK: list[Any] = [
    None,
    True,
    -1,
    7,
    1.5,
    "",
    "cuda:0",
    [],
    {},
    {"type": "cuda", "index": 1},
    [[{}]],
]


def mutated(root: Any, dice: random.Random) -> Any:
    """Put junk somewhere, deep or not."""
    node = root
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = dice.choice(keys)
        inner = node[key]
        if not isinstance(inner, (dict, list)) or not inner or dice.random() < 0.1:
            node[key] = dice.choice(JUNK)
            return root
        node = inner


# What is refused


def edited(path: Path, edit: Callable[[str, Any], Any]) -> Path:
    """The same file with `edit(name, JSON)` done to its JSON; what it gives is JSON or bytes."""

    def edit_record(name: str, data: bytes) -> bytes:
        if not name.endswith(".json"):
            return data
        found = edit(name, json.loads(data))
        return found if isinstance(found, bytes) else json.dumps(found).encode()

    relay(path, edit_record)
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file of one program, on CUDA."""
    path = tmp_path / "in.pt2"
    EXPORTED_MAKERS["model"](path, CUDA)
    return path


def assert_only(path: Path, reason: str, to: str = "cpu") -> None:
    """It can be shown, and not be moved; nothing is written."""
    assert inspect(path).tensors
    with pytest.raises(UnsupportedError, match=reason) as raised:
        relocate(path, path.with_name("out.pt2"), to=to)
    assert "\n" not in str(raised.value)
    assert not path.with_name("out.pt2").exists()


def test_what_is_compiled_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "in.pt2"
    EXPORTED_MAKERS["aotinductor"](path, CUDA)
    assert_only(path, "it holds code compiled for its device")
    relocate(path, tmp_path / "same.pt2", to=CUDA)  # nothing moves
    assert (tmp_path / "same.pt2").read_bytes() == path.read_bytes()
    # torch.export.load hands it to the system's loader
    told = "compiled code in data/aotinductor/"
    assert any(each.startswith(told) for each in inspect(path).unknown_callables)
    with pytest.raises(UntrustedError, match=told):
        inspect(path, strict=True)


@pytest.mark.parametrize("rule", [{"place": {"first.*": "cpu"}}, {"device_map": {"second": "cpu"}}])
def test_a_program_is_not_torn_apart(program: Path, rule: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=r"would be split|share a storage"):
        relocate(program, program.with_name("out.pt2"), **rule)
    place = {"second.bias": "cpu"}
    with pytest.raises(RefusedError, match="would be split"):
        relocate(program, program.with_name("out.pt2"), place=place)


def test_one_device_of_two_moves(program: Path) -> None:
    there = program.with_name("out.pt2")
    relocate(program, there, map={CUDA: "cuda:1"})
    before, after = (Counter(graph_values(inspect(path))) for path in (program, there))
    assert before["cpu"] == after["cpu"] == 1
    assert after["cuda:1"] == before[CUDA] > 0
    assert after["cuda"] == before["cuda"] == 1  # the autocast region's kind is the same


def first_node(root: Any) -> Any:
    return root["graph_module"]["graph"]["nodes"][0]


def add_argument(root: Any, arg: Any) -> Any:
    first_node(root)["inputs"].append({"name": "extra", "arg": arg, "kind": 2})
    return root


ARGUMENTS = {
    "a word": {"as_string": "cuda:0"},
    "words": {"as_strings": ["x", "cuda"]},
    "a word in a dict": {"as_string_to_argument": {"a": {"as_string": "cuda"}}},
    "an unknown kind": {"as_stream": {"type": "cuda", "index": 0}},
    "two kinds at once": {"as_int": 1, "as_device": {"type": "cuda", "index": 0}},
    "an object": {"as_custom_obj": {"name": "x", "class_fqn": "y"}},
    "an odd device": {"as_device": {"type": "cuda", "index": "0"}},
}


@pytest.mark.parametrize("arg", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_are_not_understood_stay(program: Path, arg: Any) -> None:
    edited(program, lambda name, root: add_argument(root, arg) if "models/" in name else root)
    assert_only(program, r"the program can't be relocated: it holds .* at 'graph.ones.extra")


def with_version(root: Any) -> Any:
    root["schema_version"]["major"] = 9
    return root


def with_guard(root: Any) -> Any:
    root["guards_code"] = ["L['x'].device.type == 'cuda'"]
    return root


def with_flash_attention(root: Any) -> Any:
    first_node(root)["target"] = "torch.ops.aten._scaled_dot_product_flash_attention.default"
    return root


def with_unknown_field(root: Any) -> Any:
    root["graph_module"]["graph"]["streams"] = [{"type": "cuda", "index": 0}]
    return root


def with_default_autocast(root: Any) -> Any:
    for node in root["graph_module"]["graph"]["nodes"]:
        if "autocast" in node["target"]:
            node["inputs"][1]["arg"] = {"as_none": True}
    return root


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_version, "its schema version is not 8 but 9"),
        (with_guard, "which may mean a device"),
        (with_flash_attention, "flash_attention.default' works on one kind of device only"),
        (with_unknown_field, "a Graph that is not known"),
        (with_default_autocast, "it has no dtype"),
    ],
)
def test_programs_that_are_not_understood_stay(
    program: Path, change: Callable[[Any], Any], reason: str
) -> None:
    edited(program, lambda name, root: change(root) if "models/" in name else root)
    assert_only(program, reason)


def test_operators_for_a_kind_of_device_may_change_its_number(program: Path) -> None:
    for change in (with_flash_attention, with_default_autocast):
        edited(program, lambda name, root: change(root) if "models/" in name else root)  # noqa: B023
    there = program.with_name("out.pt2")
    relocate(program, there, map={CUDA: "cuda:1"})
    assert CUDA not in inspect(there).devices


def test_other_words_are_no_devices(program: Path) -> None:
    arg = {"as_string": "bilinear"}
    edited(program, lambda name, root: add_argument(root, arg) if "models/" in name else root)
    relocate(program, program.with_name("out.pt2"), to="cpu")


def test_objects_may_be_anywhere(program: Path) -> None:
    def add(name: str, root: Any) -> Any:
        if "constants_config" in name:
            payload = {"path_name": "tensor_0", "is_param": False, "use_pickle": True}
            root["config"]["object"] = {**payload, "path_name": "custom_obj_0", "tensor_meta": None}
        return root

    edited(program, add)
    with pytest.raises(CorruptError, match="custom_obj_0' is missing"):
        inspect(program)


# What is damaged


def of_weight(key: str, value: Any) -> Callable[[str, Any], Any]:
    """An edit of the first weight's description."""

    def edit(name: str, root: Any) -> Any:
        if "weights_config" in name:
            payload = root["config"]["first.weight"]
            (payload if key in payload else payload["tensor_meta"])[key] = value
        return root

    return edit


DAMAGED = {
    "truncated": lambda name, root: json.dumps(root).encode()[:-2],
    "says a thing twice": lambda name, root: b'{"config": {}, "config": {}}',
    "no UTF-8": lambda name, root: b'{"\xff": 1}',
    "deep": lambda name, root: b"[" * 100_000 + b"]" * 100_000,
    "not an object": lambda name, root: [],
    "a number too large": lambda name, root: b'{"config": 1e999}',
    "a number too long": lambda name, root: b'{"config": ' + b"9" * 10_000 + b"}",
    "a path outside": of_weight("path_name", "../../models/model.json"),
    "an absolute path": of_weight("path_name", "/etc/passwd"),
    "a missing record": of_weight("path_name", "weight_99"),
    "too many elements": of_weight("sizes", [{"as_int": 3}, {"as_int": 4}]),
    "strides too long": of_weight("strides", [{"as_int": 9}, {"as_int": 1}]),
    "negative strides": of_weight("strides", [{"as_int": -3}, {"as_int": 1}]),
    "an offset too large": of_weight("storage_offset", {"as_int": 1}),
    "an astronomic size": of_weight("sizes", [{"as_int": 1 << 70}, {"as_int": 1}]),
    "a symbolic size": of_weight("sizes", [{"as_expr": {"expr_str": "s0"}}, {"as_int": 1}]),
    "a missing stride": of_weight("strides", [{"as_int": 1}]),
    "an odd device": of_weight("device", {"type": 3, "index": 0}),
    "another device for the same bytes": of_weight("device", {"type": "cpu", "index": None}),
    "another dtype for the same bytes": of_weight("dtype", 4),
    "a dtype of another kind": of_weight("dtype", "float"),
    "no dtype": of_weight("dtype", 99),
    "sparse": of_weight("layout", 1),
    "raw bytes that are to be a pickle": of_weight("use_pickle", True),
    "no tensor": of_weight("tensor_meta", None),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("edit", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_one_line(program: Path, edit: Callable[[str, Any], Any]) -> None:
    edited(program, edit)
    with pytest.raises(InputError) as raised:
        inspect(program)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


GONE = ("data/sample_inputs/model.pt", "data/weights/weight_0", "archive_version")


@pytest.mark.parametrize("gone", [*GONE, "data/constants/model_constants_config.json"])
def test_missing_records_are_named(program: Path, gone: str) -> None:
    renamed = gone[:-1] + "~"
    program.write_bytes(program.read_bytes().replace(gone.encode(), renamed.encode()))
    with pytest.raises(CorruptError, match=f"{gone}' is missing"):
        inspect(program)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXPORTED_MAKERS)
def test_truncated_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt2"
    EXPORTED_MAKERS[name](path, CUDA)
    data = path.read_bytes()
    for cut in range(1, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:-cut])
        with pytest.raises(InputError):
            inspect(path)
