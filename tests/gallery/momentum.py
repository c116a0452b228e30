# "Plain SGD goes on after I resume on the GPU. Why does SGD with momentum fail in step()?"
import sys

import torch
from torch import nn

device, mode = sys.argv[1], (sys.argv[2:] or ["broken"])[0]
model = nn.Linear(8, 2).to(device)
momentum = 0.0 if mode == "plain" else 0.9
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
if momentum:
    velocities = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        velocity = velocities[name]
        if mode == "fixed":
            velocity = velocity.to(parameter.device)
        optimizer.state[parameter]["momentum_buffer"] = velocity

for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8).to(device)).abs().sum().backward()
    optimizer.step()
