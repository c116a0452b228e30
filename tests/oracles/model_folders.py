"""What the libraries themselves load from the folders of `tests.making.model_folders`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmove
from tests.making.frameworks import is_here, library, tiny_gpt2
from tests.making.model_folders import SNAPSHOT, accelerate_run, skorch_net

State = Mapping[str, Any]


def loaded(name: str, folder: Path) -> State:
    """All tensors that the library takes from a folder, by its own loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(sorted(LOADERS[name](folder).items()))


def _transformers(folder: Path) -> State:
    transformers: Any = pytest.importorskip("transformers")
    model, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys")), info
    return dict(model.state_dict())


def _diffusers(folder: Path) -> State:
    diffusers: Any = pytest.importorskip("diffusers")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    parts = {"vqvae": pipeline.vqvae, "unet": pipeline.unet}
    return {f"{part}.{k}": v for part, m in parts.items() for k, v in m.state_dict().items()}


def _sentence_transformers(folder: Path) -> State:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return {**model.state_dict(), "a b c": model.encode("a b c", convert_to_tensor=True)}


def _peft(folder: Path) -> State:
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    return dict(peft.PeftModel.from_pretrained(tiny_gpt2(transformers), folder).state_dict())


def _one_file(*names: str) -> Callable[[Path], State]:
    """The first of these files that is there, as timm and open_clip load one."""

    def load(folder: Path) -> State:
        path = next(path for path in (folder / name for name in names) if path.exists())
        if path.suffix == ".safetensors":
            return load_file(path)
        found: State = torch.load(path, map_location="cpu", weights_only=True)
        return found

    return load


def _timm(folder: Path) -> State:
    if not is_here("timm"):
        return _one_file("model.safetensors", "pytorch_model.bin")(folder)
    model: Any = library("timm").create_model(f"local-dir:{folder}", pretrained=True)
    return {**model.state_dict(), "pixels": model.eval()(torch.ones(1, 3, 160, 160))}


def _open_clip(folder: Path) -> State:
    if not is_here("open_clip"):
        names = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        return _one_file(*names)(folder)
    model: Any = library("open_clip").create_model(f"local-dir:{folder}")
    return {**model.state_dict(), "text": model.encode_text(torch.ones(1, 8, dtype=torch.long))}


def _skorch(folder: Path) -> State:
    """The net after another epoch. Of safetensors, skorch reads weights alone."""
    callbacks: Any = pytest.importorskip("skorch.callbacks")
    net = skorch_net().initialize()
    if (folder / "params.safetensors").exists():
        net.load_params(f_params=folder / "params.safetensors", use_safetensors=True)
        net.optimizer_.load_state_dict(ckptmove.load(folder / "optimizer.pt.safetensors"))
    else:
        net.load_params(checkpoint=callbacks.Checkpoint(dirname=folder, monitor=None))
    net.partial_fit(torch.arange(24.0).view(8, 3) / 24, torch.arange(8) % 2)
    return {**net.module_.state_dict(), "optimizer": net.optimizer_.state_dict()}


def _accelerate(folder: Path) -> State:
    """The model after two more steps."""
    accelerator, step, model = accelerate_run()
    accelerator.load_state(str(folder))
    step(), step()
    counter = accelerator._custom_objects[0]
    return {**model.state_dict(), "total": counter.total}


LOADERS: Mapping[str, Callable[[Path], State]] = {
    "accelerate": _accelerate,
    "diffusers": _diffusers,
    "hub": lambda folder: _open_clip(folder / SNAPSHOT),
    "open_clip": _open_clip,
    "peft": _peft,
    "sentence_transformers": _sentence_transformers,
    "skorch": _skorch,
    "timm": _timm,
    "transformers": _transformers,
}


def dtype_said(folder: Path) -> str | None:
    """The dtype that a `config.json` says."""
    said = json.loads((folder / "config.json").read_text())
    found: str | None = said.get("dtype", said.get("torch_dtype"))
    return found
