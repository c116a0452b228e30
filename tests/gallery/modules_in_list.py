# "Why are my layers on the CPU after model.to(device)? print(model) doesn't show them either."
import sys

import torch
from torch import nn


class Deep(nn.Module):
    def __init__(self, depth, fixed):
        super().__init__()
        self.first = nn.Linear(8, 16)
        layers = [nn.Linear(16, 16) for _ in range(depth)]
        self.layers = nn.ModuleList(layers) if fixed else layers
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


device = torch.device(sys.argv[1])
model = Deep(3, "fixed" in sys.argv[2:]).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x, y = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
for _ in range(4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
