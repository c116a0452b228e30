# "My GAN's generator runs on the GPU. Why is what it makes on another device than the rest?"
import sys

import torch
from torch import nn


class Discriminator(nn.Sequential):
    pass


device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
G = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
D = Discriminator(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
if fixed:
    D.to(device)
of_G = torch.optim.Adam(G.parameters())
of_D = torch.optim.Adam(D.parameters())

for _ in range(4):
    loss = D(G(torch.randn(8, 16, device=device))).mean()
    of_G.zero_grad()
    of_D.zero_grad()
    loss.backward()
    of_G.step()
    of_D.step()
