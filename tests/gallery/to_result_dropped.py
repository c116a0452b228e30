# "I call x.to(device) in the loop, and still get: Expected all tensors to be on the same device?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()

for _ in range(4):
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    y = y.to(device)
    if fixed:
        x = x.to(device)
    else:
        x.to(device)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
