"""Programs that were written before doctor was mended for others: each right, and with one fault.

They hold doctor's rules to what they were not made for. The notation is that of `device_faults`.
"""

from __future__ import annotations

from tests.making.device_faults import Fault

_BEGIN = """\
import argparse, os
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(1)
"""
_DEVICE = 'device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")\n'

_BATCH, _MADE, _HIDDEN = "batch-never-moved", "made-elsewhere", "unregistered-tensor"
_NEVER, _OPERAND = "model-never-moved", "operand-elsewhere"


def _fault(body: str, causes: tuple[str, ...] | str, *texts: str, device: bool = True) -> Fault:
    program = _BEGIN + (_DEVICE if device else "") + body
    return Fault(program, (causes,) if isinstance(causes, str) else causes, texts)


FAULTS: dict[str, Fault] = {
    "flag_read_wrongly": _fault(
        """\
class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 36, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 1)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)

def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-cuda", action="store_true", default=False)
    parser.add_argument("--epochs", type=int, default=2)
    args, _ = parser.parse_known_args()
-     use_cuda = args.no_cuda and torch.cuda.is_available()
+     use_cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    images = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,)))
    loader = DataLoader(images, batch_size=8, shuffle=True)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, loader, optimizer, epoch)

main()
""",
        _NEVER,
        'L:device = torch.device("cuda" if use_cuda else "cpu")',
        device=False,
    ),
    "device_of_the_environment": _fault(
        """\
- DEVICE = os.environ.get("TRAIN_DEVICE", "cpu")
+ DEVICE = os.environ.get("TRAIN_DEVICE", "cuda")

class Trainer:
    def __init__(self, model, device):
        self.device = device
        self.model = model.to(device)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.01)

    def fit(self, loader):
        for x, y in loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = F.mse_loss(self.model(x).squeeze(-1), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

loader = DataLoader(TensorDataset(torch.randn(24, 5), torch.randn(24)), batch_size=8)
Trainer(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), DEVICE).fit(loader)
""",
        _NEVER,
        'os.environ.get("TRAIN_DEVICE", "cpu")',
        device=False,
    ),
    "gpu_number_not_given": _fault(
        """\
parser = argparse.ArgumentParser()
- parser.add_argument("--gpu", type=int, default=-1)
+ parser.add_argument("--gpu", type=int, default=0)
args, _ = parser.parse_known_args()
model = nn.LSTM(6, 12, num_layers=2)
head = nn.Linear(12, 2)
if args.gpu >= 0:
    model.cuda(args.gpu)
    head.cuda(args.gpu)
params = list(model.parameters()) + list(head.parameters())
optimizer = optim.RMSprop(params, lr=1e-3)
for step in range(4):
    seq, label = torch.randn(7, 3, 6), torch.randint(2, (3,))
    if args.gpu > -1:
        seq, label = seq.cuda(args.gpu), label.cuda(args.gpu)
    out, _ = model(seq)
    loss = F.cross_entropy(head(out[-1]), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        _NEVER,
        "L:if args.gpu >= 0:",
        device=False,
    ),
    "labels_of_a_gan": _fault(
        """\
nz, batch_size = 10, 6
netG = nn.Sequential(nn.Linear(nz, 16), nn.ReLU(), nn.Linear(16, 12)).to(device)
netD = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
netD = netD.to(device)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for i in range(3):
    netD.zero_grad()
    real = torch.randn(batch_size, 12).to(device)
-     label = torch.full((batch_size,), 1.0)
+     label = torch.full((batch_size,), 1.0, device=device)
    errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(batch_size, nz, device=device))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
""",
        (_BATCH, _MADE),
        "label",
        "L:torch.full((batch_size,), 1.0)",
    ),
    "hidden_of_the_encoder": _fault(
        """\
class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size)

    def forward(self, word, hidden):
        return self.gru(self.embedding(word).view(1, 1, -1), hidden)

    def initHidden(self):
-         return torch.zeros(1, 1, self.hidden_size)
+         return torch.zeros(1, 1, self.hidden_size, device=device)

