"""Small programs on a simulated GPU and a real CPU: right ones run, wrong ones fail as on a GPU.

Each checks with `assert` what it must see, except values that can't be certain.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.devices.hosted import hosted

pytestmark = [
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
    "loops": """\
tries = 0
while True:
    tries += 1
    if (torch.randn(3, device="cuda") > 2).all():
        break
done = torch.rand(3, device="cuda") + 1
while not torch.randint(0, 2, (3,), device="cuda").to(torch.bool).logical_not().any():
    pass
while done.mean() > 0.5:
    pass
""",
    "distributions": """\
from torch.distributions import Categorical, Normal
loc = torch.randn(8, 4, device="cuda", requires_grad=True)
Normal(loc, loc.exp()).rsample().sum().backward()
action = Categorical(torch.softmax(loc, -1)).sample()
assert action[0].item() in (0, 1)
""",
    "numpy": """\
import numpy as np
x = torch.ones(3, device="cuda", requires_grad=True)
assert x.detach().cpu().numpy().shape == (3,)
assert np.array(x.detach().cpu()).shape == (3,)
assert len(x.tolist()) == 3 and isinstance(x.sum().item(), float)
""",
    "saving": """\
import copy, io, os
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
optimizer = torch.optim.Adam(model.parameters())
step(model, optimizer)
torch.save(model, "m.pt")
torch.save({"model": model, "optimizer": optimizer, "n": 3}, "both.pt")
assert not os.path.exists("m.pt")
again = torch.load("m.pt", weights_only=False)
assert again is not model and again[0].weight.is_cuda
assert isinstance(again[0].weight, nn.Parameter) and again[0].weight.requires_grad
step(again, torch.optim.SGD(again.parameters(), lr=0.1))
both = torch.load("both.pt", map_location="cpu", weights_only=False)
assert both["n"] == 3 and both["model"][0].weight.device.type == "cpu"
assert both["optimizer"].param_groups[0]["params"][0] is both["model"][0].weight
held = io.BytesIO()
torch.save(model, held)
held.seek(0)
assert torch.load(held, weights_only=False)[0].weight.shape == (4, 4)
torch.save(nn.Linear(2, 2), "real.pt")
assert os.path.exists("real.pt")
model.load_state_dict(torch.load("m.pt", weights_only=False).state_dict())
""",
    "saving_under_another_name": """\
import os, shutil
from pathlib import Path
model = nn.Linear(4, 4).cuda()
Path("others").mkdir()
Path("kept.pt").write_text("of another run")
def loads(name):
    model.load_state_dict(torch.load(name))
    return True
torch.save(model.state_dict(), "kept.pt")
loads(os.path.abspath("kept.pt")) and loads("others/../kept.pt")
os.symlink("kept.pt", "link.pt")
loads("link.pt")
torch.save(model.state_dict(), "new.pt.tmp")
os.replace("new.pt.tmp", "new.pt")
loads("new.pt")
Path("new.pt").rename("newer.pt")
shutil.copy("newer.pt", "others")
os.link("newer.pt", Path("others", "linked.pt"))
loads(Path("others", "newer.pt")) and loads("others/linked.pt") and loads("newer.pt")
shutil.copyfile(src="newer.pt", dst="kept.pt")
for name in ("newer.pt", "kept.pt"):
    os.remove(name)
assert Path("kept.pt").read_text() == "of another run"
for gone in ("new.pt", "new.pt.tmp", "newer.pt"):
    try:
        torch.load(gone)
    except FileNotFoundError:
        pass
    else:
        raise AssertionError(gone)
os.rename("kept.pt", "real.txt")
shutil.copy("real.txt", "again.txt")
os.unlink("again.txt")
assert os.path.exists("real.txt") and not os.path.exists("again.txt")
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
    "dtypes": ("x.double() @ x", "RuntimeError: expected operands of the same dtype"),
    "parallel": (
        "nn.DataParallel(nn.Linear(3, 3)).cpu()(x)",
        "RuntimeError: module must have its parameters and buffers on device cuda:0",
    ),
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


#: What follows from values that are made up, or from the way that a device is played.
EXCUSED = {
    "raised": "if x.sum().item() < 2: raise ValueError('the loss is too small')",
    "asserted": "assert x.sum() > 5",
    "index": "['a'][int(x.sum())]",
    "made_key": "{5: 'a'}[int(x.sum())]",
    "divided": "1 / (x.sum().item() - 1)",
    "no_graph": "torch.cuda.CUDAGraph()",
}


def test_what_is_made_up_is_excused(tmp_path: Path) -> None:
    begin = 'x = torch.ones(3, 3, device="cuda")\n'
    found = hosted({name: begin + end for name, end in EXCUSED.items()}, tmp_path)
    assert [name for name, each in found.items() if not each["excuse"]] == [], found
    assert all(each["made_up"] for name, each in found.items() if name != "no_graph")
