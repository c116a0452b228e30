"""Folders that training frameworks save, written by the frameworks themselves.

`FOLDERS[name](directory, tag)` makes one below `directory`, as a machine whose device has that tag
would have, and gives what its users name. `GOES_ON[name]` has the library train on from one.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from tests.making.frameworks import (
    library,
    lightning_trainer,
    net_and_optimizer,
    on_the_host_if_fused,
    regression,
    saving,
    tiny_gpt2,
    trainer_arguments,
)
from tests.making.libraries import (
    deepspeed_goes_on,
    deepspeed_zero0,
    fairseq_goes_on,
    fairseq_run,
    meta_consolidated,
    meta_goes_on,
    mmengine_goes_on,
    mmengine_run,
    torchtune_goes_on,
    torchtune_run,
)

Maker = Callable[[Path, str], Path]

_SEED = 7


# Hugging Face: Trainer


def _trainer(directory: Path, steps: int) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = trainer_arguments(
        transformers, directory, max_steps=steps, save_steps=2, seed=_SEED
    )
    tokens = [{"input_ids": [(n + k) % 16 for k in range(8)]} for n in range(16)]
    rows = [{**each, "labels": each["input_ids"]} for each in tokens]
    return transformers.Trainer(tiny_gpt2(transformers), arguments, train_dataset=rows)


def trainer_run(directory: Path, tag: str, steps: int = 4) -> Path:
    """The folder of a run of the Trainer, with `checkpoint-2` and `checkpoint-4` in it."""
    with saving(tag, on_the_host_if_fused):  # which the Trainer's is by default
        _trainer(directory, steps).train()
    return directory


def trainer_checkpoint(directory: Path, tag: str) -> Path:
    """The `checkpoint-2` of a run of the Trainer."""
    return trainer_run(directory, tag, steps=2) / "checkpoint-2"


def trainer_goes_on(folder: Path, scratch: Path) -> Mapping[str, object]:
    """What the Trainer has after two more steps from a `checkpoint-2`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = _trainer(scratch, 4)
        trainer.train(resume_from_checkpoint=str(folder))
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "steps": trainer.state.global_step,
        "random": torch.rand(2),
    }


# accelerate


class _Count:
    """The user's own state."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3)

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, "device": "cuda:0"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class _Accelerated:
    """A tiny training with accelerate."""

    def __init__(self, scratch: Path) -> None:
        accelerate: Any = pytest.importorskip("accelerate")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        config = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
        self.it = accelerate.Accelerator(cpu=True, project_dir=scratch, dataloader_config=config)
        accelerate.utils.set_seed(_SEED)
        model, self.count = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), _Count()
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        data: Any = torch.arange(24.0).reshape(8, 3)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        prepared = self.it.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.it.register_for_checkpointing(self.count)

    def epoch(self) -> None:
        for batch in self.loader:
            noisy = self.model(batch + torch.rand(3) + random.random() + np.random.rand())
            self.it.backward(noisy.square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.count.seen += batch.sum()


def accelerate_state(directory: Path, tag: str) -> Path:
    """What `save_state` of accelerate writes."""
    training = _Accelerated(directory)
    training.epoch()
    with saving(tag):
        training.it.save_state(str(directory / "state"))
    return directory / "state"


def accelerate_goes_on(folder: Path, scratch: Path) -> Mapping[str, object]:
    """What there is after `load_state` and another epoch."""
    training = _Accelerated(scratch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.it.load_state(str(folder))
    training.epoch()
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.schedule.state_dict(),
        "count": training.count.seen,
        "random": torch.rand(2),
    }


# Lightning


def lightning_run(directory: Path, tag: str) -> Path:
    """The folder of a version of a Lightning run: `checkpoints/`, `hparams.yaml`, `metrics.csv`."""
    lightning: Any = pytest.importorskip("lightning")
    with saving(tag):
        logger = lightning.pytorch.loggers.CSVLogger(directory)
        trainer = lightning_trainer(
            lightning, max_steps=2, logger=logger, enable_checkpointing=True
        )
        torch.manual_seed(_SEED)
        inputs = torch.utils.data.TensorDataset(torch.randn(8, 3))
        trainer.fit(regression(lightning), torch.utils.data.DataLoader(inputs))
    return Path(trainer.logger.log_dir)


def lightning_goes_on(folder: Path, scratch: Path) -> Mapping[str, object]:
    """What Lightning has after two more steps from the checkpoint of such a folder."""
    lightning: Any = pytest.importorskip("lightning")
    (checkpoint,) = (folder / "checkpoints").iterdir()
    torch.manual_seed(_SEED)
    inputs = torch.utils.data.TensorDataset(torch.arange(24.0).view(8, 3) / 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning_trainer(lightning, max_steps=4, default_root_dir=scratch)
        model = regression(lightning)
        trainer.fit(model, torch.utils.data.DataLoader(inputs), ckpt_path=checkpoint)
    return {
        "model": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "steps": trainer.global_step,
        "random": torch.rand(2),
    }


# poutyne


def _poutyne() -> tuple[Any, Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The library, a tiny model of its kind, and what it is fed in an epoch."""
    poutyne: Any = pytest.importorskip("poutyne")
    torch.manual_seed(_SEED)
    net = nn.Linear(3, 2)
    optimizer = optim.AdamW(net.parameters())
    inputs = torch.arange(12.0).view(4, 3) / 12
    return poutyne, poutyne.Model(net, optimizer, "mse"), [(inputs, torch.ones(4, 2))] * 2


