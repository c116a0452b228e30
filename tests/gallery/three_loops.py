# "Which of these three loops is right? I have seen all of them in tutorials."
import sys

import torch
from torch import nn

device, loop = torch.device(sys.argv[1]), (sys.argv[2:] or ["wrong"])[0]
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
criterion = nn.CrossEntropyLoss()
batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(4)]

if loop == "wrong":  # nothing is moved
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
elif loop == "fixed":
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches:
        x, y = x.to(device), y.to(device)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
elif loop == "intermediate":  # back to the CPU, half-way
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches:
        out = model(x.to(device)).cpu()
        smooth = out + torch.zeros_like(out)
        loss = criterion(smooth, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
