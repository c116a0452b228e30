"""Small programs on a simulated GPU and a real CPU: right ones run, wrong ones fail as on a GPU.

Each checks with `assert` what it must see.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.devices.hosted import hosted

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there"),
]

RIGHT = {
    "autocast": """\
model = nn.Linear(4, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
half = torch.ones(4, 4, device="cuda", dtype=torch.float16)
for _ in range(2):
    with torch.autocast("cuda"):
        out = model(torch.ones(2, 4, device="cuda")) @ half
        assert out.dtype == torch.float16
        loss = F.cross_entropy(out, torch.tensor([1, 2]).cuda())
        assert loss.dtype == torch.float32
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    assert model.weight.grad.dtype == torch.float32
    scaler.step(optimizer)
    scaler.update()
assert optimizer.state[model.weight]["step"] == 2
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert model(torch.ones(2, 4, device="cuda")).dtype == torch.bfloat16
    with torch.autocast("cuda", enabled=False):
        assert model(torch.ones(2, 4, device="cuda")).dtype == torch.float32
""",
    "pinned memory": """\
from torch.utils.data import DataLoader
x = torch.randn(8, 4)
pinned = x.pin_memory()
assert pinned.is_pinned() and not x.is_pinned() and pinned.pin_memory() is pinned
assert pinned[2:].is_pinned() and not pinned.cuda().is_pinned()
assert torch.equal(x, pinned) and x.data_ptr() != pinned.data_ptr()
assert torch.empty(3, pin_memory=True).is_pinned() and not torch.empty(3).is_pinned()
assert torch.randn(2, 3, pin_memory=True).is_pinned()
assert torch.zeros_like(x, pin_memory=True).is_pinned()
assert all(each.is_pinned() for each in DataLoader(x, batch_size=4, pin_memory=True))
assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), x)
""",
    "functions of torch in TorchScript": """\
@torch.jit.script
def noisy(x):
    return x + torch.randn(3, device=x.device) + torch.zeros(3, device=x.device)
assert noisy(torch.ones(2, 3, device="cuda")).is_cuda
""",
    "conditions": """\
loss = torch.ones(3, device="cuda").sum()
assert torch.isfinite(loss)
assert not torch.isnan(loss) and not torch.isinf(loss)
assert not (torch.isnan(loss) | torch.isinf(loss)).any()
labels = torch.randint(0, 4, (8,), device="cuda")
assert (labels < 4).all() and labels.min() >= 0
assert not loss > 10
assert torch.allclose(loss, loss)
""",
    "values": """\
torch.manual_seed(1)
here = nn.Linear(4, 4)
there = copy.deepcopy(here).cuda()
x = torch.randn(5, 4)
assert torch.equal(here(x), there(x.cuda()).cpu())
F.cross_entropy(here(x), torch.arange(5) % 4).backward()
F.cross_entropy(there(x.cuda()), torch.arange(5).cuda() % 4).backward()
assert torch.equal(here.weight.grad, there.weight.grad.cpu())
done = x.cuda().abs()
while done.mean() > 0.1:
    done *= 0.5
assert done.sum().item() == done.cpu().sum().item()
""",
    "numbers": """\
x = torch.arange(5).cuda()
for each in (x % 4, x | 1, 7 % (x + 1), torch.fmod(x, 2), torch.xlogy(x, 2), x ** 2, x * 1.5):
    assert each.is_cuda
assert (x.sum() % 4).item() == 2 and (x[1].half() * 1.5).dtype == torch.float16
assert (x + torch.tensor(1)).is_cuda and x.clamp(1, 3).is_cuda
assert torch.where(x > 1, torch.tensor(0.0), torch.tensor(1.0)).is_cuda
""",
    "data": """\
model = nn.Linear(4, 4)
kept = list(model.parameters())
optimizer = torch.optim.Adam(model.parameters())
for parameter in model.parameters():
    parameter.data = parameter.data.to("cuda")
assert all(a is b and a.is_cuda for a, b in zip(kept, model.parameters()))
step(model, optimizer)
x = torch.zeros(3, 3, device="cuda")
x[range(3), torch.tensor([0, 1, 2])] = 1.0
assert x.trace() == 3 and x[torch.tensor([0])].is_cuda
""",
    "sparse": """\
