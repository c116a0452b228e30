"""Checkpoints of training frameworks, relocated: the frameworks load them and train on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from ckptmove import inspect, relocate
from tests.making.checkpoints import (
    MAKERS,
    hf_trainer_folder,
    kept_on_cpu,
    lightning_checkpoint,
    save,
)
from tests.making.frameworks import lightning_trainer, regression, resumed_trainer
from tests.making.modules import TinyNet
from tests.making.training import step
from tests.oracles.readers import assert_same_checkpoint, labels, load, pid_locations


def cannot_load(path: Path) -> bool:
    """Whether torch refuses a file here for the device it names."""
    try:
        load(path, weights_only=False, map_location=None)
    except RuntimeError as error:
        return "Attempting to deserialize object on a CUDA device" in str(error)
    return False


@pytest.mark.slow
def test_a_hugging_face_trainer_resumes(tmp_path: Path) -> None:
    folder = hf_trainer_folder(tmp_path / "run", "cuda:0")
    assert cannot_load(folder / "optimizer.pt")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        source = (folder / name).rename(tmp_path / name)
        relocate(source, folder / name, to="cpu")
        assert_same_checkpoint(source, folder / name, {"cuda:0": "cpu"}, trust=True)
    assert not cannot_load(folder / "optimizer.pt")

    trainer = resumed_trainer(folder, tmp_path / "more", 3)
    steps = {int(state["step"]) for state in trainer.optimizer.optimizer.state.values()}
    assert steps == {3}


def test_lightning_resumes(tmp_path: Path) -> None:
    source = lightning_checkpoint(tmp_path / "last.ckpt", "cuda:0")
    assert cannot_load(source)
    relocate(source, tmp_path / "moved.ckpt", to="cpu")
    assert_same_checkpoint(source, tmp_path / "moved.ckpt", {"cuda:0": "cpu"}, trust=True)
    lightning: Any = pytest.importorskip("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning_trainer(lightning, max_steps=3, default_root_dir=tmp_path)
        inputs = torch.utils.data.TensorDataset(torch.randn(8, 3))
        loader = torch.utils.data.DataLoader(inputs)
        trainer.fit(regression(lightning), loader, ckpt_path=str(tmp_path / "moved.ckpt"))
    assert trainer.global_step == 3
    (optimizer,) = trainer.optimizers
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_lightning_for_another_gpu(tmp_path: Path) -> None:
    source = lightning_checkpoint(tmp_path / "last.ckpt", "cuda:0")
    out = tmp_path / "moved.ckpt"
    report = relocate(source, out, to="cuda:1")
    assert [value.name for value in report.values_naming_devices] == [
        "hyper_parameters.device_name"
    ]
    on_cpu = {name for name, device in labels(out).items() if device == "cpu"}
    assert on_cpu == {f"optimizer_states.0.state.{n}.step" for n in range(2)}
    assert {location for _, location in pid_locations(out)} == {"cuda:1", "cpu"}


@pytest.mark.parametrize(
    "kind", [optim.AdamW, optim.NAdam, optim.ASGD, optim.Adagrad, optim.RMSprop]
)
def test_plain_training_resumes_as_if_it_had_never_stopped(
    kind: type[optim.Optimizer], tmp_path: Path
) -> None:
    def started() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        net = TinyNet()
        make: Any = kind
        return net, make(net.parameters(), lr=0.01)

    net, optimizer = started()
    step(net, optimizer)
    saved = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    source = save(tmp_path / "made.pt", saved, "cuda:7", keep_cpu=kept_on_cpu(saved))
    step(net, optimizer)

    relocate(source, tmp_path / "moved.pt", to="cpu")
    again, resumed = started()
    loaded: Any = load(tmp_path / "moved.pt", weights_only=True, map_location=None)
    again.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["rng"])
    step(again, resumed)
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_mesh_of_one_process_trains_on(tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", MAKERS["dtensor_state_dict"](), "cuda:0")
    assert "cuda:0" in inspect(source).devices
    relocate(source, tmp_path / "moved.pt", to="cpu")
    loaded: Any = load(tmp_path / "moved.pt", weights_only=False, map_location=None)
    assert loaded["weight"].device_mesh.device_type == "cpu"
    assert loaded["weight"].to_local().shape == (4, 2)
