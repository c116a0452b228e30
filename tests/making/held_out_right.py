"""Right programs that were written before doctor was mended for others."""

from __future__ import annotations

from tests.making.held_out_faults import _BEGIN, _DEVICE

_PROGRAMS: dict[str, str] = {
    "digits_with_a_test": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.dropout = nn.Conv2d(1, 4, 3), nn.Dropout(0.25)
        self.fc = nn.Linear(4 * 9, 10)

    def forward(self, x):
        x = self.dropout(F.max_pool2d(F.relu(self.conv1(x)), 2))
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)

def test(model, device, test_loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()

data = TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(10, (16,)))
train_loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1, pin_memory=True)
test_loader = DataLoader(data, batch_size=8)
model = Net().to(device)
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(2):
    model.train()
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    test(model, device, test_loader)
    scheduler.step()
import tempfile
with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), folder + "/mnist_cnn.pt")
""",
    "policy_gradient": """\
policy = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.6), nn.ReLU(), nn.Linear(16, 2)).to(device)
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
from torch.distributions import Categorical
for episode in range(3):
    state, log_probs, rewards = np.random.rand(4), [], []
    for t in range(4):
        probs = F.softmax(policy(torch.from_numpy(state).float().unsqueeze(0).to(device)), dim=1)
        m = Categorical(probs)
        action = m.sample()
        log_probs.append(m.log_prob(action))
        state, reward = np.random.rand(4), float(action.item())
        rewards.append(reward)
    returns = torch.tensor(np.cumsum(rewards[::-1])[::-1].copy()).float()
    returns = (returns - returns.mean()) / (returns.std() + 1e-5)
    loss = torch.cat([-p * r for p, r in zip(log_probs, returns)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "masks_of_a_transformer": """\
model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).to(device)
embed = nn.Embedding(12, 8, padding_idx=0).to(device)
out = nn.Linear(8, 12).to(device)
params = [*model.parameters(), *embed.parameters(), *out.parameters()]
optimizer = optim.Adam(params, betas=(0.9, 0.98), eps=1e-9)
for step in range(3):
    src, tgt = torch.randint(1, 12, (2, 5)).to(device), torch.randint(1, 12, (2, 4)).to(device)
    src[0, -1] = 0
    mask = nn.Transformer.generate_square_subsequent_mask(3, device=device)
    hidden = model(embed(src), embed(tgt[:, :-1]), tgt_mask=mask, tgt_is_causal=True,
                   src_key_padding_mask=(src == 0), memory_key_padding_mask=(src == 0))
    loss = F.cross_entropy(out(hidden).transpose(1, 2), tgt[:, 1:], ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "packed_sequences": """\
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

def collate(batch):
    lengths = torch.tensor([len(each) for each in batch])
    return pad_sequence(batch, batch_first=True), lengths

data = [torch.randint(1, 9, (n,)) for n in (3, 5, 2, 4, 1, 6)]
embed, fc = nn.Embedding(9, 6), nn.Linear(14, 2)
lstm = nn.LSTM(6, 7, batch_first=True, bidirectional=True)
model = nn.ModuleList([embed, lstm, fc]).to(device)
optimizer = optim.Adam(model.parameters())
for padded, lengths in DataLoader(data, batch_size=2, collate_fn=collate):
    padded = padded.to(device)
    packed = pack_padded_sequence(embed(padded), lengths, batch_first=True, enforce_sorted=False)
    output, lens = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    last = output[torch.arange(len(lens)), lens - 1]
    loss = fc(last).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "triplets": """\
class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 4))

    def forward(self, *inputs):
        return [F.normalize(self.net(each)) for each in inputs]

model = Embedder().to(device)
criterion = nn.TripletMarginLoss(margin=1.0)
optimizer = optim.Adagrad(model.parameters())
for _ in range(3):
    anchor, positive, negative = (each.to(device) for each in torch.randn(3, 6, 8))
    loss = criterion(*model(anchor, positive, negative))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
""",
    "accumulated_gradients": """\
model = nn.Sequential(
    nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.LazyLinear(3)
)
model(torch.randn(1, 2, 8))
model = model.to(device)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
accumulation = 2
for i in range(8):
    x, y = torch.randn(4, 2, 8, device=device), torch.randint(3, (4,), device=device)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1) / accumulation
    loss.backward()
    if (i + 1) % accumulation == 0:
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
""",
    "averaged_weights": """\
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(device)
swa_model = AveragedModel(model)
optimizer = optim.SGD(model.parameters(), lr=0.1)
swa_scheduler = SWALR(optimizer, swa_lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(16, 5), torch.randn(16, 1)), batch_size=4)
for epoch in range(2):
    for x, y in loader:
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    swa_model.update_parameters(model)
    swa_scheduler.step()
update_bn(loader, swa_model, device=device)
""",
    "saved_and_resumed": """\
import tempfile
def build():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1)).to(device)
    return model, optim.Adam(model.parameters(), lr=0.01)

def steps(model, optimizer, n):
    for _ in range(n):
        loss = model(torch.randn(3, 4, device=device)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model, optimizer = build()
steps(model, optimizer, 1)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(),
                "rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state_all()}, path)
    checkpoint = torch.load(path, map_location=device)
    model, optimizer = build()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optim"])
    torch.set_rng_state(checkpoint["rng"].cpu())
steps(model, optimizer, 3)
""",
    "own_batches": """\
class Texts(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, n):
        return {"ids": torch.arange(n % 4 + 1), "label": n % 2}

class Batch:
    def __init__(self, items):
        self.ids = nn.utils.rnn.pad_sequence([each["ids"] for each in items], batch_first=True)
        self.label = torch.tensor([each["label"] for each in items])

    def to(self, device):
        self.ids, self.label = self.ids.to(device), self.label.to(device)
        return self

model = nn.Sequential(nn.EmbeddingBag(8, 6), nn.Linear(6, 2)).to(device)
optimizer = optim.NAdam(model.parameters())
for batch in DataLoader(Texts(), batch_size=4, collate_fn=Batch, num_workers=2):
    batch = batch.to(device)
    loss = F.cross_entropy(model(batch.ids), batch.label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "memory_on_the_host": """\
class ReplayBuffer:
    def __init__(self, capacity):
        self.states = torch.zeros(capacity, 3)
        self.values = torch.zeros(capacity)
        self.n = 0

    def add(self, state, value):
        self.states[self.n], self.values[self.n] = state, value
        self.n += 1

    def sample(self, count):
        at = torch.randint(self.n, (count,))
        return self.states[at].to(device), self.values[at].to(device)

critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = optim.Adam(critic.parameters())
buffer = ReplayBuffer(64)
for _ in range(16):
    state = torch.randn(3)
    with torch.no_grad():
        value = critic(state.to(device)).squeeze()
    buffer.add(state, value.cpu())
for _ in range(3):
    states, values = buffer.sample(8)
    loss = F.huber_loss(critic(states).squeeze(-1), values)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "closures": """\
model = nn.Linear(6, 2).to(device)
optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
x, y = torch.randn(10, 6).to(device), torch.randint(2, (10,)).to(device)

def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss

for i in range(2):
    optimizer.step(closure)
""",
    "images_there_and_back": """\
class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.InstanceNorm2d(4), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Sigmoid())

    def forward(self, x):
        z = self.down(x)
        return self.up(F.interpolate(z, scale_factor=1.0, mode="bilinear"))

net = AutoEncoder().to(device, memory_format=torch.channels_last)
opt = optim.Adam(net.parameters())
mean, std = torch.tensor([0.5], device=device), torch.tensor([0.25], device=device)
for epoch in range(2):
    for (img,) in DataLoader(TensorDataset(torch.rand(8, 1, 8, 8)), 4, drop_last=True):
        img = img.cuda(non_blocking=True)
        out = net((img - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1))
        opt.zero_grad()
        F.l1_loss(out, img).backward()
        opt.step()
    sample = out[0].detach().cpu().numpy().transpose(1, 2, 0)
    assert sample.shape == (8, 8, 1)
""",
    "large_table_on_the_host": """\
table = nn.EmbeddingBag(1000, 8, mode="mean", sparse=True)  # too large for the GPU
dense = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
sparse_optimizer = optim.SparseAdam(list(table.parameters()), lr=0.01)
optimizer = optim.Adam(dense.parameters(), lr=0.01)
for _ in range(3):
    ids, click = torch.randint(1000, (6, 3)), torch.rand(6, 1).round().to(device)
    loss = F.binary_cross_entropy_with_logits(dense(table(ids).to(device)), click)
    optimizer.zero_grad(); sparse_optimizer.zero_grad()
    loss.backward()
    optimizer.step(); sparse_optimizer.step()
""",
    "features_computed_before": """\
encoder = nn.Sequential(nn.Linear(12, 6), nn.ReLU()).eval()
images = torch.randn(24, 12)
with torch.no_grad():
    features = torch.cat([encoder(each) for each in images.split(4)])
head = nn.Linear(6, 3).to(device)
optimizer = optim.Adam(head.parameters())
labels = torch.randint(3, (24,))
for x, y in DataLoader(TensorDataset(features, labels), batch_size=8, shuffle=True):
    loss = F.cross_entropy(head(x.to(device)), y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "metrics_of_an_epoch": """\
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleDict({"user": nn.Embedding(10, 4), "item": nn.Embedding(10, 4)})
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        user, item = self.emb["user"](batch["user"]), self.emb["item"](batch["item"])
        return (user * item).sum(-1) + self.bias

model = Wide().to(device)
optimizer = optim.Adam(model.parameters())
for epoch in range(2):
    scores, truth = [], []
    for _ in range(2):
        batch = {"user": torch.randint(10, (4,)), "item": torch.randint(10, (4,))}
        batch["y"] = torch.rand(4)
        batch = {key: value.to(device) for key, value in batch.items()}
        out = model(batch)
        loss = F.mse_loss(out, batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scores.append(out.detach())
        truth.append(batch["y"])
    scores, truth = torch.cat(scores).cpu().numpy(), torch.cat(truth).cpu().numpy()
    print(np.corrcoef(scores, truth)[0, 1])
""",
}
RIGHT = {name: _BEGIN + _DEVICE + body for name, body in _PROGRAMS.items()}
