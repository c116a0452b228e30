"""Tensors that are loaded right from a header are those that are loaded from nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove.formats import loading

ODD = {
    "scalar": torch.tensor(-0.0),
    "byte": torch.arange(3, dtype=torch.uint8),  # after it, nothing is aligned
    "half": torch.full((2, 1, 3), float("nan"), dtype=torch.half),
    "complex": torch.ones(2, 2, dtype=torch.complex64),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([[True], [False]]),
    "unsigned": torch.ones(3, dtype=torch.uint16),
}


def bits(tensor: torch.Tensor) -> object:
    """All that there is to a tensor."""
    content = bytes(tensor.contiguous().reshape(-1).view(torch.uint8))
    storage = tensor.untyped_storage().nbytes(), tensor.storage_offset(), tensor.stride()
    return content, tensor.dtype, tensor.shape, storage, tensor.requires_grad, type(tensor)


@pytest.mark.parametrize("extra", [{}, {"empty": torch.zeros(0, 3)}], ids=["plain", "with empty"])
def test_loaded_from_the_header_or_from_nodes(
    extra: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({**ODD, **extra}, path)
    taken: list[bool] = []
    direct = loading._tensors_in

    def noted(*given: object) -> object:
        found = direct(*given)  # type: ignore[arg-type]
        taken.append(found is not None)
        return found

    monkeypatch.setattr(loading, "_tensors_in", noted)
    asked: list[str] = []
    loaded = ckptmove.load(path, map_location=lambda storage, tag: asked.append(tag))
    assert taken == [not extra]
    monkeypatch.setattr(loading, "_tensors_in", lambda *given: None)
    slowly, before = ckptmove.load(path), len(asked)
    theirs = load_file(path)
    assert type(loaded) is type(slowly) is dict
    assert list(loaded) == list(slowly)
    assert before == len(theirs)
    for name, tensor in theirs.items():
        assert bits(loaded[name]) == bits(slowly[name])
        assert bits(tensor)[:3] == bits(loaded[name])[:3]  # type: ignore[index]
    loaded["byte"][0] = 9
    assert load_file(path)["byte"][0] == 0
