"""What optimizers call their parameters: numbers for `load_state_dict`, or names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptmove
from ckptmove.errors import RefusedError
from tests.making.distributed import save_dcp
from tests.oracles.sameness import assert_same_tree


class Net(torch.nn.Module):
    """Two layers, a norm with buffers, and a head with the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.up = torch.nn.Linear(4, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.down = torch.nn.Linear(5, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(self.norm(self.up(self.embed(tokens)))))
        return found


def optimizer_of(net: Net, groups: int, lr: float = 0.01) -> torch.optim.Optimizer:
    params = dict(net.named_parameters())
    wide = [each for each in params.values() if each.ndim > 1]
    narrow = [each for each in params.values() if each.ndim == 1]
    if groups == 1:
        return torch.optim.AdamW(params.values(), lr=lr)
    divided: list[dict[str, Any]] = [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(divided, lr=lr)


def step(net: Net, optimizer: torch.optim.Optimizer, times: int) -> None:
    for n in range(times):
        tokens = torch.randint(6, (8,), generator=torch.Generator().manual_seed(n))
        net(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(groups: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizer_of(net, groups)
    step(net, optimizer, 2)
    return net, optimizer


def assert_goes_on(path: Path, net: Net, optimizer: torch.optim.Optimizer, groups: int) -> None:
    """A fresh model and optimizer take what is in a file, and ten steps are bit-equal."""
    loaded = torch.load(path, weights_only=True)
    fresh = Net()
    other = optimizer_of(fresh, groups, lr=0.9)
    fresh.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optim"])
    assert len(other.state_dict()["state"]) == len(optimizer.state_dict()["state"]) > 0
    step(net, optimizer, 10)
    step(fresh, other, 10)
    assert_same_tree(fresh.state_dict(), net.state_dict())
    assert_same_tree(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_names_become_numbers(flat: bool, groups: int, tmp_path: Path) -> None:
    net, optimizer = trained(groups)
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(net, optimizer, options=how)
    folder = save_dcp(tmp_path / "in", {"model": model, "optim": optim})
    report = ckptmove.convert(folder, tmp_path / "out.pt", optimizer_ids="int")
    assert any("2 groups" in each for each in report.warnings) == (flat and groups == 2)
    assert_goes_on(tmp_path / "out.pt", net, optimizer, groups)


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("named", [False, True])
def test_numbers_become_names(named: bool, groups: int, tmp_path: Path) -> None:
    """By the names that torch stores, or where shapes and order leave no choice; and back."""
    net, optimizer = trained(groups)
    saved: dict[str, Any] = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    names = {id(each): name for name, each in net.named_parameters()}
    if named:
        listed = zip(saved["optim"]["param_groups"], optimizer.param_groups, strict=True)
        for group, live in listed:
            group["param_names"] = [names[id(each)] for each in live["params"]]
    torch.save(saved, tmp_path / "in.pt")
    ckptmove.convert(
        tmp_path / "in.pt", tmp_path / "out", format="dcp", ranks=2, optimizer_ids="name"
    )
    expected: dict[str, Any] = dict(get_state_dict(net, optimizer)[1])
    found = ckptmove.load(tmp_path / "out")["optim"]
    assert set(found["state"]) == set(expected["state"])
    for name, state in expected["state"].items():
        assert_same_tree(found["state"][name], dict(state))
    params = [each["params"] for each in found["param_groups"]]
    assert params == [each["params"] for each in expected["param_groups"]]
    ckptmove.convert(tmp_path / "out", tmp_path / "back.pt", optimizer_ids="int")
    assert_goes_on(tmp_path / "back.pt", net, optimizer, groups)


def test_what_is_not_certain_is_refused(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    groups = [{"params": [net[0].weight]}, {"params": [net[1].weight]}]
    optimizer = torch.optim.Adam(groups)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "in.pt")
    for name in ("out", "out.safetensors"):
        with pytest.raises(RefusedError, match="names of 2 parameters of an optimizer can't be"):
            ckptmove.convert(
                tmp_path / "in.pt",
                tmp_path / name,
                format="dcp" if name == "out" else None,
                optimizer_ids="name",
            )
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "same.pt", optimizer_ids="int")
    assert_same_tree(
        torch.load(tmp_path / "same.pt")["optim"]["state"], optimizer.state_dict()["state"]
    )
    several = {"model": net.state_dict(), "teacher": net.state_dict()}
    torch.save(several | {"optim": optimizer.state_dict()}, tmp_path / "several.pt")
    with pytest.raises(RefusedError, match="it has no model beside it, or several"):
        ckptmove.convert(tmp_path / "several.pt", tmp_path / "a.pt", optimizer_ids="name")
    torch.save({"model": net.state_dict()}, tmp_path / "model.pt")
    report = ckptmove.convert(tmp_path / "model.pt", tmp_path / "m.pt", optimizer_ids="int")
    assert any("no optimizer was found" in each for each in report.warnings)