encoder = EncoderRNN(20, 8).to(device)
out = nn.Linear(8, 20).to(device)
encoder_optimizer = optim.SGD(encoder.parameters(), lr=0.01)
out_optimizer = optim.SGD(out.parameters(), lr=0.01)
criterion = nn.NLLLoss()
for iteration in range(3):
    sentence = torch.randint(20, (4, 1), device=device)
    hidden = encoder.initHidden()
    encoder_optimizer.zero_grad(); out_optimizer.zero_grad()
    loss = 0
    for word in sentence:
        output, hidden = encoder(word, hidden)
        loss = loss + criterion(F.log_softmax(out(output[0]), 1), word)
    loss.backward()
    encoder_optimizer.step(); out_optimizer.step()
""",
        (_BATCH, _MADE),
        "hidden",
        "L:torch.zeros(1, 1, self.hidden_size)",
    ),
    "positions_of_a_transformer": _fault(
        """\
class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=50):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-np.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
-         self.pe = pe
+         self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(0)]

class TransformerModel(nn.Module):
    def __init__(self, ntoken, d_model):
        super().__init__()
        self.embedding = nn.Embedding(ntoken, d_model)
        self.pos_encoder = PositionalEncoding(d_model)
        layer = nn.TransformerEncoderLayer(d_model, 2, 16, 0.1)
        self.transformer_encoder = nn.TransformerEncoder(layer, 1)
        self.linear = nn.Linear(d_model, ntoken)

    def forward(self, src):
        return self.linear(self.transformer_encoder(self.pos_encoder(self.embedding(src))))

model = TransformerModel(30, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.95)
for batch in range(3):
    data = torch.randint(30, (6, 4)).to(device)
    loss = F.cross_entropy(model(data).view(-1, 30), data.view(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
""",
        _HIDDEN,
        "pos_encoder.pe",
    ),
    "actions_of_a_memory": _fault(
        """\
from collections import deque
import random
policy_net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
target_net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory = deque([], maxlen=100)
for t in range(32):
    memory.append((np.random.rand(4), random.randrange(2), np.random.rand(4), 1.0))

def optimize_model():
    transitions = random.sample(memory, 8)
    states, actions, next_states, rewards = zip(*transitions)
    state_batch = torch.tensor(np.array(states), dtype=torch.float32, device=device)
-     action_batch = torch.tensor(actions).unsqueeze(1)
+     action_batch = torch.tensor(actions, device=device).unsqueeze(1)
    next_batch = torch.tensor(np.array(next_states), dtype=torch.float32, device=device)
    reward_batch = torch.tensor(rewards, device=device)
    state_action_values = policy_net(state_batch).gather(1, action_batch)
    with torch.no_grad():
        next_state_values = target_net(next_batch).max(1).values
    expected = next_state_values * 0.99 + reward_batch
    loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

for i_episode in range(3):
    optimize_model()
""",
        (_BATCH, _MADE, _OPERAND),
        "action_batch",
        "L:torch.tensor(actions).unsqueeze(1)",
    ),
    "resumed_before_moving": _fault(
        """\
def build():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))

first = build()
opt = optim.Adam(first.parameters())
first(torch.randn(2, 6)).sum().backward()
opt.step()
checkpoint = {"model": first.state_dict(), "optimizer": opt.state_dict(), "epoch": 3}

