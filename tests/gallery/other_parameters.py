# "The loss never goes down. Is my student on the GPU at all?"
import sys

import torch
from torch import nn

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]


def network(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))


teacher, student = network(64).to(device), network(16).to(device)
optimizer = torch.optim.Adam((student if fixed else teacher).parameters(), lr=1e-3)

for _ in range(3):
    x = torch.randn(16, 8).to(device)
    with torch.no_grad():
        wanted = teacher(x)
    loss = nn.functional.mse_loss(student(x), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
