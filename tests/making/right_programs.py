"""Right programs that something may take for wrong."""

from __future__ import annotations

from tests.making.device_faults import BEGIN, NET, TRAIN

RIGHT: dict[str, str] = {
    "data_of_parameters": BEGIN
    + NET.replace(".to(device)", "")
    + """\
for parameter in model.parameters():
    parameter.data = parameter.data.to(device)
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
"""
    + TRAIN,
    "sparse": BEGIN
    + NET
    + """\
adjacency = torch.eye(8).to_sparse().to(device)
def loss_of(x, y):
    return F.cross_entropy(torch.sparse.mm(adjacency, model(x)), y)
"""
    + TRAIN,
    "assignment_by_ranges": BEGIN
    + NET
    + """\
def loss_of(x, y):
    target = torch.zeros(8, 3, device=device)
    target[range(8), y.cpu()] = 1.0
    return F.mse_loss(model(x), target)
"""
    + TRAIN,
    "autocast": BEGIN
    + """\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 48), nn.Linear(16, 3)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))
    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(out.squeeze(1)) * self.mask[:1, :1]
model = torch.compile(Block().to(device))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(3):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x.pin_memory().to(device, non_blocking=True)), y.to(device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    "penalty_of_gradients": BEGIN
    + """\
critic = nn.LSTM(4, 8).to(device)
optimizer = torch.optim.RMSprop(critic.parameters())
for step in range(3):
    x = torch.randn(5, 2, 4, device=device, requires_grad=True)
    grad, = torch.autograd.grad(critic(x)[0].sum(), x, create_graph=True)
    ((grad.norm(2) - 1) ** 2).backward()
    optimizer.step()
""",
}
