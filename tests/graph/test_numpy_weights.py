"""Weights that are numpy arrays: real weights where a model's weights are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ckptmove import convert, diff, load
from tests.making.expected import raw

PROTOCOLS = (0, 2, 3, 4, 5)


def arrays() -> dict[str, Any]:
    """Of every dtype that safetensors have, and in every order."""
    made: dict[str, Any] = {
        name: np.arange(6).astype(name)
        for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8")
    }
    made["bool"] = np.array([True, False])
    made["matrix"] = np.arange(12, dtype="f4").reshape(3, 4)
    made["fortran"] = np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4))
    made["strided"] = np.arange(12, dtype="f4").reshape(3, 4)[:, ::2]
    made["big_endian"] = np.arange(5, dtype=">f4")
    made["big_endian_u2"] = np.arange(5, dtype=">u2")
    made["none"] = np.zeros((0, 3), dtype="f4")
    made["scalar"] = np.array(2.5)
    made["long"] = np.arange(40_000, dtype="f4")
    made["again"] = made["matrix"]
    return made


def to_pickle(saved: object, path: Path, protocol: int) -> None:
    path.write_bytes(pickle.dumps(saved, protocol))


def to_torch(saved: object, path: Path, protocol: int) -> None:
    torch.save(saved, path, pickle_protocol=protocol)


WRITERS: dict[str, Callable[[object, Path, int], None]] = {"pickle": to_pickle, "torch": to_torch}


def expected(array: Any) -> torch.Tensor:
    native = np.ascontiguousarray(array).reshape(array.shape).astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(native)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_preset_gives_the_weights(writer: str, protocol: int, tmp_path: Path) -> None:
    if (writer, protocol) == ("torch", 0):
        pytest.skip("torch itself can't load it")
    source, out = tmp_path / "model.pkl", tmp_path / "out.safetensors"
    saved: dict[str, Any] = {"model": arrays(), "__author__": "Zoo", "matching_heuristics": True}
    if writer == "torch":
        saved["model"]["tensor"] = torch.ones(2)
    WRITERS[writer](saved, source, protocol)
    ways: list[dict[str, Any]] = [{"preset": "hf"}, {"weights": "model"}, {"select": "model"}]
    for options in (*ways, {"bare": True}):
        report = convert(source, out, shared="duplicate", force=True, **options)
        assert any("numpy" in each for each in report.warnings)
        loaded = load_file(out)
        assert loaded.keys() == saved["model"].keys()
        for key, array in saved["model"].items():
            wanted = array if isinstance(array, torch.Tensor) else expected(array)
            assert (loaded[key].dtype, loaded[key].shape) == (wanted.dtype, wanted.shape), key
            assert raw(loaded[key].untyped_storage()) == raw(wanted.untyped_storage()), key


def test_what_no_tensor_can_be_stays_an_array(tmp_path: Path) -> None:
    source, out = tmp_path / "model.pkl", tmp_path / "out.safetensors"
    rng = {"rng": np.random.default_rng(0).bit_generator.state, "old": np.random.get_state()}
    other = {
        "text": np.array(["a"]),
        "when": np.array(["2020-01-01"], "M8[D]"),
        "pair": np.zeros(2, "i4,i4"),
    }
    model = {"a": np.ones(2, "f4")}
    source.write_bytes(pickle.dumps({"model": model, "other": other, **rng}))
    convert(source, out, bare=True)
    assert list(load_file(out)) == ["a"]


def test_without_that_arrays_come_back_as_such(tmp_path: Path) -> None:
    source = tmp_path / "model.pkl"
    source.write_bytes(pickle.dumps({"model": arrays()}))
    report = convert(source, tmp_path / "there.safetensors")
    assert (report.tensors, report.warnings) == (len(arrays()) - 1, ())
    convert(tmp_path / "there.safetensors", tmp_path / "back.pt")
    assert diff(source, tmp_path / "back.pt").equal
    for path in (source, tmp_path / "there.safetensors"):
        found = load(path)["model"]
        for key, array in arrays().items():
            assert isinstance(found[key], np.ndarray)
            assert found[key].dtype.name == array.dtype.name
            assert np.array_equal(found[key], array)


def test_arrays_are_compared_as_tensors_are(tmp_path: Path) -> None:
    weights = arrays()
    names = [tmp_path / name for name in ("a.pkl", "b.pkl", "c.pkl", "d.pkl", "e.pt")]
    near = {**weights, "f8": weights["f8"] + 1e-9, "fortran": weights["fortran"].copy("C")}
    turned = {**weights, "big_endian": weights["big_endian"].astype("<f4")}
    cast = {**weights, "f8": weights["f8"].astype("f4")}
    for path, saved in zip(names, (weights, near, turned, cast), strict=False):
        path.write_bytes(pickle.dumps({"model": saved}))
    first, close, other_order, retyped, tensors = names
    assert diff(first, first).tensors == len(weights)
    (changed,) = diff(first, close).differences
    assert (changed.kind, changed.name) == ("changed", "model.f8")
    assert changed.values is not None
    assert changed.values.max_abs == pytest.approx(1e-9)
    assert diff(first, close, atol=1e-6).equal
    assert diff(first, other_order).equal
    assert [each.kind for each in diff(first, retyped).differences] == ["retyped"]
    assert diff(first, retyped, cast=True).equal
    native = {key: np.ascontiguousarray(each) for key, each in weights.items()}
    native = {key: each.astype(each.dtype.newbyteorder("=")) for key, each in native.items()}
    torch.save({"model": {key: torch.from_numpy(each) for key, each in native.items()}}, tensors)
    found = diff(first, tensors).differences
    assert {(each.old, each.new) for each in found if each.kind == "type"} == {
        ("numpy array", "tensor")
    }


def test_arrays_that_are_not_cast_are_named(tmp_path: Path) -> None:
    source = tmp_path / "model.pkl"
    source.write_bytes(pickle.dumps({"model": {"a": np.ones(2, "f4"), "n": np.ones(2, "i4")}}))
    report = convert(source, tmp_path / "out.pt", dtype="float16")
    assert report.warnings == ("1 numpy array not cast: model.a; --bare writes arrays as tensors",)
    report = convert(source, tmp_path / "bare.pt", dtype="float16", bare=True)
    assert report.cast == {"float32→float16": 1}
    report = convert(source, tmp_path / "kept.pt", dtype="float16", keep_dtype="model.a")
    assert report.warnings == ()
