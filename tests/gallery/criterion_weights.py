# "Model, inputs and labels are all on the GPU. Why does my weighted loss still find the CPU?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
model = nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
if fixed:
    criterion.to(device)

for _ in range(4):
    x = torch.randn(8, 16).to(device)
    y = torch.randint(0, 4, (8,)).to(device)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
