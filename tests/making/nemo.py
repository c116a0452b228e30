"""Models as NeMo saves them, and by NeMo where it is installed (`scripts/libraries`)."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.making.frameworks import library, quietly
from tests.making.saving import tagging


def nemo_model(
    path: Path, tag: str = "cpu", *, compressed: bool = False
) -> dict[str, torch.Tensor]:
    """What `_make_nemo_file_from_folder` of NeMo packs, and the state dict in it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8))
    state = dict(model.state_dict())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "model_config.yaml").write_text("target: a.b.Model\n")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
        with tagging(tag):
            torch.save(state, folder / "model_weights.ckpt")
        with tarfile.open(path, "w:gz" if compressed else "w:") as tar:
            tar.add(made, arcname=".")
    return state


def saved_by_nemo(path: Path, tag: str) -> None:
    """What NeMo itself saves, where it is installed."""
    with quietly():
        model = _model_class()(library("omegaconf").OmegaConf.create({"width": 8}))
        with tagging(tag):
            model.save_to(str(path))


def restored_by_nemo(path: Path) -> Mapping[str, torch.Tensor]:
    """What NeMo restores from such a file."""
    with quietly():
        model = _model_class().restore_from(str(path), map_location="cpu")
    found: Mapping[str, torch.Tensor] = model.state_dict()
    return found


def _model_class() -> Any:
    base: Any = library("nemo.core.classes").ModelPT

    class Tiny(base):
        def __init__(self, cfg: Any, trainer: Any = None) -> None:
            super().__init__(cfg=cfg, trainer=trainer)
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8))

        def setup_training_data(self, train_data_config: Any) -> None: ...

        def setup_validation_data(self, val_data_config: Any) -> None: ...

        @classmethod
        def list_available_models(cls) -> None: ...

    return Tiny
