# "model.to(device) moved everything. Why is one tensor of my decoder still on the CPU?"
import sys

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, width, length, fixed):
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        if fixed:
            self.register_buffer("pos_embed", torch.randn(1, length, width))
        else:
            self.pos_embed = torch.randn(1, length, width)

    def forward(self, x):
        x = x + self.pos_embed
        return self.attend(x, x, x, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.decoder = Decoder(16, 10, fixed)

    def forward(self, x):
        return self.decoder(self.encoder(x))


device = torch.device(sys.argv[1])
model = Model("fixed" in sys.argv[2:]).to(device)
optimizer = torch.optim.Adam(model.parameters())

for _ in range(3):
    loss = model(torch.randn(4, 10, 8, device=device)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