eye = torch.eye(4).to_sparse().to("cuda")
assert torch.equal(torch.sparse.mm(eye, torch.ones(4, 3, device="cuda")).cpu(), torch.ones(4, 3))
table = nn.Embedding(5, 3, sparse=True).to("cuda")
table(torch.tensor([1, 2], device="cuda")).sum().backward()
torch.optim.SparseAdam(table.parameters()).step()
assert table.weight.grad.is_sparse and table.weight.grad.is_cuda
""",
    "attention": """\
q = torch.randn(2, 2, 4, 8, device="cuda", requires_grad=True)
with torch.autocast("cuda", dtype=torch.bfloat16):
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert out.dtype == torch.bfloat16 and out.is_cuda
grad, = torch.autograd.grad(out.float().sum(), q, create_graph=True)
grad.sum().backward()
layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
model(torch.randn(2, 5, 16, device="cuda")).sum().backward()
""",
    "scripted": """\
net = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU())).to("cuda")
assert net(torch.randn(2, 3, device="cuda")).is_cuda
net(torch.randn(2, 3, device="cuda")).sum().backward()
assert next(net.parameters()).grad.is_cuda
""",
    "threads": """\
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(lambda: torch.ones(2).cuda()).result().is_cuda
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * torch.full((), 2.0, device="cuda")
x = torch.ones(3, device="cuda", requires_grad=True)
Twice.apply(x).sum().backward()
assert x.grad.tolist() == [2, 2, 2]
""",
    "forks": """\
import os
reading, writing = os.pipe()
if not os.fork():
    try:
        torch.ones(2, device="cuda")
        os.write(writing, b"used")
    finally:
        os._exit(0)
os.close(writing)
assert os.read(reading, 9) == b"used"
torch.ones(2, device="cuda")
reading, writing = os.pipe()
if not os.fork():
    try:
        torch.ones(2, device="cuda")
    except RuntimeError as error:
        os.write(writing, str(error).encode())
    finally:
        os._exit(0)
os.close(writing)
assert os.read(reading, 99).startswith(b"Cannot re-initialize CUDA in forked")
""",
    "distributions": """\
from torch.distributions import Categorical, Normal
loc = torch.randn(8, 4, device="cuda", requires_grad=True)
Normal(loc, loc.exp()).rsample().sum().backward()
action = Categorical(torch.softmax(loc, -1)).sample()
assert action[0].item() in range(4)
""",
    "numpy": """\
import numpy as np
x = torch.ones(3, device="cuda", requires_grad=True)
assert x.detach().cpu().numpy().shape == (3,)
assert np.array(x.detach().cpu()).shape == (3,)
assert len(x.tolist()) == 3 and isinstance(x.sum().item(), float)
""",
    "saving": """\
import io
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
optimizer = torch.optim.Adam(model.parameters())
step(model, optimizer)
torch.save({"model": model, "optimizer": optimizer.state_dict()}, "both.pt")
again = torch.load("both.pt", weights_only=False)
assert again["model"][0].weight.is_cuda
assert torch.equal(again["model"][0].weight, model[0].weight)
step(again["model"], torch.optim.SGD(again["model"].parameters(), lr=0.1))
here = torch.load("both.pt", map_location="cpu", weights_only=False)
assert here["model"][0].weight.device.type == "cpu"
optimizer.load_state_dict(again["optimizer"])
held = io.BytesIO()
torch.save(model.state_dict(), held)
held.seek(0)
assert b"cuda:0" in held.getvalue() and b"privateuseone" not in held.getvalue()
model.load_state_dict(torch.load(held))
""",
    "moved_within_a_graph": """\
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters())
before = list(model.parameters())
out = model(torch.randn(2, 4))
model.to("cuda")
assert all(a is b for a, b in zip(before, model.parameters()))
assert all(a.is_cuda for a in before)
step(model, optimizer)
assert len(optimizer.state) == 4
""",
    "recurrent_moved_within_a_graph": """\
model = nn.LSTM(4, 4)
out = model(torch.randn(2, 4))
model.cuda()
model(torch.ones(2, 4, device="cuda"))[0].sum().backward()
assert model.weight_ih_l0.grad is not None
""",
    "asking": """\
