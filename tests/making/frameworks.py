"""Checkpoints that training frameworks write, written by them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.making.saving import HOST_RNG_NBYTES, Keep, Storage, tagging


def on_the_host(storage: Storage) -> bool:
    """Whether tiny models leave this on the CPU: 0-d steps and the RNG state."""
    return storage.nbytes() in (4, HOST_RNG_NBYTES)


def on_the_host_if_fused(storage: Storage) -> bool:
    """As `on_the_host` for a fused optimizer, whose steps are on the device."""
    return storage.nbytes() == HOST_RNG_NBYTES


@contextmanager
def saving(tag: str, keep_cpu: Keep = on_the_host) -> Iterator[None]:
    """What is saved meanwhile comes from a device with this tag."""
    with tagging(tag, keep_cpu), quietly():
        yield


@contextmanager
def quietly() -> Iterator[None]:
    """Libraries may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_here(name: str) -> bool:
    """Whether a library is installed."""
    return importlib.util.find_spec(name) is not None


def library(name: str) -> Any:
    """A module of an optional library; without it the test is skipped."""
    with quietly():
        return pytest.importorskip(name)


def net_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A tiny model after a step."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def trainer_arguments(transformers: Any, directory: Path, **options: Any) -> Any:
    """Arguments of a Hugging Face trainer that trains on the CPU, and says nothing."""
    return transformers.TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


def hf_trainer_folder(directory: Path, tag: str = "cpu") -> Path:
    """The `checkpoint-2` folder of a Hugging Face trainer that trained a tiny GPT-2."""
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trainer = _trainer_of(tiny_gpt2(transformers), directory, max_steps=2, save_steps=2)
    with saving(tag):
        trainer.train()
    return directory / "checkpoint-2"


def resumed_trainer(
    folder: Path, scratch: Path, steps: int, model: torch.nn.Module | None = None
) -> Any:
    """A trainer after it went on from such a folder, up to so many steps, and saved nothing."""
    transformers: Any = pytest.importorskip("transformers")
    model = tiny_gpt2(transformers) if model is None else model
    trainer = _trainer_of(model, scratch, max_steps=steps, save_strategy="no")
    with quietly():
        trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == steps
    return trainer


def _trainer_of(model: torch.nn.Module, directory: Path, **options: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    tokens = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 8
    arguments = trainer_arguments(transformers, directory, **options)
    return transformers.Trainer(model, arguments, train_dataset=tokens)


def tiny_gpt2(transformers: Any) -> torch.nn.Module:
    """The model whose training `hf_trainer_folder` saves."""
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    )
    return model


def lightning_trainer(lightning: Any, **options: Any) -> Any:
    """A Lightning trainer on the CPU that says nothing, and saves nothing of itself."""
    bars = {"enable_progress_bar": False, "enable_model_summary": False}
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, **bars}
    return lightning.Trainer(**{**quiet, **options})


def lightning_checkpoint(path: Path, tag: str = "cpu") -> Path:
    """The file that a Lightning trainer saves after two steps."""
    lightning: Any = pytest.importorskip("lightning")
    with quietly():
        trainer = lightning_trainer(lightning, max_steps=2, default_root_dir=path.parent)
        inputs = torch.utils.data.TensorDataset(torch.randn(8, 3))
        trainer.fit(regression(lightning), torch.utils.data.DataLoader(inputs))
        with saving(tag):
            trainer.save_checkpoint(path)
    return path


def regression(lightning: Any) -> Any:
    """The module whose training `lightning_checkpoint` saves."""

    class Regression(lightning.LightningModule):
        def __init__(self, width: int = 3, device_name: str = "cuda:0") -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 2)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> tuple[list[object], list[object]]:
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(0)
    return Regression()
