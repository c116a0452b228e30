"""Folders of models as libraries save them, tiny and made without a network.

`copy_of` makes each once per process and copies it: whoever wants to change one, may.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.making.frameworks import is_here, library, tiny_gpt2
from tests.making.saving import tagging

Maker = Callable[[Path, str], object]


def copy_of(name: str, folder: Path, tag: str = "cpu") -> Path:
    """A copy of the folder that `FOLDERS[name]` makes on this device; links stay links."""
    shutil.copytree(_made(name, tag), folder, symlinks=True)
    return folder


@cache
def _made(name: str, tag: str) -> Path:
    base = Path(tempfile.mkdtemp(prefix="model-folder-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FOLDERS[name](base / name, tag)
    return base / name


def transformers_model(folder: Path, tag: str = "cpu") -> None:
    """What `save_pretrained` of transformers writes."""
    transformers: Any = pytest.importorskip("transformers")
    model: Any = tiny_gpt2(transformers)
    model.save_pretrained(folder)


def diffusers_pipeline(folder: Path, tag: str = "cpu") -> None:
    """A pipeline with a VAE and a UNet, whose weights are pickles, and a scheduler."""
    diffusers: Any = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.VQModel(
        block_out_channels=(4,), norm_num_groups=2, num_vq_embeddings=4, latent_channels=2
    )
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(4, 8),
        norm_num_groups=2,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    pipeline = diffusers.LDMPipeline(vae, unet, diffusers.DDIMScheduler())
    with tagging(tag):
        pipeline.save_pretrained(folder, safe_serialization=False)


def sentence_transformer(folder: Path, tag: str = "cpu") -> None:
    """A Transformer, pooling, and a Dense layer whose weights are a pickle."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import (
        Dense,
        Pooling,
        Transformer,
    )

    model = _tiny_bert(folder.with_name("bert"))
    parts = [
        Transformer(str(model)),
        Pooling(8, pooling_mode="mean"),
        Dense(8, 4),
    ]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder), safe_serialization=False)
    shutil.rmtree(model)
    with tagging(tag):
        for path in folder.rglob("pytorch_model.bin"):
            torch.save(torch.load(path, weights_only=True), path)


def _tiny_bert(folder: Path) -> Path:
    """A BERT with its tokenizer."""
    transformers: Any = pytest.importorskip("transformers")
    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=16)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def peft_adapter(folder: Path, tag: str = "cpu") -> None:
    """A LoRA of a tiny GPT-2, as a pickle."""
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(tiny_gpt2(transformers), config)
    with tagging(tag):
        model.save_pretrained(folder, safe_serialization=False)


def timm_model(folder: Path, tag: str = "cpu") -> None:
    """What `timm.models.save_for_hf` writes: the weights in both forms, and a configuration."""
    if is_here("timm"):
        torch.manual_seed(0)
        model = library("timm").create_model("test_vit", num_classes=2)
        with tagging(tag):
            library("timm.models").save_for_hf(model, str(folder), safe_serialization="both")
        return
    folder.mkdir(parents=True)
    state = _small_state()
    with tagging(tag):
        torch.save(state, folder / "pytorch_model.bin")
    save_file(state, folder / "model.safetensors")
    said = {"architecture": "resnet18", "num_classes": 2, "num_features": 4, "pretrained_cfg": {}}
    (folder / "config.json").write_text(json.dumps(said))


#: A CLIP of a few layers.
_CLIP: Mapping[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 16, "width": 64, "heads": 1, "layers": 1},
}


def open_clip_model(folder: Path, tag: str = "cpu") -> None:
    """What `open_clip.push_to_hf_hub` writes, without the files of a tokenizer."""
    if is_here("open_clip"):
        torch.manual_seed(0)
        model = library("open_clip").CLIP(**_CLIP)
        model.visual.image_mean, model.visual.image_std = (0.5,) * 3, (0.2,) * 3
        write = library("open_clip.push_to_hf_hub").save_for_hf
        with tagging(tag):
            no_tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
            write(model, no_tokenizer, dict(_CLIP), str(folder), safe_serialization=False)
    else:
        folder.mkdir(parents=True)
        with tagging(tag):
            torch.save(_small_state(), folder / "open_clip_pytorch_model.bin")
        said = {"model_cfg": {"embed_dim": 4}, "preprocess_cfg": {}}
        (folder / "open_clip_config.json").write_text(json.dumps(said))
    (folder / "README.md").write_text("# a model\n")


