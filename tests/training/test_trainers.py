"""Training that saves by our plugins resumes as if it had never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from tests.making.frameworks import tiny_gpt2, trainer_arguments

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, about themselves


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have the same weights, bit for bit."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def metadata(path: Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file, by its own library."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


def lightning_fit(folder: Path, epochs: int, plugin: Any, ckpt_path: str | None = None) -> Any:
    """A trainer that has trained a model for so many epochs."""
    lightning: Any = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Dropout())

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = (self.layers(batch[0]) - 1).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, save_last=True, save_top_k=1, monitor="loss"
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugin] if plugin is not None else None,
    )
    torch.manual_seed(epochs)
    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    trainer.fit(Model(), loader, ckpt_path=ckpt_path)
    return trainer


def test_lightning_resumes_as_from_its_own_file(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from ckptmove.training.lightning import SafetensorsIO

    found = {}
    for name, plugin in (("ours", SafetensorsIO()), ("theirs", None)):
        lightning_fit(tmp_path / name, 2, plugin)
        last = tmp_path / name / "last.ckpt"
        found[name] = lightning_fit(tmp_path / name, 4, plugin, str(last))
        assert ckptmove.inspect(last).format == {"ours": "safetensors"}.get(name, "torch-zip")
    ours, theirs = found["ours"], found["theirs"]
    assert ours.global_step == theirs.global_step == 16
    assert same(ours.model, theirs.model)
    states = [each.optimizers[0].state_dict()["state"] for each in (ours, theirs)]
    for key, state in states[0].items():
        assert all(torch.equal(state[name], states[1][key][name]) for name in state)
    assert len([*(tmp_path / "ours").iterdir()]) == len([*(tmp_path / "theirs").iterdir()])
    assert "ckptmove" in metadata(tmp_path / "ours" / "last.ckpt")


def test_lightning_reads_its_own_files_and_takes_no_options(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from ckptmove.training.lightning import SafetensorsIO

    plugin = SafetensorsIO()
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt", lambda storage, location: storage)
    assert torch.equal(loaded["state_dict"]["w"], torch.ones(2))
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "b.ckpt", {"x": 1})
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert [*tmp_path.iterdir()] == []


def transformers_fit(folder: Path, resumed: str | None = None) -> Any:
    """A trainer that has trained a tiny GPT-2 for four steps, or on to the fourth."""
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ckptmove.training.transformers import SafetensorsCallback

    arguments = trainer_arguments(transformers, folder, max_steps=4, save_steps=2)
    tokens = [{"input_ids": list(range(n, n + 8)), "labels": list(range(8))} for n in range(8)]
    trainer = transformers.Trainer(
        tiny_gpt2(transformers),
        arguments,
        train_dataset=tokens,
        callbacks=[SafetensorsCallback()],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resumed)
    return trainer


@pytest.mark.slow
def test_transformers_resume_from_one_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from ckptmove.training.transformers import folder_of

    whole = transformers_fit(tmp_path / "whole")
    packed = tmp_path / "elsewhere" / "checkpoint-2.safetensors"
    packed.parent.mkdir()
    (tmp_path / "whole" / packed.name).rename(packed)
    folder = Path(folder_of(packed))
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    assert folder_of(packed) == str(folder)  # it is there already
    resumed = transformers_fit(tmp_path / "resumed", str(folder))
    assert resumed.state.global_step == 4
    assert same(whole.model, resumed.model)
    assert (tmp_path / "resumed" / "checkpoint-4.safetensors").is_file()


def test_ckptmove_imports_no_framework() -> None:
    code = (
        "import sys, ckptmove; ckptmove.load; print({'lightning', 'transformers'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"
