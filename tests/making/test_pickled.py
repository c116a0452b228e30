"""Plain pickles, read by pickle."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.making.expected import having_every_device, storage_bytes
from tests.making.pickled import PICKLED_MAKERS


def unfolded(value: Any) -> Any:
    """The value with nested checkpoints loaded from their bytes."""
    if isinstance(value, dict):
        return {key: unfolded(each) for key, each in value.items()}
    if isinstance(value, bytes) and value[:2] == b"PK":
        return torch.load(io.BytesIO(value), weights_only=False)
    if isinstance(value, bytes) and value[:4] == b"\x80\x02\x8a\x0a":
        return torch.load(io.BytesIO(value), weights_only=False)
    if isinstance(value, bytes) and value[:1] == b"\x80" and value[-1:] == b".":
        return unfolded(pickle.loads(value))
    return value


@pytest.mark.sample(20)
@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("name", PICKLED_MAKERS)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code", "ignore:source code of class")
def test_pickle_reads_what_is_expected(name: str, tag: str, tmp_path: Path) -> None:
    expected = PICKLED_MAKERS[name](path := tmp_path / "made.pkl", tag)
    if not expected.readable:
        return
    with having_every_device() as restored, path.open("rb") as file:
        loaded = pickle.load(file, encoding="bytes" if name.startswith("python2") else "ASCII")
        if name.startswith("python2"):
            loaded = {key.decode(): value for key, value in loaded.items()}
        if name.startswith("nested"):
            loaded = unfolded(loaded)
    assert restored.devices(loaded) == expected.devices
    assert storage_bytes(loaded) == expected.storages


def test_sharing_is_lost(tmp_path: Path) -> None:
    PICKLED_MAKERS["shared"](path := tmp_path / "made.pkl", "cpu")
    loaded: Any = pickle.loads(path.read_bytes())
    assert loaded["again"] is loaded["base"]
    assert loaded["view"].untyped_storage().data_ptr() != loaded["base"].data_ptr()
    assert loaded["view"].untyped_storage().nbytes() == 40
