# "I use a DataLoader with pin_memory. Isn't the batch put on the GPU by that?"
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1, 8, 8), index / 64), index % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 64, 4)

    def forward(self, image):
        return self.head(self.drop(self.conv(image).relu()).flatten(1))


device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
loader = DataLoader(Digits(), batch_size=16, shuffle=True, pin_memory=device.type == "cuda")
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    for image, label in loader:
        if fixed:
            image = image.to(device, non_blocking=True)
        label = label.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
