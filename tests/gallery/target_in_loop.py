# "I moved the model and x. Why does F.cross_entropy expect all tensors on the same device?"
import sys

import torch
from torch import nn
from torch.nn import functional as F

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(4):
    x = torch.randn(2, 16).to(device)
    y = torch.tensor([1, 3])
    if fixed:
        y = y.to(device)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
