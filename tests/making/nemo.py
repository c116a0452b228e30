"""Models as NeMo saves them."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import torch

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
