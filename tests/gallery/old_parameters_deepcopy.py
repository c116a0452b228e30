# "I fine-tune a copy on the GPU. Why do its weights never change?"
import copy
import sys

import torch
from torch import nn

device, fixed = sys.argv[1], "fixed" in sys.argv[2:]
pretrained = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(pretrained.parameters())
model = copy.deepcopy(pretrained).to(device)
if fixed:
    optimizer = torch.optim.AdamW(model.parameters())

for _ in range(3):
    x = torch.rand(8, 8).to(device)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
