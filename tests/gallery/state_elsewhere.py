# "I resume from a checkpoint. Why does optimizer.step() fail with cuda:0 and cpu?"
import io
import sys

import torch
from torch import nn

device, fixed = sys.argv[1], "fixed" in sys.argv[2:]


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


before = build().to(device)
trained = torch.optim.Adam(before.parameters())
before(torch.randn(4, 8).to(device)).sum().backward()
trained.step()
checkpoint = io.BytesIO()
torch.save(trained.state_dict(), checkpoint)
checkpoint.seek(0)

model = build().to(device)
optimizer = torch.optim.Adam(model.parameters())
saved = torch.load(checkpoint, map_location="cpu")
if fixed:
    optimizer.load_state_dict(saved)
else:  # by hand, since only some of it is wanted
    for parameter, state in zip(model.parameters(), saved["state"].values()):
        optimizer.state[parameter] = state

for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8).to(device)).square().sum().backward()
    optimizer.step()
