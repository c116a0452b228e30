"""Programs as people post them: each right, and with one planted fault of devices.

A line that begins with `- ` is of the wrong program, one with `+ ` of the right one. A fault must
be told by one of its causes, with each of its texts; `L:text` stands for the line that ends so.
"""

from __future__ import annotations

from typing import NamedTuple

BEGIN = """\
import copy, sys
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""
NET = """\
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
optimizer = torch.optim.Adam(model.parameters())
"""
TRAIN = """\
for epoch in range(3):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    x, y = x.to(device), y.to(device)
    loss = loss_of(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Fault(NamedTuple):
    """A program; what must be told of the wrong one."""

    program: str
    causes: tuple[str, ...]
    texts: tuple[str, ...] = ()

    def text(self, *, wrong: bool) -> str:
        """The program, right or wrong."""
        mine, other = ("- ", "+ ") if wrong else ("+ ", "- ")
        lines = [each for each in self.program.splitlines() if not each.startswith(other)]
        return "".join(f"{each.removeprefix(mine)}\n" for each in lines)

    def told(self, text: str) -> str:
        """What a text of `texts` stands for."""
        if not text.startswith("L:"):
            return text
        lines = self.text(wrong=True).splitlines()
        (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(text[2:])]
        return f".py:{number}"


def _fault(
    body: str, causes: tuple[str, ...] | str, *texts: str, net: bool = True, trains: bool = True
) -> Fault:
    program = BEGIN + (NET if net else "") + body + (TRAIN if trains else "")
    return Fault(program, (causes,) if isinstance(causes, str) else causes, texts)


_BATCH, _MADE, _HIDDEN = "batch-never-moved", "made-elsewhere", "unregistered-tensor"
_NEVER, _OPERAND, _FAILED = "model-never-moved", "operand-elsewhere", "step-failed"

FAULTS: dict[str, Fault] = {
    # -- what raises ------------------------------------------------------------------------------
    "numpy_of_outputs": _fault(
        """\
def loss_of(x, y):
    out = model(x)
-     accuracy = (out.argmax(1).numpy() == y.cpu().numpy()).mean()
+     accuracy = (out.argmax(1).cpu().numpy() == y.cpu().numpy()).mean()
    return F.cross_entropy(out, y)
""",
        "host-value",
        "L:.mean()",
        ".cpu()",
    ),
    "asarray_of_losses": _fault(
        """\
losses = []
def loss_of(x, y):
    loss = F.cross_entropy(model(x), y)
    losses.append(loss.detach())
-     print(np.asarray(losses[-1]))
+     print(np.asarray(losses[-1].cpu()))
    return loss
""",
        "host-value",
        "L:print(np.asarray(losses[-1]))",
    ),
    "table_on_the_host": _fault(
        """\
- table = torch.randn(3, 16)
+ table = torch.randn(3, 16, device=device)
def loss_of(x, y):
    target = table[y]
    return F.mse_loss(model[0](x), target)
""",
        (_MADE, _OPERAND, _BATCH),
        "L:torch.randn(3, 16)",
        "table",
    ),
    "put_of_device_values": _fault(
        """\
- best = torch.zeros(8)
+ best = torch.zeros(8, device=device)
def loss_of(x, y):
    out = model(x)
    best[y] = out.max(1).values.detach()
    return F.cross_entropy(out, y)
""",
        (_MADE, _OPERAND, _BATCH),
        "L:torch.zeros(8)",
        "best",
    ),
    "generator_of_the_host": _fault(
        """\
- generator = torch.Generator().manual_seed(1)
+ generator = torch.Generator(device).manual_seed(1)
def loss_of(x, y):
    noise = torch.randn(8, 4, device=device, generator=generator)
    return F.cross_entropy(model(x + noise), y)
""",
        "generator-elsewhere",
        "L:generator=generator)",
    ),
    "default_device_and_shuffling": _fault(
        """\
from torch.utils.data import DataLoader, TensorDataset
torch.set_default_device(device)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
- loader = DataLoader(data, batch_size=8, shuffle=True)
+ loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator(device))
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "generator-elsewhere",
        "L:in loader:",
        "generator=",
        trains=False,
    ),
    "lengths_of_sequences": _fault(
        """\
model = nn.LSTM(4, 3, batch_first=True).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lengths = torch.tensor([5, 4, 3])
def loss_of(x, y):
-     packed = nn.utils.rnn.pack_padded_sequence(seq, lengths.to(device), batch_first=True)
+     packed = nn.utils.rnn.pack_padded_sequence(seq, lengths, batch_first=True)
    return model(packed)[0].data.sum()
seq = torch.randn(3, 5, 4, device=device)
""",
        "host-value",
        "L:batch_first=True)",
        net=False,
    ),
    "stack_of_numbers": _fault(
        """\
def loss_of(x, y):
    out = model(x)
-     parts = [F.cross_entropy(out, y), torch.tensor(0.1)]
+     parts = [F.cross_entropy(out, y), torch.tensor(0.1, device=device)]
    return torch.stack(parts).sum()
""",
        (_MADE, _OPERAND),
        "L:torch.stack(parts).sum()",
    ),
    "clamp_by_tensors": _fault(
        """\
- low = torch.full((3,), -1.0)
+ low = torch.full((3,), -1.0, device=device)
def loss_of(x, y):
    return F.cross_entropy(model(x).clamp(min=low), y)
""",
        (_MADE, _OPERAND, _BATCH),
        "L:torch.full((3,), -1.0)",
        "low",
    ),
    "cuda_in_workers": _fault(
        """\
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, n):
-         return torch.full((4,), float(n)).to(device), n % 3
+         return torch.full((4,), float(n)), n % 3
for x, y in DataLoader(Data(), batch_size=8, num_workers=1):
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "device-in-worker",
        "L:n % 3",
        trains=False,
    ),
    "pinned_on_the_device": _fault(
        """\
from torch.utils.data import DataLoader, TensorDataset
- data = TensorDataset(torch.randn(32, 4).to(device), torch.zeros(32).long().to(device))
+ data = TensorDataset(torch.randn(32, 4), torch.zeros(32).long())
for x, y in DataLoader(data, batch_size=8, pin_memory=True):
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "pinned-elsewhere",
        "pin_memory",
        trains=False,
    ),
    "averages_on_the_host": _fault(
        """\
- ema = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
+ ema = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
def loss_of(x, y):
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters()):
            a.mul_(0.9).add_(b, alpha=0.1)
    return F.cross_entropy(model(x), y)
""",
        (_NEVER, _OPERAND),
        "ema",
    ),
    "constant_of_a_function": _fault(
        """\
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
-         return grad * torch.full((3,), 2.0)
+         return grad * torch.full((3,), 2.0, device=grad.device)
def loss_of(x, y):
    return F.cross_entropy(Scaled.apply(model(x)), y)
""",
        (_MADE, _OPERAND),
        "L:torch.full((3,), 2.0)",
    ),
    "state_of_a_game": _fault(
        """\
def act(state):
-     return model(torch.tensor(state, dtype=torch.float32)).argmax().item()
+     return model(torch.tensor(state, dtype=torch.float32, device=device)).argmax().item()
def loss_of(x, y):
    act([0.0, 1.0, 2.0, 3.0])
    return F.cross_entropy(model(x), y)
""",
        (_BATCH, _MADE),
        "L:.argmax().item()",
    ),
    "mean_of_images": _fault(
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
-         self.mean = torch.full((4,), 0.5)
+         self.register_buffer("mean", torch.full((4,), 0.5))
    def forward(self, x):
        return self.inner(x - self.mean)
model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters())
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
""",
        _HIDDEN,
        "mean",
        net=False,
    ),
    "weights_of_the_loss": _fault(
        """\
- weights = torch.tensor([1.0, 2.0, 3.0])
+ weights = torch.tensor([1.0, 2.0, 3.0]).to(device)
def loss_of(x, y):
    return F.cross_entropy(model(x), y, weight=weights)
""",
        (_MADE, _BATCH, _OPERAND),
        "weights",
        "L:torch.tensor([1.0, 2.0, 3.0])",
    ),
    "evaluation_at_the_end": _fault(
        """\
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
for epoch in range(2):
    loss = loss_of(torch.randn(8, 4, device=device), torch.zeros(8).long().to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
-     print(model(torch.randn(2, 4)).argmax(1))
+     print(model(torch.randn(2, 4).to(device)).argmax(1))
""",
        _BATCH,
        "L:.argmax(1))",
        trains=False,
    ),
    "attention_mask": _fault(
        """\
model = nn.MultiheadAttention(16, 4, batch_first=True).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
full = torch.triu(torch.ones(64, 64), 1).bool()
def loss_of(x, y):
    seq = torch.randn(2, 5, 16, device=device)
-     mask = full[:5, :5]
+     mask = full[:5, :5].to(device)
    return model(seq, seq, seq, attn_mask=mask)[0].sum()
""",
        (_BATCH, _MADE),
        "mask",
        net=False,
    ),
    # -- what raises nowhere -----------------------------------------------------------------------
    "encoder_on_the_host": _fault(
        """\
- encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
+ encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval().to(device)
def loss_of(x, y):
    with torch.no_grad():
-         features = encoder(x.cpu()).to(device)
+         features = encoder(x)
    return F.cross_entropy(model(features), y)
""",
        ("runs-elsewhere", _NEVER),
        "encoder",
    ),
    "parameter_to_device": _fault(
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
-         self.scale = nn.Parameter(torch.ones(3)).to(device)
+         self.scale = nn.Parameter(torch.ones(3, device=device))
    def forward(self, x):
        return self.inner(x) * self.scale
model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters())
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
""",
        "parameter-moved",
        "scale",
        "L:nn.Parameter(torch.ones(3)).to(device)",
        net=False,
    ),
    "device_of_an_argument": _fault(
        """\
import argparse
parser = argparse.ArgumentParser()
- parser.add_argument("--device", default="cpu")
+ parser.add_argument("--device", default="cuda")
device = torch.device(parser.parse_known_args()[0].device)
model = nn.Linear(4, 3).to(device)
optimizer = torch.optim.Adam(model.parameters())
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
""",
        _NEVER,
        "L:torch.device(parser.parse_known_args()[0].device)",
        net=False,
    ),
    "condition_inverted": _fault(
        """\
- device = "cpu" if torch.cuda.is_available() else "cuda"
+ device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(4, 3).to(device)
optimizer = torch.optim.Adam(model.parameters())
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
""",
        _NEVER,
        'L:device = "cpu" if torch.cuda.is_available() else "cuda"',
        net=False,
    ),
    "loss_read_each_step": _fault(
        """\
total = 0.0
def loss_of(x, y):
    global total
    loss = F.cross_entropy(model(x), y)
-     total += loss.item()
+     total += loss.detach()
    return loss
""",
        "host-waits",
        "L:loss.item()",
    ),
}
