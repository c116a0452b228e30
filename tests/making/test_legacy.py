"""Legacy streams, read by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.making.expected import having_every_device, storage_bytes
from tests.making.legacy import LEGACY_MAKERS
from tests.oracles.readers import load


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code", "ignore:source code of class")
@pytest.mark.sample(20)
@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("name", LEGACY_MAKERS)
def test_torch_reads_what_is_expected(name: str, tag: str, tmp_path: Path) -> None:
    expected = LEGACY_MAKERS[name](path := tmp_path / "made.pt", tag)
    assert expected.devices or not expected.storages
    if not expected.readable:
        return
    with having_every_device() as restored, path.open("rb") as file:
        file.seek(expected.start)
        loaded = torch.load(file, weights_only=False)
    assert restored.devices(loaded) == expected.devices
    assert storage_bytes(loaded) == expected.storages


def test_views_share_memory(tmp_path: Path) -> None:
    LEGACY_MAKERS["view_metadata"](path := tmp_path / "views.pt", "cuda:0")
    loaded: Any = load(path, weights_only=False)
    loaded["flat"][3] = 77
    assert loaded["left"][1, 1] == 77
    assert loaded["again"][0] == 77
    assert loaded["inside"].tolist() == [2, 3, 4]
    assert torch.equal(loaded["whole"], torch.tensor([[0.0, 2], [1, 3]]))
