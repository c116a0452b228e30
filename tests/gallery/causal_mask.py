# "Why is my causal mask on the CPU? There is no tensor in my model that I forgot."
import sys

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, fixed):
        super().__init__()
        self.fixed = fixed
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)
        length = x.shape[1]
        if self.fixed:
            mask = torch.triu(torch.ones(length, length, device=x.device), 1)
        else:
            mask = torch.triu(torch.ones(length, length), 1)
        return (scores - 1e9 * mask).softmax(-1) @ v


device = sys.argv[1]
model = nn.Sequential(Attention(16, "fixed" in sys.argv[2:]), nn.Linear(16, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(2, 7, 16, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
