"""Averages of weights as the libraries themselves save them; a test whose library is missing skips.

`test_weights` holds the shapes of these files, and needs no library.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim

from ckptmove import ConvertReport, convert, inspect
from tests.graph.test_weights import net, state

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of these libraries
]
State = dict[str, torch.Tensor]


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def taken(path: Path, weights: Any, **options: Any) -> tuple[State, ConvertReport]:
    """What a conversion to safetensors takes of a file, and its report."""
    out = path.with_name("out.safetensors")
    report = convert(path, out, weights=weights, bare=True, force=True, **options)
    return load_file(out), report


def assert_told_apart(path: Path, model: State, averages: State, named: tuple[str, str]) -> None:
    """Both presets take exactly these tensors, and say whose they are and what else is there."""
    for weights, expected, name, other in (
        ("model", model, named[0], named[1]),
        ("ema", averages, named[1], named[0]),
    ):
        found, report = taken(path, weights)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert report.weights is not None
        assert (report.weights["name"], report.weights["section"]) == (name, weights)
        assert [each["name"] for each in report.weights["others"]] == [other]


# -- Lightning -----------------------------------------------------------------------------------


def fitted(folder: Path, callback: str, **options: Any) -> Path:
    """The last checkpoint of a training with a callback that averages weights."""
    lightning = library("lightning")
    callbacks = lightning.pytorch.callbacks
    if not hasattr(callbacks, callback):
        pytest.skip(f"this Lightning has no {callback}")

    class Trained(lightning.LightningModule):  # type: ignore[name-defined]
        """A model with parameters and buffers, below a name of its own."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            """A loss."""
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> optim.Optimizer:
            """An optimizer."""
            return optim.Adam(self.parameters(), 0.1)

    saving = callbacks.ModelCheckpoint(dirpath=folder, filename="run", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[getattr(callbacks, callback)(**options), saving],
    )
    data: Any = torch.randn(8, 2)
    trainer.fit(Trained(), torch.utils.data.DataLoader(data, batch_size=4))
    return folder / "last.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("callback", ["WeightAveraging", "EMAWeightAveraging"])
def test_lightning_averages(callback: str, tmp_path: Path) -> None:
    path = fitted(tmp_path, callback)
    saved = torch.load(path, weights_only=False)
    model, averages = saved["current_model_state"], saved["state_dict"]
    assert not torch.equal(model["net.0.weight"], averages["net.0.weight"])
    assert_told_apart(path, model, averages, ("current_model_state", "state_dict"))
    for options, expected, name in (
        ({}, averages, "state_dict"),
        ({"weights": "ema"}, averages, "state_dict"),
        ({"weights": "model"}, model, "current_model_state"),
    ):
        report = convert(path, tmp_path / "o.pt", preset="lightning", force=True, **options)  # type: ignore[arg-type]
        assert report.weights is not None
        assert report.weights["name"] == name
        assert len(report.weights["others"]) == 1
        loaded = torch.load(tmp_path / "o.pt")
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_lightning_stochastic_weight_averaging(tmp_path: Path) -> None:
    path = fitted(tmp_path, "StochasticWeightAveraging", swa_lrs=0.1, swa_epoch_start=1)
    saved = torch.load(path, weights_only=False)
    callback = saved["callbacks"]["StochasticWeightAveraging"]
    averages = callback["average_model_state"]
    where = "callbacks.StochasticWeightAveraging.average_model_state"
    assert_told_apart(path, saved["state_dict"], averages, ("state_dict", where))
    report = convert(path, tmp_path / "o.pt", preset="lightning")
    assert report.weights is not None
    assert (report.weights["name"], report.weights["section"]) == ("state_dict", "model")
    assert [each["name"] for each in report.weights["others"]] == [where]


# -- others ----------------------------------------------------------------------------------------


def timm(path: Path) -> tuple[str, str]:
    utils = library("timm.utils")
    saver = utils.CheckpointSaver(
        model=net(1),
        optimizer=optim.SGD(net(1).parameters(), 0.1),
        args=Namespace(model="net"),
        model_ema=utils.ModelEmaV3(net(2)),
        checkpoint_dir=str(path.parent),
        recovery_dir=str(path.parent),
    )
    saver._save(str(path), 1)
    return "state_dict", "state_dict_ema"


def diffusers(path: Path) -> tuple[str, str]:
    ema = library("diffusers.training_utils").EMAModel(net(2).parameters())
    torch.save({"unet": net(1).state_dict(), "ema": ema.state_dict()}, path)
    return "unet", "ema.shadow_params"


def torch_ema(path: Path) -> tuple[str, str]:
    ema = library("torch_ema").ExponentialMovingAverage(net(2).parameters(), 0.9)
    torch.save({"model": net(1).state_dict(), "ema": ema.state_dict()}, path)
    return "model", "ema.shadow_params"


def ema_pytorch(path: Path) -> tuple[str, str]:
    ema = library("ema_pytorch").EMA(net(2))
    ema.online_model.load_state_dict(net(1).state_dict())
    torch.save({"ema": ema.state_dict()}, path)
    return "ema.online_model", "ema.ema_model"


@pytest.mark.parametrize("write", [timm, diffusers, torch_ema, ema_pytorch])
def test_libraries_of_averages(write: Callable[[Path], tuple[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    named = write(path)
    listed = write in (diffusers, torch_ema)  # a list of parameters: it has no buffers
    averages = (
        {key: each.detach() for key, each in net(2).named_parameters()} if listed else state(2)
    )
    assert_told_apart(path, state(1), averages, named)


@pytest.mark.parametrize(
    "write", [torch.save, lambda net, path: path.write_bytes(pickle.dumps(net))]
)
def test_skorch_keeps_its_model_in_bytes(write: Callable[..., None], tmp_path: Path) -> None:
    skorch, numpy = library("skorch"), library("numpy")
    trained = skorch.NeuralNetRegressor(
        nn.Linear, module__in_features=2, module__out_features=1, max_epochs=1, verbose=0
    )
    trained.fit(numpy.ones((10, 2), "f4"), numpy.ones((10, 1), "f4"))
    write(trained, tmp_path / "run.pkl")
    found, report = taken(tmp_path / "run.pkl", "model")
    expected = trained.module_.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert report.weights is not None
    assert report.weights["name"] == "__cuda_dependent_attributes__.module_"
    assert {entry.section for entry in inspect(tmp_path / "run.pkl").tensors} >= {"model"}
