"""Folders that training frameworks save, all but a few written by the frameworks themselves.

`FOLDERS[name](directory, tag)` makes one below `directory`, as a machine whose device has that tag
would have, and gives what its users name. `GOES_ON[name]` has the library train on from one.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from tests.making.frameworks import regression, tiny_gpt2, trainer_arguments
from tests.making.saving import HOST_RNG_NBYTES, Keep, Storage, save, tagging

Maker = Callable[[Path, str], Path]

_SEED = 7


def _on_the_host(storage: Storage) -> bool:
    """Whether the tiny models below leave this on the CPU: 0-d steps and the RNG state."""
    return storage.nbytes() in (4, HOST_RNG_NBYTES)


def _on_the_host_if_fused(storage: Storage) -> bool:
    """As `_on_the_host` for a fused optimizer, whose steps are on the device."""
    return storage.nbytes() == HOST_RNG_NBYTES


@contextmanager
def _saving(tag: str, keep_cpu: Keep = _on_the_host) -> Iterator[None]:
    """What is saved meanwhile comes from a device with this tag."""
    with tagging(tag, keep_cpu), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
    with _saving(tag, _on_the_host_if_fused):  # which the Trainer's is by default
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
    with _saving(tag):
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
    with _saving(tag):
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=lightning.pytorch.loggers.CSVLogger(directory),
            enable_progress_bar=False,
            enable_model_summary=False,
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
        trainer = lightning.Trainer(
            max_steps=4,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=scratch,
        )
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
    with _saving(tag):
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


# Written here, as the sources of those that are too heavy to install say


def _net_and_optimizer() -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(_SEED)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def deepspeed_zero0(directory: Path, tag: str) -> Path:
    """DeepSpeed without ZeRO: one file has all (`runtime/engine.py`, `_save_checkpoint`)."""
    net, optimizer = _net_and_optimizer()
    folder = directory / "run"
    (folder / "global_step2").mkdir(parents=True)
    saved: dict[str, object] = {
        "module": net.state_dict(),
        "buffer_names": [],
        "optimizer": {"optimizer_state_dict": optimizer.state_dict()},
        "param_shapes": None,
        "lr_scheduler": {"last_batch_iteration": 1},
        "sparse_tensor_module_names": set[str](),
        "skipped_steps": 0,
        "global_steps": 2,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.17.1",
    }
    save(folder / "global_step2" / "mp_rank_00_model_states.pt", saved, tag, keep_cpu=_on_the_host)
    (folder / "latest").write_text("global_step2")
    (folder / "zero_to_fp32.py").write_text("# a script\n")
    return folder


def meta_consolidated(directory: Path, tag: str) -> Path:
    """Weights as Meta publishes them: a file for each of two tensor-parallel ranks."""
    folder = directory / "llama"
    folder.mkdir(parents=True)
    for rank in range(2):
        weights = {
            "tok_embeddings.weight": torch.full((8, 4), rank + 0.5, dtype=torch.bfloat16),
            "layers.0.attention.wq.weight": torch.full((4, 8), rank + 1.5, dtype=torch.bfloat16),
            "norm.weight": torch.ones(8, dtype=torch.bfloat16),
        }
        save(folder / f"consolidated.{rank:02}.pth", weights, tag)
    (folder / "params.json").write_text(json.dumps({"dim": 8, "n_layers": 1, "n_heads": 2}))
    (folder / "tokenizer.model").write_bytes(b"\x0a\x05<unk>")
    return folder


def mmengine_run(directory: Path, tag: str) -> Path:
    """The work folder of a Runner of MMEngine (`runner/runner.py`, `save_checkpoint`)."""
    net, optimizer = _net_and_optimizer()
    folder = directory / "work"
    (folder / "vis_data").mkdir(parents=True)
    for epoch in (1, 2):
        saved = {
            "meta": {"epoch": epoch, "iter": 4 * epoch, "seed": _SEED, "dataset_meta": {}},
            "state_dict": OrderedDict(net.state_dict()),
            "message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}},
            "optimizer": optimizer.state_dict(),
            "param_schedulers": [{"last_step": epoch}],
        }
        save(folder / f"epoch_{epoch}.pth", saved, tag, keep_cpu=_on_the_host)
    (folder / "last_checkpoint").write_text("epoch_2.pth")
    (folder / "config.py").write_text("model = dict()\n")
    (folder / "vis_data" / "scalars.json").write_text("{}\n")
    return folder


def fairseq_run(directory: Path, tag: str) -> Path:
    """The checkpoints of a run of fairseq (`trainer.py`, `state_dict`)."""
    net, optimizer = _net_and_optimizer()
    folder = directory / "checkpoints"
    folder.mkdir(parents=True)
    saved = {
        "args": argparse.Namespace(arch="tiny", device="cuda:0", lr=[1e-3]),
        "cfg": None,
        "model": net.state_dict(),
        "criterion": {},
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "num_updates": 2}],
        "task_state": {},
        "extra_state": {"metrics": OrderedDict(), "previous_training_time": 1.5},
        "last_optimizer_state": optimizer.state_dict(),
    }
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        save(folder / name, saved, tag, keep_cpu=_on_the_host)
    return folder


def ignite_run(directory: Path, tag: str) -> Path:
    """What `Checkpoint` of ignite saves through a DiskSaver: all of it, and the best model."""
    pytest.importorskip("ignite")
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine

    net, optimizer = _net_and_optimizer()
    folder = directory / "run"
    trainer = Engine(lambda engine, batch: None)
    parts = {"model": net, "optimizer": optimizer, "trainer": trainer}
    saver = DiskSaver(folder, create_dir=True, require_empty=False)
    step = global_step_from_engine(trainer)
    everything = Checkpoint(parts, saver, filename_prefix="training", global_step_transform=step)
    best = Checkpoint(
        {"model": net},
        saver,
        filename_prefix="best",
        score_function=lambda engine: 0.5,
        score_name="score",
        global_step_transform=step,
    )
    for handler in (everything, best):
        trainer.add_event_handler(Events.COMPLETED, handler)
    with _saving(tag):
        trainer.run([0] * 4, max_epochs=1)
    return folder


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
}

#: What the library has after more steps from such a folder: (folder, scratch) → its state.
GOES_ON: Mapping[str, Callable[[Path, Path], Mapping[str, object]]] = {
    "trainer": trainer_goes_on,
    "accelerate": accelerate_goes_on,
    "lightning": lightning_goes_on,
    "poutyne": poutyne_goes_on,
}
