# "Does `if loss > limit` cost anything?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Linear(16, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(32, 16).to(device)
spikes = 0

for _ in range(4):
    loss = model(x).square().mean()
    if fixed:
        spikes = spikes + (loss.detach() > 10)
    elif loss > 10:
        spikes += 1
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("spikes:", spikes)
