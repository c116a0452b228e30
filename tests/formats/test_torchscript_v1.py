"""TorchScript of torch 1.0 to 1.3: what its table of tensors says, and that only devices change.

No torch of today loads these files. The oracles are the JSON itself and the bytes of the records; a
real file is among the public ones (`test_corpus.py`).
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ckptmove import CorruptError, InputError, UnsupportedError, inspect, relocate
from tests.oracles.readers import assert_sound_zip

CODE = """op_version_set = 1
def forward(self, x: Tensor) -> Tensor:
  return torch.zeros([1], dtype=6, layout=0, device=torch.device("cuda:0"))
"""


class Numbered:
    """Pickled as the tensor with that number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return build_tensor_from_id, (self.number,)


def build_tensor_from_id(number: int) -> Numbered:
    return Numbered(number)


build_tensor_from_id.__module__ = "torch.jit._pickle"


def table(device: str) -> list[dict[str, Any]]:
    """Four tensors, of which two are views of the same bytes."""
    common = {"requiresGrad": True, "dataType": "FLOAT", "device": device}
    return [
        {"dims": ["2", "3"], "offset": "0", "strides": ["3", "1"], "data": {"key": "tensors/0"}}
        | common,
        {"dims": ["2"], "offset": "4", "strides": ["1"], "data": {"key": "tensors/0"}} | common,
        {"offset": "0", "data": {"key": "tensors/1"}} | common | {"dataType": "INT64"},
        {"dims": ["0"], "strides": ["1"], "data": {"key": "tensors/2"}} | common,
    ]


def model(device: str = "cuda:0") -> dict[str, Any]:
    """A module with a submodule, as protobuf spells it."""
    inner = {
        "name": "inner",
        "parameters": [{"isBuffer": True, "tensorId": "1", "name": "part"}],
        "attributes": [{"type": "Tensor[]", "name": "list", "id": "1"}],
    }
    main = {
        "name": "m",
        "optimize": True,
        "torchscriptArena": {"key": "code/m.py"},
        "parameters": [{"isBuffer": False, "tensorId": "0", "name": "weight"}],
        "attributes": [
            {"type": "int", "name": "size", "id": "0"},
            {"type": "str", "name": "where", "id": "2"},
            {"type": "Tensor?", "name": "unset", "id": "-1"},
        ],
        "submodules": [inner],
    }
    start = {"protoVersion": "6", "mainModule": main, "producerName": "pytorch"}
    return {**start, "tensors": table(device)}


def write(path: Path, root: Any, *, raw: bytes | None = None) -> Path:
    """A file as torch 1.3 laid it out, by the writer of today."""
    writer: Any = torch._C.PyTorchFileWriter(os.fspath(path))
    room = ModuleType("torch.jit._pickle")  # it is no more
    room.build_tensor_from_id = build_tensor_from_id  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, room.__name__, room)
        attributes = pickle.dumps((10, [Numbered(2), Numbered(0)], "cuda:0"), protocol=2)
    text = json.dumps(root, separators=(",", ":")).encode() if raw is None else raw
    records = {
        "code/m.py": CODE.encode(),
        "attributes.pkl": attributes,
        "tensors/0": torch.arange(6.0).numpy().tobytes(),
        "tensors/1": torch.tensor(7).numpy().tobytes(),
        "tensors/2": b"",
        "model.json": text,
    }
    for name, data in records.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def read(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(f"{path.stem}/model.json"))


def test_it_shows_the_table_under_the_names_of_modules(tmp_path: Path) -> None:
    path = write(tmp_path / "in.pt", model())
    manifest = inspect(path)
    assert manifest.format == "torchscript-v1"
    found = {e.name: (e.kind, e.dtype, e.shape, e.stride, e.offset) for e in manifest.tensors}
    assert found == {
        "weight": ("parameter", "float32", (2, 3), (3, 1), 0),
        "inner.part": ("tensor", "float32", (2,), (1,), 4),
        "inner.list.0": ("tensor", "int64", (), (), 0),
        "inner.list.1": ("parameter", "float32", (2, 3), (3, 1), 0),
        "CONSTANTS.c3": ("tensor", "float32", (0,), (1,), 0),
    }
    assert set(manifest.devices) == {"cuda:0"}
    shared = next(entry for entry in manifest.tensors if entry.name == "weight")
    assert shared.shared_with == ("inner.part", "inner.list.1")
    said = [(value.name, value.value) for value in manifest.values_naming_devices]
    assert said == [("where", "cuda:0"), ("code/m.py:3", "cuda:0")]
    data = path.read_bytes()
    extent = manifest.storages["tensors/0"].extent
    assert extent is not None
    assert data[extent.start : extent.end] == torch.arange(6.0).numpy().tobytes()
    assert any("no longer" in text for text in manifest.warnings)


