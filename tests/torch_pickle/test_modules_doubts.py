"""Whole modules whose state dict no file tells: that is said, and no name is made up."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmove import RefusedError, convert, inspect
from tests.conftest import RunCli

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def saved(module: nn.Module, folder: Path) -> Path:
    torch.save(module, path := folder / "module.pt")
    return path


def test_lazy_parameters_without_values_are_named(tmp_path: Path, run_cli: RunCli) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    path = saved(module, tmp_path)
    (said,) = inspect(path).warnings
    assert said.startswith("lazy modules have no values yet")
    assert said.endswith(": 1.weight, 1.bias, 1.running_mean and 3 more")
    for options in (["--select", "model"], ["--preset", "hf"], ["--bare"]):
        done = run_cli("convert", "module.pt", "o.safetensors", "--force", *options, exit=0)
        assert done.stderr.count("lazy modules have no values yet") == 1
    module(torch.ones(4, 2))
    assert not inspect(saved(module, tmp_path)).warnings


def add_more(module: nn.Module, state: dict[str, Any], prefix: str, about: object) -> None:
    state[f"{prefix}more"] = torch.ones(1)


def test_hooks_of_state_dicts_are_named(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not inspect(saved(module, tmp_path)).warnings
    module[1]._register_state_dict_hook(add_more)
    path = saved(module, tmp_path)
    assert inspect(path).warnings == ("hooks may change the names in the state dict of 1",)
    report = convert(path, tmp_path / "o.pt", select="model")
    assert report.warnings == inspect(path).warnings
    module._register_state_dict_hook(add_more)
    (said,) = inspect(saved(module, tmp_path)).warnings
    assert said == "hooks may change the names in the state dict of the whole model, 1"


def test_spectral_norm_only_notes_its_version(tmp_path: Path) -> None:
    module = nn.utils.spectral_norm(nn.Linear(2, 2))
    assert module._state_dict_hooks
    assert not inspect(saved(module, tmp_path)).warnings


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_modules_have_no_names_made_up(tmp_path: Path) -> None:
    quantization = torch.ao.quantization
    dynamic = quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    path = saved(dynamic, tmp_path)
    assert not [entry for entry in inspect(path).tensors if entry.state_key is not None]
    assert any("have no names of a state dict: 0" in each for each in inspect(path).warnings)
    with pytest.raises(RefusedError, match="it holds no weights of a model") as refused:
        convert(path, tmp_path / "o.pt", select="model")
    assert "in a special form" in str(refused.value.hint)
    static: Any = nn.Sequential(quantization.QuantStub(), nn.Conv2d(1, 2, 1)).eval()
    static.qconfig = quantization.default_qconfig
    quantization.prepare(static, inplace=True)
    static(torch.ones(1, 1, 2, 2))
    path = saved(quantization.convert(static), tmp_path)
    named = [entry.name for entry in inspect(path).tensors if not entry.beside]
    assert named == ["0.scale", "0.zero_point"]
    assert any("have no names of a state dict: 0, 1" in e for e in inspect(path).warnings)
