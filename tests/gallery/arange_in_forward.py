# "Why does self.position(torch.arange(n)) fail on the GPU? The embedding is on it."
import sys

import torch
from torch import nn


class Embedder(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed
        self.token = nn.Embedding(50, 16)
        self.position = nn.Embedding(32, 16)

    def forward(self, ids):
        if self.fixed:
            positions = torch.arange(ids.shape[1], device=ids.device)
        else:
            positions = torch.arange(ids.shape[1])
        return self.token(ids) + self.position(positions)


device = torch.device(sys.argv[1])
model = nn.Sequential(Embedder("fixed" in sys.argv[2:]), nn.Linear(16, 50)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 50, (4, 12)).to(device)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
