# "My LSTM says: Input and hidden tensors are not at the same device. Which is on the CPU?"
import sys

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        there = {"device": x.device} if self.fixed else {}
        h0 = torch.zeros(1, x.size(0), 16, **there)
        c0 = torch.zeros(1, x.size(0), 16, **there)
        out, _ = self.lstm(x, (h0, c0))
        return self.head(out[:, -1])


device = torch.device(sys.argv[1])
model = Reader("fixed" in sys.argv[2:]).to(device)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    x, y = torch.randn(4, 6, 8).to(device), torch.randint(0, 2, (4,)).to(device)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
