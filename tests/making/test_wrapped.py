"""Tensors that say a device themselves, read by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.making.expected import having_every_device, raw
from tests.making.subclasses import one_process_group
from tests.making.wrapped import WRAPPED_MAKERS, QuantizedTensor


def held(tensor: Any, name: str) -> dict[str, bytes]:
    """Name → bytes of the tensors that make up a tensor."""
    if isinstance(tensor, QuantizedTensor):
        parts = tensor.__tensor_flatten__()[0]
        return {f"{name}.{at}": raw(getattr(tensor, at).untyped_storage()) for at in parts}
    local = tensor.local_tensor() if hasattr(tensor, "local_tensor") else tensor
    return {name: raw(local.untyped_storage())}


ON_STORAGES = [(name, tag) for name in ("quantized", "sharded") for tag in ("cpu", "cuda:0")]
ON_NONE = [
    (name, tag) for name in ("storageless", "storageless_by_numpy") for tag in ("xla:0", "mtia:1")
]


@pytest.mark.parametrize(("name", "tag"), ON_STORAGES + ON_NONE)
def test_torch_reads_what_is_expected(name: str, tag: str, tmp_path: Path) -> None:
    expected = WRAPPED_MAKERS[name](path := tmp_path / "made.pt", tag)
    with having_every_device() as restored, one_process_group():
        where = "cpu" if name.startswith("storageless") else None
        loaded: Any = torch.load(path, weights_only=False, map_location=where)
    found = {at: data for name, each in loaded.items() for at, data in held(each, name).items()}
    assert found == expected.storages
    if where is None:
        tags = set(restored.tags.values())
        assert tags == set(expected.devices.values())


@pytest.mark.filterwarnings("ignore:Please use DTensor")
def test_devices_that_wrappers_say(tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    with having_every_device(), one_process_group():
        WRAPPED_MAKERS["quantized"](path, "cuda:1")
        assert str(torch.load(path, weights_only=False)["weight"].device) == "cuda:1"
    WRAPPED_MAKERS["sharded"](path, "cuda:1")
    with having_every_device(), one_process_group():
        tensor = torch.load(path, weights_only=False)["weight"]
    assert str(tensor.metadata().shards_metadata[0].placement) == "rank:0/cuda:1"
    assert str(tensor.device) == "cpu"


def test_storageless_needs_its_device(tmp_path: Path) -> None:
    WRAPPED_MAKERS["storageless"](path := tmp_path / "made.pt", "cuda:0")
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.load(path, weights_only=False)
