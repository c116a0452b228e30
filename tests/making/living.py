"""Living models to report on, and what torch counts of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from ckptmove import Manifest, TensorEntry


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.inner(x))
        return out


class LanguageModel(nn.Module):
    """A model with tied weights, repeated layers, and buffers of both kinds."""

    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("pos", torch.arange(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(3)).sum().backward()
    optimizer.step()


def entries(manifest: Manifest, *held: str) -> dict[str, TensorEntry]:
    return {e.name: e for e in manifest.tensors if e.held in held and e.part_of is None}


def registered(manifest: Manifest) -> list[str]:
    return list(entries(manifest, "parameter", "buffer"))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The size of all storages, each counted once, as torch counts."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def fake(device: str, *shape: int) -> nn.Parameter:
    """A parameter on a device that need not exist."""
    meta = torch.empty(shape, device="meta")
    return nn.Parameter(FakeTensor(MODE, meta, torch.device(device)))


MODE = FakeTensorMode()


def on_cuda(model: nn.Module, device: str = "cuda:0") -> nn.Module:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = fake(device, *parameter.shape)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(device, *buffer.shape).data
    return model


def row(report: Manifest, name: str) -> list[str]:
    """The cells of the line that begins with a name."""
    (line,) = [each for each in str(report).splitlines() if each.split("  ")[0] == name]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def transformers_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=3, n_embd=8, n_head=2, vocab_size=20, n_positions=8, tie_word_embeddings=True
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            vocab_size=20,
            tie_word_embeddings=True,
        )
        model = transformers.LlamaForCausalLM(config)
    assert isinstance(model, nn.Module)
    return model
