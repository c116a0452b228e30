# "The GPU is only used by half. Could it be my running loss?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
total = torch.zeros((), device=device)

for step in range(1, 6):
    x = torch.randn(8, 16, device=device)
    y = torch.randint(0, 4, (8,), device=device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if fixed:
        total += loss.detach()
    else:
        total += loss.item()
print(f"mean loss {total.item() / step:.3f}")
