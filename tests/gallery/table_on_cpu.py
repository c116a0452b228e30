# "My embedding doesn't fit on the GPU, so it stays on the CPU. Why does the next layer fail?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
table = nn.Embedding(5000, 16)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
of_table = torch.optim.SGD(table.parameters(), lr=0.1)
optimizer = torch.optim.AdamW(model.parameters())

for _ in range(4):
    rows = table(torch.randint(0, 5000, (8,)))
    if fixed:
        rows = rows.to(device)
    loss = model(rows).square().mean()
    of_table.zero_grad()
    optimizer.zero_grad()
    loss.backward()
    of_table.step()
    optimizer.step()
