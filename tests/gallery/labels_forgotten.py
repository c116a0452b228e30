# "The forward pass works on the GPU. Why does the loss fail with tensors on cuda:0 and cpu?"
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
model = nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()

for inputs, labels in DataLoader(data, batch_size=8):
    inputs = inputs.to(device)
    if fixed:
        labels = labels.to(device)
    outputs = model(inputs)
    loss = criterion(outputs, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
