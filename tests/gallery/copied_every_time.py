# "I move the table in forward, so that it works. Why is my GPU hardly used?"
import sys

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width, length, fixed):
        super().__init__()
        angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(width) / width))
        if fixed:
            self.register_buffer("angles", angles, persistent=False)
        else:
            self.angles = angles
        self.project = nn.Linear(width, width)

    def forward(self, x):
        angles = self.angles.to(x.device)
        return self.project(x * angles.cos() + x.flip(-1) * angles.sin())


device = sys.argv[1]
model = nn.Sequential(Rotary(16, 10, "fixed" in sys.argv[2:]), nn.Linear(16, 2)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(4, 10, 16, device=device)).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