@pytest.mark.parametrize("to", ["cpu", "xpu:3", "privateuseone:15"])
def test_only_devices_change(to: str, tmp_path: Path) -> None:
    path, there, back = (tmp_path / name / "in.pt" for name in ("a", "b", "c"))
    for each in (path, there, back):
        each.parent.mkdir()
    write(path, model())
    report = relocate(path, there, to=to)
    assert report.method == ("patch" if len(to) <= 6 else "relay")
    assert [value.value for value in report.values_naming_devices] == ["cuda:0", "cuda:0"]
    assert read(there) == model(to)
    assert_sound_zip(there)
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(there) as theirs:
        assert ours.namelist() == theirs.namelist()
        for name in ours.namelist():
            assert name.endswith("model.json") or ours.read(name) == theirs.read(name)
    relocate(there, back, to="cuda:0")
    assert read(back) == model()


def changed(change: Callable[[Any], object]) -> Any:
    root = copy.deepcopy(model())
    change(root)
    return root


NOT_KNOWN = {
    "of the model": lambda root: root.update(devices=["cuda:0"]),
    "of a module": lambda root: root["mainModule"].update(caffe2Nets=[{}]),
    "of a tensor": lambda root: root["tensors"][0].update(where="cuda:0"),
    "a device that is left out": lambda root: root["tensors"][2].pop("device"),
}


@pytest.mark.parametrize("change", NOT_KNOWN.values(), ids=NOT_KNOWN)
def test_what_is_not_known_stays(change: Callable[[Any], object], tmp_path: Path) -> None:
    path = write(tmp_path / "in.pt", changed(change))
    assert inspect(path).tensors
    with pytest.raises(UnsupportedError, match=r"can't be relocated"):
        relocate(path, tmp_path / "out.pt", to="xpu:1")
    assert not (tmp_path / "out.pt").exists()


def test_code_is_not_rewritten(tmp_path: Path) -> None:
    path = write(tmp_path / "in.pt", model())
    report = relocate(path, tmp_path / "out.pt", to="cpu", values=True)
    assert report.values_rewritten == ()
    assert [value.fixed for value in report.values_naming_devices] == [True, True]


def of_tensor(**fields: Any) -> Callable[[Any], object]:
    return lambda root: root["tensors"][0].update(fields)


DAMAGED = {
    "a missing record": of_tensor(data={"key": "tensors/9"}),
    "a path outside": of_tensor(data={"key": "../x"}),
    "too many elements": of_tensor(dims=["2", "4"]),
    "a stride too many": of_tensor(strides=["3", "1", "1"]),
    "an offset too large": of_tensor(offset="1"),
    "a negative offset": of_tensor(offset="-1"),
    "numbers that are numbers": of_tensor(dims=[2, 3]),
    "dims of another kind": of_tensor(dims={"2": 3}),
    "astronomic sizes": of_tensor(dims=["9" * 18, "9" * 18]),
    "no dtype": of_tensor(dataType="STRING"),
    "no device": of_tensor(device=None),
    "an odd device": of_tensor(device="gpu"),
    "two devices of the same bytes": of_tensor(device="cpu"),
    "quantized": of_tensor(isQuantized=True),
    "a tensor that is missing": lambda root: root["mainModule"]["parameters"][0].update(
        tensorId="9"
    ),
    "an attribute that is missing": lambda root: root["mainModule"]["attributes"][0].update(id="9"),
    "no module": lambda root: root.pop("mainModule"),
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_one_line(change: Callable[[Any], object], tmp_path: Path) -> None:
    path = write(tmp_path / "in.pt", changed(change))
    with pytest.raises(InputError) as raised:
        inspect(path)
    assert "\n" not in str(raised.value)


def test_modules_in_modules_have_an_end(tmp_path: Path) -> None:
    deep: dict[str, Any] = {"name": "m"}
    for _ in range(250):
        deep = {"name": "m", "submodules": [deep]}
    path = write(tmp_path / "in.pt", {**model(), "mainModule": deep})
    with pytest.raises(CorruptError, match="levels deep"):
        inspect(path)
    text = b'{"mainModule": {}, "tensors": ' + b"[" * 9999 + b"]" * 9999 + b"}"
    for raw in (b"", b"{", b"[]", text, b'{"tensors": [], "tensors": []}'):
        with pytest.raises(CorruptError):
            inspect(write(path, None, raw=raw))
