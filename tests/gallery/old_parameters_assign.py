# "I resume with load_state_dict(assign=True), to save memory. Why does it no longer learn?"
import io
import sys

import torch
from torch import nn

device, fixed = sys.argv[1], "fixed" in sys.argv[2:]
saved = io.BytesIO()
torch.save(nn.Linear(8, 2).state_dict(), saved)
saved.seek(0)
state = torch.load(saved, map_location=device)

model = nn.Linear(8, 2).to(device)
if fixed:
    model.load_state_dict(state, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.load_state_dict(state, assign=True)

for _ in range(3):
    loss = model(torch.randn(4, 8).to(device)).norm()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
