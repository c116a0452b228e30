# "Why are the tensors in my list not moved by model.cuda()?"
import sys

import torch
from torch import nn


class MultiScale(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        scales = [torch.full((16,), 2.0**n) for n in range(3)]
        if fixed:
            self.register_buffer("scales", torch.stack(scales))
        else:
            self.scales = scales

    def forward(self, x):
        return sum(self.inner(x) * scale for scale in self.scales)


device = sys.argv[1]
model = MultiScale("fixed" in sys.argv[2:]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 16).to(device)).mean().backward()
    optimizer.step()
