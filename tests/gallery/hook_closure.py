# "My model is on the GPU. Why does a forward hook say that tensors are on two devices?"
import sys

import torch
from torch import nn

device, fixed = sys.argv[1], "fixed" in sys.argv[2:]


def reweight(module, weights):
    def hook(module, args, output):
        return output * weights

    module.register_forward_hook(hook)


model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)).to(device)
weights = torch.linspace(0, 1, 6)
reweight(model[0], weights.to(device) if fixed else weights)
optimizer = torch.optim.RMSprop(model.parameters())

for _ in range(3):
    loss = model(torch.rand(5, 8, device=device)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
