# "model.to(device) is there. Why is input_ids still on the CPU? It comes from a DataLoader."
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids, attention_mask):
        return self.head(self.embed(input_ids) * attention_mask.unsqueeze(-1))


device, fixed = torch.device(sys.argv[1]), "fixed" in sys.argv[2:]
rows = [{"input_ids": torch.randint(0, 100, (12,)), "attention_mask": torch.ones(12)}] * 32
model = Tagger().to(device)
optimizer = torch.optim.AdamW(model.parameters())

for batch in DataLoader(rows, batch_size=8):
    if fixed:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
    loss = model(**batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
