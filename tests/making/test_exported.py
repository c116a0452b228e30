"""Exported programs, read by torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._export.serde import serialize
from torch.export.pt2_archive import _package
from torch.export.pt2_archive._package import load_pt2

from tests.making.expected import having_every_device, storage_bytes
from tests.making.exported import EXPORTED_MAKERS, everything, expect

ON_HOST = torch.device("cpu")


@contextmanager
def reading_devices() -> Iterator[list[str]]:
    """The devices in the JSON, all replaced by the CPU."""
    said: list[str] = []
    real = serialize.deserialize_device

    def deserialize_device(device: Any) -> torch.device:
        said.append(str(real(device)))
        return ON_HOST

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(logging.root.manager, "disable", logging.CRITICAL)
        for module in (serialize, _package):
            patch.setattr(module, "deserialize_device", deserialize_device)
        yield said


def read(path: Path) -> dict[str, Any]:
    with having_every_device():
        if "two" in path.stem:
            return load_pt2(path).exported_programs
        return {"model": torch.export.load(path)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tag", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("name", EXPORTED_MAKERS)
def test_torch_reads_what_is_expected(name: str, tag: str, tmp_path: Path) -> None:
    expected = EXPORTED_MAKERS[name](path := tmp_path / f"{name}.pt2", tag)
    if not expected.readable:
        return
    with reading_devices() as said:
        programs = read(path)
    found: dict[str, bytes] = {}
    for model, program in programs.items():
        prefix = "" if model == "model" else f"{model}."
        held = {**program.state_dict, **program.constants, "sample_inputs": program.example_inputs}
        found |= {prefix + at: data for at, data in storage_bytes(held).items()}
        if tag == "cpu" and name != "subclass":
            assert program.module()(torch.ones(2, 3)).shape == (2, 3)
    assert found == expected.storages
    assert set(said) == set(expected.devices.values()) | ({"cpu"} & set(expected.elsewhere or ()))


@pytest.mark.slow
def test_autocast_and_host_are_named() -> None:
    named = expect({"model": everything()}, "cuda:1").elsewhere or ()
    assert "cuda" in named
    assert named.count("cpu") == 1