def hub_snapshot(folder: Path, tag: str = "cpu") -> None:
    """A repository in the cache of the Hub; its files are in `SNAPSHOT`, links to `blobs/`."""
    whole = folder / "whole"
    open_clip_model(whole, tag)
    cached_on_hub(whole, folder)
    shutil.rmtree(whole)


def cached_on_hub(whole: Path, folder: Path) -> Path:
    """The cache of the Hub with a repository that has the files of a folder."""
    inside = folder / SNAPSHOT
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(inside.name)
    (folder / "blobs").mkdir()
    for n, path in enumerate(sorted(each for each in whole.rglob("*") if each.is_file())):
        blob = folder / "blobs" / f"{n:064x}"
        shutil.copyfile(path, blob)
        link = inside / path.relative_to(whole)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return folder


#: Where the files are in what `hub_snapshot` makes.
SNAPSHOT = f"snapshots/{'ab' * 20}"


def skorch_net(**options: Any) -> Any:
    """A tiny net of skorch."""
    skorch: Any = pytest.importorskip("skorch")
    torch.manual_seed(0)
    return skorch.NeuralNet(
        torch.nn.Linear,
        torch.nn.CrossEntropyLoss,
        module__in_features=3,
        module__out_features=2,
        criterion__weight=torch.ones(2),
        optimizer=torch.optim.AdamW,
        train_split=None,
        max_epochs=1,
        verbose=0,
        **options,
    )


def skorch_run(folder: Path, tag: str = "cpu") -> None:
    """What the callback `Checkpoint(dirname=…)` of skorch writes."""
    callbacks: Any = pytest.importorskip("skorch.callbacks")
    net = skorch_net(callbacks=[callbacks.Checkpoint(dirname=folder, monitor=None)])
    with tagging(tag):
        net.fit(torch.rand(8, 3), torch.arange(8) % 2)


def _small_state() -> dict[str, torch.Tensor]:
    """The state dict of a convolution and its normalization."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    return dict(model.state_dict())


def accelerate_state(folder: Path, tag: str = "cpu") -> None:
    """What `Accelerator.save_state` writes after two steps of `accelerate_run`."""
    accelerator, step, _ = accelerate_run()
    step(), step()
    with tagging(tag):
        accelerator.save_state(os.fspath(folder))


def torchtune_run(folder: Path, tag: str = "cpu", *, in_shards: bool = False) -> None:
    """What torchtune writes: two epochs, in Meta's form or in shards, and the recipe.

    Source: torchtune/training/checkpointing/_checkpointer.py, `save_checkpoint`; _utils.py, for the
    names: the index of `model-….bin` is `pytorch_model.bin.index.json`.
    """
    for n in range(2):
        inside = folder / f"epoch_{n}"
        inside.mkdir(parents=True)
        total = 2 if in_shards else 1
        named = {f"w{k}": f"model-{min(k, total):05}-of-{total:05}.bin" for k in (1, 2)}
        files: dict[str, dict[str, torch.Tensor]] = {}
        for key, file in named.items():
            files.setdefault(file, {})[key] = torch.full((2,), float(n))
        with tagging(tag):
            for file, state in files.items():
                torch.save(state, inside / file)
        if in_shards:
            said = {"metadata": {"total_size": 16}, "weight_map": named}
            (inside / "pytorch_model.bin.index.json").write_text(json.dumps(said))
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    (folder / "recipe_state").mkdir()
    with tagging(tag):
        torch.save({"optimizer": optimizer, "seed": 1}, folder / "recipe_state" / "recipe_state.pt")


class Counter:
    """An object of a training loop with a state of its own, for `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.total = state["total"]


def accelerate_run() -> tuple[Any, Callable[[], None], torch.nn.Module]:
    """An accelerator, a step of its training with dropout, and the model."""
    accelerate: Any = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    adam = torch.optim.AdamW(plain.parameters())
    decay = torch.optim.lr_scheduler.StepLR(adam, 1)
    model, optimizer, scheduler = accelerator.prepare(plain, adam, decay)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(model(torch.rand(3, 4)).square().sum())
        optimizer.step()
        scheduler.step()
        counter.total += 1

    return accelerator, step, plain


#: Who makes which folder, given a path that does not exist and a device.
FOLDERS: Mapping[str, Maker] = {
    "accelerate": accelerate_state,
    "diffusers": diffusers_pipeline,
    "hub": hub_snapshot,
    "open_clip": open_clip_model,
    "peft": peft_adapter,
    "sentence_transformers": sentence_transformer,
    "skorch": skorch_run,
    "timm": timm_model,
    "transformers": transformers_model,
}
