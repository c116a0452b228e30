"""Make a real training checkpoint that names a GPU this machine may not have.

Usage: python scripts/demo_checkpoint.py FILE

A small transformer language model takes a few AdamW steps on the CPU, and is saved as training
on `cuda:1` would have saved it: the weights and the moments are tagged `cuda:1`, the RNG state
and the optimizer's `step` counts `cpu`. torch writes the file itself, only the tags are ours.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

DEVICE = "cuda:1"


class LanguageModel(nn.Module):
    """A decoder of two layers, its head tied to its embedding."""

    def __init__(self, vocabulary: int = 2048, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(width, nhead=4, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        logits: Tensor = self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))
        return logits


@contextmanager
def tagged(tensors: list[Tensor], device: str) -> Iterator[None]:
    """Within, torch.save tags the storages of `tensors` with `device`, and others as ever."""
    there = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kind, _, number = device.partition(":")

    def tag(storage: torch.serialization.STORAGE) -> str | None:
        # Put together anew for each storage, as torch's own CUDA tagger does.
        return kind + ":" + number if storage.data_ptr() in there else None

    # Taggers are asked in order of priority; torch's own begin at 10, with the CPU's.
    torch.serialization.register_package(5, tag, lambda storage, location: None)
    try:
        yield
    finally:
        registry = torch.serialization._package_registry
        registry[:] = [entry for entry in registry if entry[1] is not tag]


def main(path: str) -> None:
    random.seed(0)
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for _ in range(3):
        tokens = torch.randint(2048, (4, 33))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 1,
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()},
    }
    weights = list(model.state_dict().values())
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    with tagged(weights + moments, DEVICE):
        torch.save(checkpoint, path)
    print(f"{path}: 3 steps trained, loss {loss.item():.2f}, tagged {DEVICE}")


if __name__ == "__main__":
    main(sys.argv[1])