def poutyne_experiment(directory: Path, tag: str) -> Path:
    """What `Experiment` of poutyne saves, under its names; by its callbacks, as it needs pandas."""
    poutyne, model, batches = _poutyne()
    folder = directory / "run"
    folder.mkdir()
    start = f"{folder}/checkpoint"
    saved = [
        poutyne.ModelCheckpoint(f"{start}.ckpt"),
        poutyne.OptimizerCheckpoint(f"{start}.optim"),
        poutyne.RandomStatesCheckpoint(f"{start}.randomstate"),
    ]
    with saving(tag):
        model.fit_generator(batches, epochs=1, callbacks=saved, verbose=False)
    return folder


def poutyne_goes_on(folder: Path, scratch: Path) -> Mapping[str, object]:
    """What poutyne has after another epoch from such a folder."""
    poutyne, model, batches = _poutyne()
    torch.manual_seed(_SEED + 1)
    model.load_weights(f"{folder}/checkpoint.ckpt")
    model.load_optimizer_state(f"{folder}/checkpoint.optim")
    poutyne.load_random_states(f"{folder}/checkpoint.randomstate")
    model.fit_generator(batches, epochs=1, verbose=False)
    return {
        "model": model.network.state_dict(),
        "optimizer": model.optimizer.state_dict(),
        "random": torch.rand(2),
    }


# ignite


def _ignite(directory: Path) -> tuple[Any, dict[str, Any], list[torch.Tensor]]:
    """An engine of ignite that trains, what it saves all of, and an epoch of data."""
    engine_of: Any = pytest.importorskip("ignite.engine")
    net, optimizer = net_and_optimizer()

    def step(engine: Any, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(batch + torch.rand(3)).square().mean().backward()
        optimizer.step()

    trainer = engine_of.Engine(step)
    return trainer, {"model": net, "optimizer": optimizer, "trainer": trainer}, [torch.ones(2, 3)]


def ignite_run(directory: Path, tag: str) -> Path:
    """What `Checkpoint` of ignite saves through a DiskSaver: all of it, and the best model."""
    trainer, parts, data = _ignite(directory)
    from ignite.engine import Events
    from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine

    folder = directory / "run"
    saver = DiskSaver(folder, create_dir=True, require_empty=False)
    step = global_step_from_engine(trainer)
    everything = Checkpoint(parts, saver, filename_prefix="training", global_step_transform=step)
    best = Checkpoint(
        {"model": parts["model"]},
        saver,
        filename_prefix="best",
        score_function=lambda engine: 0.5,
        score_name="score",
        global_step_transform=step,
    )
    for handler in (everything, best):
        trainer.add_event_handler(Events.COMPLETED, handler)
    with saving(tag):
        trainer.run(data * 4, max_epochs=1)
    return folder


def ignite_goes_on(folder: Path, scratch: Path) -> Mapping[str, object]:
    """What ignite has after another epoch from such a folder."""
    trainer, parts, data = _ignite(scratch)
    from ignite.handlers import Checkpoint

    saved = torch.load(folder / "training_checkpoint_1.pt", weights_only=True)
    Checkpoint.load_objects(parts, saved)
    torch.manual_seed(_SEED)
    trainer.run(data * 4, max_epochs=2)
    assert trainer.state.epoch == 2
    return {name: each.state_dict() for name, each in parts.items()}


# timm


def _timm() -> tuple[Any, optim.Optimizer]:
    library("timm")
    torch.manual_seed(_SEED)
    model = library("timm").create_model("test_vit", num_classes=2)
    return model, optim.AdamW(model.parameters())


def _timm_step(model: Any, optimizer: optim.Optimizer) -> None:
    torch.manual_seed(_SEED)
    model(torch.rand(2, 3, 160, 160)).square().mean().backward()
    optimizer.step()


def timm_run(directory: Path, tag: str) -> Path:
    """What the `CheckpointSaver` of timm's training script writes."""
    model, optimizer = _timm()
    _timm_step(model, optimizer)
    folder = directory / "train"
    folder.mkdir(parents=True)
    saver = library("timm.utils").CheckpointSaver(
        model, optimizer, checkpoint_dir=str(folder), recovery_dir=str(folder)
    )
    with saving(tag):
        saver.save_checkpoint(0, 0.5)
    return folder


def timm_goes_on(folder: Path, scratch: Path) -> Mapping[str, object]:
    """What timm has after another step from such a folder."""
    model, optimizer = _timm()
    path = str(folder / "last.pth.tar")
    assert library("timm.models").resume_checkpoint(model, path, optimizer) == 1
    _timm_step(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


FOLDERS: Mapping[str, Maker] = {
    "trainer": trainer_checkpoint,
    "accelerate": accelerate_state,
    "lightning": lightning_run,
    "deepspeed": deepspeed_zero0,
    "meta": meta_consolidated,
    "mmengine": mmengine_run,
    "fairseq": fairseq_run,
    "ignite": ignite_run,
    "poutyne": poutyne_experiment,
    "timm_run": timm_run,
    "torchtune": torchtune_run,
}

#: What the library has after more steps from such a folder: (folder, scratch) → its state.
GOES_ON: Mapping[str, Callable[[Path, Path], Mapping[str, object]]] = {
    "trainer": trainer_goes_on,
    "accelerate": accelerate_goes_on,
    "lightning": lightning_goes_on,
    "poutyne": poutyne_goes_on,
    "ignite": ignite_goes_on,
    "deepspeed": deepspeed_goes_on,
    "fairseq": fairseq_goes_on,
    "meta": meta_goes_on,
    "mmengine": mmengine_goes_on,
    "timm_run": timm_goes_on,
    "torchtune": torchtune_goes_on,
}
