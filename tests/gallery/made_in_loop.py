# "Model and batch are on the GPU. Which tensor is it that is on the CPU?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters())

for _ in range(4):
    x = torch.randn(8, 16).to(device)
    out = model(x)
    weight = torch.linspace(1, 2, 16, device=device if fixed else None)
    loss = ((out - x).square() * weight).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
