# "I moved the optimizer's state with the loop that everybody copies. Why is each step so slow?"
import io
import sys

import torch
from torch import nn

device, fixed = sys.argv[1], "fixed" in sys.argv[2:]
before = nn.Linear(8, 4).to(device)
trained = torch.optim.Adam(before.parameters())
before(torch.randn(4, 8).to(device)).sum().backward()
trained.step()
checkpoint = io.BytesIO()
torch.save({"model": before.state_dict(), "optimizer": trained.state_dict()}, checkpoint)
checkpoint.seek(0)

saved = torch.load(checkpoint, map_location="cpu")
model = nn.Linear(8, 4)
model.load_state_dict(saved["model"])
model.to(device)
optimizer = torch.optim.Adam(model.parameters())
optimizer.load_state_dict(saved["optimizer"])
for state in optimizer.state.values():
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and not (fixed and key == "step"):
            state[key] = value.to(device)

for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8).to(device)).square().sum().backward()
    optimizer.step()
