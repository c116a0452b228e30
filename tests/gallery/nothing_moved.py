# "There is a GPU, so why does my training run on the CPU? nvidia-smi shows nothing."
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device, fixed = sys.argv[1], "fixed" in sys.argv[2:]
data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 4, (64,)))
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
model.append(nn.Linear(8 * 36, 4))
if fixed:
    model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for images, labels in DataLoader(data, batch_size=16, shuffle=True):
    if fixed:
        images, labels = images.to(device), labels.to(device)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
