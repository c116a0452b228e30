"""Tars of torch 0.1, read by torch."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.making.expected import having_every_device, storage_bytes
from tests.making.tar import TAR_MAKERS


@pytest.mark.parametrize("tag", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", TAR_MAKERS)
def test_torch_reads_what_is_expected(name: str, tag: str, tmp_path: Path) -> None:
    expected = TAR_MAKERS[name](path := tmp_path / "made.pt", tag)
    with having_every_device() as restored:
        loaded = torch.load(path, weights_only=False)
    assert restored.devices(loaded) == expected.devices
    assert storage_bytes(loaded) == expected.storages
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["sys_info", "pickle", "tensors", "storages"]


def test_structure_survives(tmp_path: Path) -> None:
    TAR_MAKERS["state_dict"](path := tmp_path / "made.pt", "cpu")
    loaded: Any = torch.load(path, weights_only=False)
    assert loaded["model"]["weight"].data_ptr() == loaded["tied"]["weight"].data_ptr()
    assert isinstance(loaded["parameters"]["one"], nn.Parameter)
    assert loaded["epoch"] == 3


def test_views_share_memory(tmp_path: Path) -> None:
    TAR_MAKERS["storage_views"](path := tmp_path / "made.pt", "cpu")
    loaded: Any = torch.load(path, weights_only=False)
    loaded["root"][2] = 77
    assert loaded["part"].tolist() == [77, 3, 4, 5]
    assert loaded["of_hidden"].tolist() == [1, 2, 3]