assert torch.cuda.get_device_name(0)
torch.cuda.set_device(0)
torch.cuda.manual_seed_all(1)
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.memory_allocated() >= 0 and torch.cuda.memory_stats()["x"] >= 0
assert torch.cuda.mem_get_info()[1] and torch.cuda.get_device_properties(0).total_memory
assert torch.cuda.is_initialized()
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
stream = torch.cuda.Stream()
start.record()
with torch.cuda.device(0), torch.cuda.stream(stream):
    x = torch.ones(3).cuda(0)
torch.cuda.current_stream().wait_stream(stream)
x.record_stream(torch.cuda.current_stream())
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
torch.cuda.nvtx.range_push("a")
torch.cuda.nvtx.range_pop()
with torch.random.fork_rng(), torch.backends.cudnn.flags(enabled=False):
    torch.backends.cudnn.benchmark = True
torch.cuda.empty_cache()
assert torch.ones(3).pin_memory().cuda(non_blocking=True).is_cuda
if hasattr(torch, "accelerator"):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "cuda"
""",
    "making": """\
generator = torch.Generator("cuda").manual_seed(1)
assert generator.device.type == "cuda" and isinstance(generator, torch.Generator)
assert isinstance(torch.default_generator, torch.Generator)
assert torch.randn(3, device="cuda", generator=generator).is_cuda
assert torch.randn(3, generator=torch.Generator().manual_seed(1)).device.type == "cpu"
torch.ones(3, device="cuda").normal_(generator=generator)
x = torch.cuda.FloatTensor(2, 4).fill_(0)
assert x.is_cuda and isinstance(x, torch.cuda.FloatTensor)
assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)
assert torch.cuda.LongTensor([1, 2]).dtype == torch.int64
assert torch.ones(2).type(torch.cuda.HalfTensor).dtype == torch.float16
assert torch.ones(2).type("torch.cuda.FloatTensor").is_cuda
assert x.type() == "torch.cuda.FloatTensor" and torch.ones(2).type() == "torch.FloatTensor"
assert torch.ones(2, device=0).is_cuda and torch.ones(2).to(0).is_cuda
assert nn.Linear(2, 2).to(0).weight.is_cuda and nn.Linear(2, 2).cuda(0).weight.is_cuda
torch.set_default_device("cuda")
assert torch.ones(2).is_cuda and nn.Linear(2, 2).weight.is_cuda
""",
    "parallel": """\
