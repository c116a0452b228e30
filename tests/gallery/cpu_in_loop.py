# "I keep predictions for a metric. Why does that slow the training down?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Linear(16, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 16).to(device)
y = torch.randint(0, 4, (32,)).to(device)
kept = []

for _ in range(4):
    out = model(x)
    loss = nn.functional.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    predicted = out.detach().argmax(1)
    kept.append(predicted if fixed else predicted.cpu())
predicted = torch.stack(kept).cpu()
