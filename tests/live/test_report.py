"""What a report of a living model lists, against what torch itself counts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmove
from tests.conftest import ROOT
from tests.making.living import (
    LanguageModel,
    entries,
    nbytes,
    registered,
    stepped,
)

# -- what is listed --------------------------------------------------------------------------------


def test_totals_are_what_torch_counts() -> None:
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    report = ckptmove.report(model, optimizer)
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [t for slots in optimizer.state.values() for t in slots.values()]
    held = [*parameters, *model.buffers(), *gradients, *state]
    assert report.nbytes == nbytes(held) == sum(s.nbytes for s in report.storages.values())
    assert report.sections["optimizer"].nbytes == nbytes(state)
    assert report.sections["model"].nbytes == nbytes([*parameters, *model.buffers(), *gradients])
    assert report.devices["cpu"].storages == len({t.untyped_storage()._cdata for t in held})
    assert (report.path, report.format, report.verdict) == (
        "LanguageModel",
        "live model",
        "uniform cpu",
    )
    assert report.warnings == ()


def test_names_are_those_of_the_state_dict() -> None:
    model = LanguageModel(3)
    report = ckptmove.report(model)
    assert registered(report) == list(model.state_dict())
    assert list(entries(report, "buffer that is not saved")) == ["pos"]
    head = entries(report, "parameter")["head.weight"]
    assert (head.shared_with, head.storage) == (
        ("embed.weight",),
        entries(report, "parameter")["embed.weight"].storage,
    )


def test_a_file_and_a_model_are_told_alike(tmp_path: Path) -> None:
    model = LanguageModel(2)
    model.register_buffer("view", model.get_buffer("layers.0.norm.running_mean")[1:])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    told = ckptmove.report(model).to_json()
    said = ckptmove.inspect(tmp_path / "model.pt").to_json()
    assert set(told) == set(said)
    common = (
        *("name", "section", "layout", "dtype", "shape", "stride", "offset", "device"),
        *("nbytes", "part_of", "shared_with", "role"),
    )
    ours = [e for e in told["tensors"] if e["held"] in ("parameter", "buffer")]
    assert [{k: e[k] for k in common} for e in ours] == [
        {k: e[k] for k in common} for e in said["tensors"]
    ]
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    pos = model.get_buffer("pos").nbytes
    assert sum(t["nbytes"] for t in told["devices"].values()) - pos == sum(
        t["nbytes"] for t in said["devices"].values()
    )
    assert {e["held"] for e in said["tensors"]} == {None}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_of_an_optimizer_is_named_by_its_parameter(momentum: float) -> None:
    model = LanguageModel(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    stepped(model, optimizer)
    state = entries(ckptmove.report(model, optimizer), "optimizer state")
    names = [name for name, _ in model.named_parameters()]
    wanted = [f"optimizer.state.{name}.momentum_buffer" for name in names] if momentum else []
    assert list(state) == wanted
    assert [each.state_key for each in state.values()] == (names if momentum else [])


def test_steps_and_hyper_parameters_play_their_roles() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = {e.name: e for e in ckptmove.report(model, optimizer).tensors}
    assert str(found["optimizer.state.weight.step"].role) == "optimizer step"
    assert found["optimizer.state.weight.exp_avg"].role is None
    rate = found["optimizer.param_groups.0.lr"]
    assert (rate.held, str(rate.role)) == ("hyper-parameter", "optimizer hyper-parameter")
    assert ckptmove.report(model, optimizer).capturable == ()
    optimizer.param_groups[0]["capturable"] = True
    report = ckptmove.report(model, [optimizer, torch.optim.SGD(model.parameters())])
    assert report.capturable == ("optimizer.0",)
    assert {e.role for e in entries(report, "optimizer state").values()} == {None}


def test_other_models_are_named_by_their_keyword() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    both = [*model.parameters(), *other.parameters()]
    optimizer = torch.optim.SGD(both, momentum=0.9)
    (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    report = ckptmove.report(model, optimizer, batch=[torch.ones(2)], ema=other)
    found = {e.name: e for e in report.tensors}
    assert found["ema.weight"].state_key == "weight"
    assert found["optimizer.state.ema.weight.momentum_buffer"].state_key == "weight"
    assert (found["batch.0"].held, found["batch.0"].state_key) == ("batch", None)
    assert report.warnings == ()


def test_values_that_name_devices_are_told() -> None:
    model = nn.Linear(2, 2)
    model.device = "cuda:0"  # type: ignore[assignment]  # as users do
    model.other = torch.device("cpu")  # type: ignore[assignment]  # as users do
    told = [(v.name, v.value, v.kind) for v in ckptmove.report(model).values_naming_devices]
    assert told == [("device", "cuda:0", "str"), ("other", "cpu", "torch.device")]


def test_a_module_under_two_names_is_an_alias() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    act = nn.ReLU()
    model = nn.ModuleDict({"a": inner, "act": act, "b": nn.Sequential(act, inner)})
    report = ckptmove.report(model)
    assert [tuple(each) for each in report.aliases] == [("b.1", "a")]
    assert registered(report) == list(model.state_dict())
    assert report.nbytes == nbytes(model.parameters())


# -- what it costs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_copied() -> None:
    script = """
import resource, torch, ckptmove
from torch import nn
model = nn.Linear(8192, 8192, bias=False)
sparse = nn.Linear(1, 1)
sparse.big = nn.Parameter(model.weight.detach().view(64, -1).to_sparse())
ckptmove.report(nn.Linear(1, 1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ckptmove.report(nn.ModuleList([model, sparse]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        check=True,
    )
    assert int(done.stdout) < 32 * 1024  # kB


@pytest.mark.slow
def test_a_report_keeps_no_tensor_alive() -> None:
    model = LanguageModel(1)
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    report = ckptmove.report(model, optimizer)
    gone: list[Any] = [weakref.ref(model), weakref.ref(model.embed.weight), weakref.ref(optimizer)]
    gone += [weakref.ref(t) for slots in optimizer.state.values() for t in slots.values()]
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert "embed" in str(report)