net = build()
- optimizer = optim.Adam(net.parameters())
- net.load_state_dict(checkpoint["model"])
- optimizer.load_state_dict(checkpoint["optimizer"])
- net = net.to(device)
+ net = net.to(device)
+ optimizer = optim.Adam(net.parameters())
+ net.load_state_dict(checkpoint["model"])
+ optimizer.load_state_dict(checkpoint["optimizer"])
for epoch in range(checkpoint["epoch"], 6):
    x = torch.randn(4, 6, device=device)
    loss = net(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "state-elsewhere",
        "exp_avg",
    ),
    "head_of_a_pretrained_model": _fault(
        """\
class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 1000)

    def forward(self, x):
        x = self.avgpool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(x, 1))

model_ft = Backbone()
model_ft = model_ft.to(device)
for param in model_ft.parameters():
    param.requires_grad = False
- model_ft.fc = nn.Linear(4, 2)
+ model_ft.fc = nn.Linear(4, 2).to(device)
optimizer_ft = optim.SGD(model_ft.fc.parameters(), lr=0.001, momentum=0.9)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    images = TensorDataset(torch.randn(8, 3, 8, 8), torch.ones(8).long())
    for inputs, labels in DataLoader(images, 4):
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer_ft.zero_grad()
        with torch.set_grad_enabled(True):
            loss = criterion(model_ft(inputs), labels)
            loss.backward()
            optimizer_ft.step()
""",
        ("partly-moved",),
        "fc.weight",
    ),
    "weights_of_an_own_loss": _fault(
        """\
class FocalLoss:
    def __init__(self, alpha, gamma=2.0):
-         self.alpha = torch.tensor(alpha)
+         self.alpha = torch.tensor(alpha, device=device)
        self.gamma = gamma

    def __call__(self, logits, targets):
        ce = F.cross_entropy(logits, targets, reduction="none")
        pt = torch.exp(-ce)
        return (self.alpha.gather(0, targets) * (1 - pt) ** self.gamma * ce).mean()

model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).to(device)
criterion = FocalLoss([0.2, 0.3, 0.5])
optimizer = optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x, y = torch.randn(5, 4, 4, device=device), torch.randint(3, (5,), device=device)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        (_MADE, _OPERAND, _BATCH, _HIDDEN),
        "alpha",
        "L:torch.tensor(alpha)",
    ),
    "noise_of_an_autoencoder": _fault(
        """\
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(20, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.fc3, self.fc4 = nn.Linear(2, 8), nn.Linear(8, 20)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
-         eps = torch.randn(std.size())
+         eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for data, in DataLoader(TensorDataset(torch.rand(32, 20)), batch_size=8):
    data = data.to(device)
    optimizer.zero_grad()
    recon, mu, logvar = model(data)
    BCE = F.binary_cross_entropy(recon, data, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    (BCE + KLD).backward()
    optimizer.step()
""",
        _MADE,
        "eps",
        "L:torch.randn(std.size())",
    ),
    "teacher_left_behind": _fault(
        """\
def make(width):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))

teacher, student = make(32), make(8)
- teacher.eval()
+ teacher.eval().to(device)
student.to(device)
optimizer = optim.Adam(student.parameters())
T = 2.0
for step in range(3):
    inputs = torch.randn(5, 6).to(device)
    with torch.no_grad():
        soft_targets = F.softmax(teacher(inputs) / T, dim=-1)
    soft_prob = F.log_softmax(student(inputs) / T, dim=-1)
    loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        _NEVER,
        "teacher",
    ),
    "validation_between_epochs": _fault(
        """\
train_set = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
val_set = TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))
train_loader, val_loader = DataLoader(train_set, 4, shuffle=True), DataLoader(val_set, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
loss_fn = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=0.1)

def run_epoch(loader, training):
    model.train(training)
    total = 0.0
    for X, y in loader:
-         if training:
+         if True:
            X, y = X.to(device), y.to(device)
        pred = model(X)
        loss = loss_fn(pred, y)
        if training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += loss.detach()
    return total / len(loader)

for epoch in range(2):
    run_epoch(train_loader, True)
    run_epoch(val_loader, False)
""",
        _BATCH,
        "X",
        "L:pred = model(X)",
    ),
    "rows_of_an_identity": _fault(
        """\
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x):
        return torch.sigmoid(self.net(x))

net = Classifier().to(device)
opt = optim.Adam(net.parameters())
for i in range(3):
    x = torch.randn(6, 10, device=device)
    labels = torch.randint(0, 5, (6,), device=device)
-     onehot = torch.eye(5)[labels]
+     onehot = torch.eye(5, device=device)[labels]
    loss = F.binary_cross_entropy(net(x), onehot)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        (_MADE, _OPERAND, _BATCH),
        "L:torch.eye(5)[labels]",
    ),
    "mean_of_the_losses": _fault(
        """\
model = nn.Linear(3, 1).to(device)
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    losses = []
    for _ in range(3):
        x = torch.randn(4, 3, device=device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
-         losses.append(loss.detach())
+         losses.append(loss.item())
    print("epoch", epoch, "loss", np.mean(losses))
""",
        "host-value",
        "L:np.mean(losses))",
    ),
}
