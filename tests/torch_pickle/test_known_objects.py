"""Objects of torch that people save whole are known, but only as pickle makes them."""

from __future__ import annotations

import copyreg
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributions, nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, SequentialSampler, Subset, TensorDataset

import ckptmove
from ckptmove.errors import UntrustedError

_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
_ADAM = "torch.optim.adam.Adam"


def _optimizer(name: str) -> torch.optim.Optimizer:
    layer = nn.Linear(3, 4)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1)
    if name not in ("LBFGS", "SparseAdam"):
        layer(torch.ones(1, 3)).sum().backward()
        made.step()
    return made


def _others() -> dict[str, Any]:
    sgd, data = _optimizer("SGD"), TensorDataset(torch.ones(3))
    normal = distributions.Normal(torch.zeros(2), torch.ones(2))
    return {
        "StepLR": lr_scheduler.StepLR(sgd, 1),
        "SequentialLR": lr_scheduler.SequentialLR(
            sgd, [lr_scheduler.ConstantLR(sgd), lr_scheduler.CosineAnnealingLR(sgd, 3)], [2]
        ),
        "GradScaler": torch.amp.GradScaler("cpu"),
        "Subset": Subset(data, [0]),
        "BatchSampler": BatchSampler(SequentialSampler(data), 1, drop_last=False),
        "Independent": distributions.Independent(normal, 1),
        "TransformedDistribution": distributions.TransformedDistribution(
            normal, [distributions.transforms.TanhTransform()]
        ),
    }


class _Newobj:
    """Pickled as an object of a class, with a state."""

    def __init__(self, cls: type, state: object, *args: object) -> None:
        self.parts = cls, state, args

    @property  # type: ignore[misc] # pickle compares the classes
    def __class__(self) -> type:
        return self.parts[0]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        cls, state, args = self.parts
        return copyreg.__newobj__, (cls, *args), state  # type: ignore[attr-defined]


def _unknown(saved: object, path: Path) -> tuple[str, ...]:
    torch.save({"w": torch.ones(1), "saved": saved}, path)
    return tuple(ckptmove.inspect(path).unknown_callables)


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_a_whole_optimizer_is_known(name: str, tmp_path: Path) -> None:
    assert _unknown(_optimizer(name), tmp_path / "x.pt") == ()
    ckptmove.relocate(tmp_path / "x.pt", tmp_path / "y.pt", to="cuda:0", strict=True)


@pytest.mark.parametrize("name", list(_others()))
def test_an_object_of_training_is_known(name: str, tmp_path: Path) -> None:
    assert _unknown(_others()[name], tmp_path / "x.pt") == ()


def _attributes(base: Any, **attributes: Any) -> Any:
    """A container with attributes, which a loader would call instead of its methods."""
    base.__dict__.update(attributes)
    return base


_GROUPS = [{"params": [], "lr": 1.0}]
_HOSTILE: dict[str, Any] = {
    "a method": {"_patch_step_function": nn.Linear},
    "defaults": {"defaults": SimpleNamespace(setdefault=nn.Linear)},
    "defaults with attributes": {"defaults": _attributes(OrderedDict(), setdefault=nn.Linear)},
    "state": {"state": SimpleNamespace(get=nn.Linear)},
    "state with attributes": {"state": _attributes(OrderedDict(), get=nn.Linear)},
    "state of objects": {"state": {0: SimpleNamespace(step=1)}},
    "another factory": {"state": defaultdict(list)},
    "groups": {"param_groups": SimpleNamespace()},
    "a group": {"param_groups": [SimpleNamespace(setdefault=nn.Linear)]},
    "parameters": {"param_groups": [{"params": SimpleNamespace()}]},
    "no dict": [1],
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_an_optimizer_with_another_state_is_unknown(name: str, tmp_path: Path) -> None:
    usual = {"defaults": {}, "state": defaultdict(dict), "param_groups": _GROUPS}
    assert _unknown(_Newobj(torch.optim.Adam, usual), tmp_path / "usual.pt") == ()
    hostile = _HOSTILE[name]
    state = {**usual, **hostile} if isinstance(hostile, dict) else hostile
    assert _ADAM in _unknown(_Newobj(torch.optim.Adam, state), tmp_path / "x.pt")
    with pytest.raises(UntrustedError):
        ckptmove.relocate(tmp_path / "x.pt", tmp_path / "y.pt", to="cuda:0", strict=True)


@pytest.mark.parametrize("cls", [torch.optim.Adam, lr_scheduler.StepLR, TensorDataset])
def test_a_known_object_made_with_arguments_is_unknown(cls: type, tmp_path: Path) -> None:
    made = _Newobj(cls, {}, torch.ones(1))
    name = f"{cls.__module__}.{cls.__name__}"
    assert name in _unknown(made, tmp_path / "x.pt")
