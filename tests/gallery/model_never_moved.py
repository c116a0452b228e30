# "My data is on the GPU. Why does it say: mat1 is on cuda:0, different from other tensors on cpu?"
import sys

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


device, fixed = sys.argv[1], "fixed" in sys.argv[2:]
model = Classifier()
if fixed:
    model.to(device)
optimizer = torch.optim.Adam(model.parameters())

for _ in range(4):
    x = torch.randn(8, 16).to(device)
    y = torch.randint(0, 4, (8,)).to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
