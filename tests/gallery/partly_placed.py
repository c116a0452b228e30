# "I put my layers on the GPU one by one. Why does the last one fail?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Sequential(
    nn.Linear(16, 32).to(device),
    nn.ReLU(),
    nn.LayerNorm(32).to(device),
    nn.Linear(32, 4).to(device) if fixed else nn.Linear(32, 4),
)
optimizer = torch.optim.AdamW(model.parameters())

for _ in range(4):
    x = torch.randn(8, 16).to(device)
    loss = model(x).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
