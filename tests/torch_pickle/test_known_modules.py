"""torch's own modules are known; what else lies in its rooms, or is called, is not."""

from __future__ import annotations

import copyreg
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.backends.thnn import _get_thnn_function_backend
from torch.optim.swa_utils import AveragedModel

from ckptmove import convert, diff, inspect
from ckptmove.torch_pickle.callables.allowlist import MODULES
from tests.making.modules import TinyNet


def saved(content: object, folder: Path, protocol: int = 2) -> Path:
    torch.save(content, path := folder / "net.pt", pickle_protocol=protocol)
    return path


def test_they_are_those_of_torch() -> None:
    """But for what is no class of its own, or calls something when it is made."""
    theirs = {getattr(nn.modules, name) for name in nn.modules.__all__}
    modules = {each for each in theirs if issubclass(each, nn.Module)}
    known = {f"{each.__module__}.{each.__qualname__}" for each in modules}
    left_out = {"container.Container", "loss.NLLLoss2d"}
    newer = {name for name in known - MODULES if name.endswith("LinearCrossEntropyLoss")}
    assert known - MODULES - newer == {f"torch.nn.modules.{name}" for name in left_out} & known
    for name in MODULES:
        module, _, kind = name.rpartition(".")
        found = getattr(pytest.importorskip(module), kind, nn.Module)
        assert issubclass(found, nn.Module)
        assert found.__new__ is object.__new__


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_model_of_them_names_no_unknown_callable(protocol: int, tmp_path: Path) -> None:
    layers = [nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU(), nn.LSTM(2, 2), nn.Embedding(2, 2)]
    path = saved(
        nn.Sequential(*layers, nn.ModuleList([nn.MultiheadAttention(2, 1)])), tmp_path, protocol
    )
    assert inspect(path).unknown_callables == ()
    path = saved({"model": TinyNet(), "norm": nn.LayerNorm}, tmp_path)
    assert inspect(path).unknown_callables == ("tests.making.modules.TinyNet",)


@pytest.mark.parametrize(
    "content",
    [
        nn.DataParallel(nn.Linear(2, 2)),
        AveragedModel(nn.Linear(2, 2)),
        nn.TransformerEncoderLayer(2, 1, 2, activation="relu"),
        nn.TransformerEncoderLayer(2, 1, 2, activation="gelu"),
        {"shape": (..., NotImplemented)},
    ],
)
def test_what_torch_saves_around_modules_and_in_them_is_known(
    content: object, tmp_path: Path
) -> None:
    """And so it converts there and back without a word of trust."""
    path = saved(content, tmp_path)
    assert inspect(path).unknown_callables == ()
    convert(path, tmp_path / "there.safetensors")
    convert(tmp_path / "there.safetensors", tmp_path / "back.pt")
    assert diff(path, tmp_path / "back.pt").equal


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_hook_that_normalizes_weights_is_known(tmp_path: Path) -> None:
    path = saved(nn.utils.weight_norm(nn.Linear(2, 2)), tmp_path)
    assert inspect(path).unknown_callables == ()


class Called:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, Any]:
        return self.function, self.args


@pytest.mark.parametrize(
    "call",
    [
        Called(nn.Linear, 2, 2),
        Called(nn.Sequential),
        Called(nn.modules.module._addindent, "a", 2),
        Called(torch.hub.load, "a", "b"),
        Called(nn.functional.relu, 1),
        Called(_get_thnn_function_backend, 1),
        Called(nn.modules.module.register_module_forward_hook, print),
    ],
)
def test_what_is_called_is_unknown(call: Called, tmp_path: Path) -> None:
    (path := tmp_path / "call.pkl").write_bytes(pickle.dumps({"x": torch.ones(1), "y": call}))
    named = f"{call.function.__module__}.{call.function.__qualname__}"
    assert named in inspect(path).unknown_callables


def test_the_backend_that_old_modules_name_is_known(tmp_path: Path) -> None:
    """Modules saved whole by torch up to 1.4 ask for it; a call of it gives None today."""
    content = {"x": torch.ones(1), "_backend": Called(_get_thnn_function_backend)}
    assert inspect(saved(content, tmp_path)).unknown_callables == ()


class Updated:
    """Pickles as a module whose state is no dict, and is asked for what it maps."""

    __class__ = property(lambda self: nn.Identity)  # as pickle checks

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (nn.Identity,), self.state  # type: ignore[attr-defined]


def test_a_state_that_is_no_dict_is_a_misuse(tmp_path: Path) -> None:
    """A `ParameterDict` looks keys up as attributes: so it would hand out its own methods."""
    keys = nn.ParameterDict()
    keys.__dict__["_keys"] = {"__init__": None}
    path = saved(Updated(keys), tmp_path)
    made = torch.load(path, weights_only=False)
    assert "__globals__" in dir(made.__dict__["__init__"].__func__)
    assert inspect(path).unknown_callables == ("torch.nn.modules.linear.Identity",)
