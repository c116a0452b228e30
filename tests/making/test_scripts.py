"""TorchScript archives, read and run by torch."""

from __future__ import annotations

import pickletools
import re
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.jit.mobile import _load_for_lite_interpreter

from tests.making.expected import raw
from tests.making.relaying import relay
from tests.making.retagging import retag
from tests.making.scripts import SCRIPT_MAKERS
from tests.oracles.readers import assert_sound_zip

INPUTS = {"many": torch.ones(2, 1), "helped": torch.ones(2)}
PICKLES = ("data", "constants", "traced_inputs", "bytecode")
ON_DEVICE = ("traced_on_device", "scripted_where")


def records(path: Path) -> dict[str, bytes]:
    """Record name without the prefix → data."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def locations(pickled: bytes) -> list[str]:
    """The location in each persistent id, found by the strings before it alone."""
    memo: dict[object, object] = {}
    stack: list[object] = []
    found = []
    for op, arg, _ in pickletools.genops(pickled):
        if op.name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
        elif op.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(arg))
        elif op.name == "BINPERSID":
            found.append(stack[-3])  # then numel and TUPLE
        else:
            stack.append(arg if op.name == "BINUNICODE" else op.name)
    return [str(each) for each in found]


@pytest.mark.sample(12)
@pytest.mark.parametrize("tag", ["cpu", "cuda:0", "cuda:3"])
@pytest.mark.parametrize("name", SCRIPT_MAKERS)
def test_torch_reads_what_is_expected(name: str, tag: str, tmp_path: Path) -> None:
    expected = SCRIPT_MAKERS[name](path := tmp_path / "made.pt", tag)
    assert_sound_zip(path)
    loaded: Any = torch.jit.load(path, map_location="cpu")
    for at, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
        assert raw(tensor.untyped_storage()) == expected.storages[at], at
    example = INPUTS.get(name, torch.ones(2, 3))
    if tag == "cpu" or name not in ON_DEVICE:
        assert loaded(example).shape == example.shape
    else:
        with pytest.raises((RuntimeError, NotImplementedError), match="CUDA"):
            loaded(example)
    inside = records(path)
    tags = {each for key in PICKLES for each in locations(inside.get(f"{key}.pkl", b"N."))}
    assert tags == set(expected.devices.values())


@pytest.mark.parametrize("name", SCRIPT_MAKERS)
def test_storages_are_those_in_the_file(name: str, tmp_path: Path) -> None:
    expected = SCRIPT_MAKERS[name](path := tmp_path / "made.pt", "cuda:0")
    stored = {
        data for at, data in records(path).items() if re.match(r"(data|constants|traced_.*)/\d", at)
    }
    assert set(expected.storages.values()) == stored


@pytest.mark.parametrize("name", SCRIPT_MAKERS)
def test_cuda_is_missed_where_it_is_named(name: str, tmp_path: Path) -> None:
    SCRIPT_MAKERS[name](path := tmp_path / "made.pt", "cuda:0")
    with pytest.raises((RuntimeError, NotImplementedError), match="CUDA"):
        torch.jit.load(path)


@pytest.mark.parametrize("name", SCRIPT_MAKERS)
def test_devices_elsewhere(name: str, tmp_path: Path) -> None:
    expected = SCRIPT_MAKERS[name](path := tmp_path / "made.pt", "cuda:3")
    code = b"".join(data for at, data in records(path).items() if at.endswith(".py"))
    in_code = [each.decode() for each in re.findall(rb'torch\.device\("([^"]+)"\)', code)]
    assert Counter(in_code) <= Counter(expected.elsewhere or ())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCRIPT_MAKERS)
def test_retagged_and_relaid_with_nothing_changed(name: str, tmp_path: Path) -> None:
    SCRIPT_MAKERS[name](path := tmp_path / "made.pt", "cpu")
    before = path.read_bytes()
    relay(path, lambda _, data: data)
    assert path.read_bytes() == before
    for at, data in records(path).items():
        if at.removesuffix(".pkl") in PICKLES:
            tags = iter(locations(data))
            assert retag(data, lambda _, tags=tags: next(tags)) == data  # type: ignore[misc]


@pytest.mark.parametrize("name", ["lite", "lite_with_debug_info"])
def test_the_mobile_interpreter_runs(name: str, tmp_path: Path) -> None:
    SCRIPT_MAKERS[name](path := tmp_path / "made.ptl", "cuda:0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = _load_for_lite_interpreter(str(path), map_location="cpu")
    assert loaded(torch.ones(2, 3)).shape == (2, 3)
    assert locations(records(path)["bytecode.pkl"]) == []


def test_what_stays_on_the_cpu_is_what_is_said(tmp_path: Path) -> None:
    expected = SCRIPT_MAKERS["scripted_mixed"](path := tmp_path / "made.pt", "cuda:0")
    inside = records(path)
    assert locations(inside["data.pkl"])[0] == "cpu"
    assert set(locations(inside["data.pkl"])[1:]) == {"cuda:0"}
    assert inside["data/0"] == expected.storages["shift"]
    assert [at for at, device in expected.devices.items() if device == "cpu"] == ["shift"]