model = nn.DataParallel(nn.Linear(4, 4)).cuda()
assert model(torch.ones(2, 4)).is_cuda
step(model, torch.optim.AdamW(model.parameters(), fused=True))
""",
}


def test_right_programs_run(tmp_path: Path) -> None:
    found = hosted(RIGHT, tmp_path)
    assert {name: each["error"] for name, each in found.items() if each["error"]} == {}


#: The end of each, and how what it raises begins.
WRONG = {
    "name": ("fake_loss(x)", "NameError"),
    "key": ("{'fake': 1}['lazy']", "KeyError"),
    "attribute": ("nn.Linear(1, 1).fake", "AttributeError"),
    "said": ("raise RuntimeError('a fake image is not an accelerator')", "RuntimeError"),
    "path": ("open('/nowhere/fake/lazy.pt')", "FileNotFoundError"),
    "quoted": ("int('fake')", "ValueError"),
    "numpy": ("x.numpy()", "TypeError: can't convert cuda:0 device type tensor to numpy."),
    "array": ("import numpy; numpy.array(x)", "TypeError: can't convert cuda:0 device"),
    "array_of_cpu": (
        "x.requires_grad_().cpu().numpy()",
        "RuntimeError: Can't call numpy() on Tensor that requires grad.",
    ),
    "dtypes": ("x.double() @ x", "RuntimeError: expected m1 and m2 to have the same dtype"),
    "integers": ("x.long() @ x.long()", "RuntimeError: \"mm_cuda\" not implemented for 'Long'"),
    "indices": ("torch.ones(3)[x[0].long()]", "RuntimeError: indices should be either on cpu"),
    "put": ("torch.ones(3, 3)[[0, 1, 2]] = x", "RuntimeError: Expected all"),
    "put_there": ("x[torch.tensor([0])] = torch.ones(1, 3)", "RuntimeError: Expected all tensors"),
    "generator": (
        "torch.randn(3, device='cuda', generator=torch.Generator())",
        "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "generator_there": (
        "torch.utils.data.random_split(range(4), [2, 2], generator=torch.Generator('cuda'))",
        "RuntimeError: Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "two_numbers": (
        "torch.addcmul(x, torch.tensor(1.0), torch.tensor(2.0))",
        "RuntimeError: Expected all tensors",
    ),
    "parallel_elsewhere": (
        "p = nn.DataParallel(nn.Linear(4, 4)); p.src_device_obj = torch.device('cuda', 1); p(x)",
        "RuntimeError: module must have its parameters and buffers on device cuda:1 (device_ids[0])"
        " but found one of them on device: cuda:0",
    ),
    "lengths": (
        "nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 1]).cuda(), batch_first=True)",
        "RuntimeError: 'lengths' argument should be a 1D CPU int64 tensor",
    ),
    "numbers": ("x.clamp(min=torch.zeros(3))", "RuntimeError: Expected all tensors"),
    "stack": ("torch.stack([x[0, 0], torch.tensor(1.0)])", "RuntimeError: Expected all tensors"),
    "attention": (
        "F.scaled_dot_product_attention(x, x.cpu(), x)",
        "RuntimeError: Expected query, key, and value to have the same device type",
    ),
    "parallel": (
        "nn.DataParallel(nn.Linear(3, 3)).cpu()(x)",
        "RuntimeError: module must have its parameters and buffers on device cuda:0",
    ),
    "hook": (
        "w = torch.ones(3, device='cuda', requires_grad=True); h = lambda g: g * torch.ones(3); "
        "w.register_hook(h); (w * x).sum().backward()",
        "RuntimeError: Expected all tensors",
    ),
    "hook_of_a_module": (
        "m = nn.Linear(3, 3).cuda(); m.register_full_backward_hook(lambda *_: {}['gone']); "
        "m(x.requires_grad_()).sum().backward()",
        "KeyError: 'gone'",
    ),
    "hook_before_a_pass_within": (
        "from torch.utils.checkpoint import checkpoint; "
        "h = checkpoint(nn.Linear(3, 3).cuda(), x.requires_grad_(), use_reentrant=True); "
        "h.register_hook(lambda g: {}['gone']); h.sum().backward()",
        "KeyError: 'gone'",
    ),
    "another": ("torch.ones(3, device='cuda:1')", "RuntimeError: CUDA error: invalid device"),
    "second": (
        "nn.DataParallel(nn.Linear(3, 3).cuda(), device_ids=[0, 1])",
        "RuntimeError: CUDA error: invalid device",
    ),
    "current": ("torch.cuda.set_device(1)", "RuntimeError: CUDA error: invalid device"),
    "shapes_after_a_value": ("x.sum().item(); nn.Linear(4, 4).cuda()(x)", "RuntimeError"),
    "name_after_a_value": ("x.sum().item(); fake_loss(x)", "NameError"),
    "key_after_a_value": ("x.sum().item(); {}['label']", "KeyError"),
}


@pytest.mark.slow
def test_wrong_programs_are_not_excused(tmp_path: Path) -> None:
    begin = 'x = torch.ones(3, 3, device="cuda")\n'
    found = hosted({name: begin + end for name, (end, _) in WRONG.items()}, tmp_path)
    for name, (_, error) in WRONG.items():
        assert str(found[name]["error"]).startswith(error), (name, found[name])
        assert found[name]["excuse"] is None, (name, found[name])


#: What the simulation lacks, which is not the program's fault.
EXCUSED = {
    "graph": ("torch.cuda.CUDAGraph()", "CUDAGraph"),
    "storage": ("torch.ones(3).cuda().untyped_storage().resize_(9)", "a storage that changes"),
    "compressed": (
        "torch.eye(4).to_sparse_csr().to('cuda') @ torch.ones(4).cuda()",
        "aten::addmv.out is not simulated",
    ),
}


@pytest.mark.slow
def test_what_cant_be_simulated_is_excused(tmp_path: Path) -> None:
    found = hosted({name: program for name, (program, _) in EXCUSED.items()}, tmp_path)
    for name, (_, said) in EXCUSED.items():
        assert said in str(found[name]["excuse"]), (name, found[name])
        assert "privateuse" not in found[name]["excuse"].lower(), found[name]
