"""On a real GPU: what is moved there and back is the same, bit by bit, and trains the same."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmove
from ckptmove import validate
from ckptmove.reports.validate import ALL_CHECKS
from tests.making import trial_models as rehearsing
from tests.making.trial_models import IMAGES, Convolutions
from tests.trial.test_trial import OPTIMIZERS

GPU = "cuda:0"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Tree = dict[str, Any]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def trained(device: str, optimizer: str = "AdamW") -> Tree:
    """A checkpoint of `Convolutions`, mid-training on a device."""
    torch.manual_seed(0)
    model = Convolutions().to(device)
    batch = torch.randn(4, 3, 8, 8, device=device)
    made = OPTIMIZERS[optimizer](model.parameters())
    return rehearsing.trained(model, made, lambda: batch)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was trained and saved on the GPU."""
    path = tmp_path_factory.mktemp("gpu") / "run.pt"
    torch.save(trained(GPU), path)
    return path


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was trained and saved on the CPU."""
    path = tmp_path_factory.mktemp("cpu") / "run.pt"
    torch.save(trained("cpu"), path)
    return path


def tensors(tree: object, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor by name."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree.detach()}
    pairs = tree.items() if isinstance(tree, dict) else ()
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        found |= tensors(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def content(tree: object) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Every tensor by name: dtype, shape and bytes."""
    found = {}
    for name, tensor in tensors(tree).items():
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = (tensor.dtype, tuple(tensor.shape), bytes(flat.tolist()))
    return found


def devices(tree: object) -> dict[str, str]:
    """The device of every tensor by name."""
    return {name: str(tensor.device) for name, tensor in tensors(tree).items()}


def steps(tree: object) -> set[str]:
    """The names of what counts an optimizer's steps."""
    return {name for name in tensors(tree) if name.endswith(".step")}


def resumed(tree: Tree, device: str) -> Tree:
    """What another two steps make of a checkpoint, all on one device."""
    model = Convolutions().to(device)
    model.load_state_dict(tree["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(deepcopy(tree["optimizer"]))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 8, 8, generator=generator).to(device)
    return rehearsing.trained(model, optimizer, lambda: images)


# -- inspect and relocate --------------------------------------------------------------------------


def test_inspect_tells_the_gpu(on_gpu: Path) -> None:
    manifest = ckptmove.inspect(on_gpu)
    told = {entry.name: entry.device for entry in manifest.tensors}
    assert told == devices(torch.load(on_gpu))  # without map_location: where it was saved
    assert set(told.values()) == {GPU, "cpu"}
    assert {name for name, device in told.items() if device == "cpu"} == steps(torch.load(on_gpu))


def test_to_the_cpu_and_back_nothing_changes(on_gpu: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "cpu.pt", tmp_path / "gpu.pt"
    ckptmove.relocate(on_gpu, there, to="cpu")
    ckptmove.relocate(there, back, to=GPU)
    before, between, after = (torch.load(path) for path in (on_gpu, there, back))
    assert set(devices(between).values()) == {"cpu"}
    assert devices(after) == devices(before)
    assert content(before) == content(between) == content(after)
    assert ckptmove.diff(on_gpu, back).equal


def test_what_the_cpu_trained_loads_on_the_gpu(on_cpu: Path, tmp_path: Path) -> None:
    moved = tmp_path / "gpu.pt"
    ckptmove.relocate(on_cpu, moved, to=GPU)
    before, after = torch.load(on_cpu), torch.load(moved)
    assert content(after) == content(before)
    counters = steps(after)
    assert devices(after) == {name: "cpu" if name in counters else GPU for name in tensors(before)}


def test_it_resumes_as_one_that_torch_moved(on_cpu: Path, tmp_path: Path) -> None:
    moved = tmp_path / "gpu.pt"
    ckptmove.relocate(on_cpu, moved, to=GPU)
    by_us, by_torch = torch.load(moved), torch.load(on_cpu, map_location=GPU)
    ours, theirs = resumed(by_us, GPU), resumed(by_torch, GPU)
    assert content(ours) == content(theirs)
    assert content(ours) != content(by_us)  # it did step
    assert {device for name, device in devices(ours).items() if name not in steps(ours)} == {GPU}


def test_all_moves_the_steps_too(on_cpu: Path, tmp_path: Path) -> None:
    moved = tmp_path / "gpu.pt"
    ckptmove.relocate(on_cpu, moved, to=GPU, all=True)
    after = torch.load(moved)
    assert steps(after)
    assert set(devices(after).values()) == {GPU}
    assert content(after) == content(torch.load(on_cpu))


# -- convert and load ------------------------------------------------------------------------------


def test_to_safetensors_and_back_the_tags_stay(on_gpu: Path, tmp_path: Path) -> None:
    between, back = tmp_path / "run.safetensors", tmp_path / "back.pt"
    ckptmove.convert(on_gpu, between)
    ckptmove.convert(between, back)
    before, after = torch.load(on_gpu), torch.load(back)
    assert content(after) == content(before)
    assert devices(after) == devices(before)
    named = load_file(between, device=GPU)
    assert {str(tensor.device) for tensor in named.values()} == {GPU}
    assert sorted(named) == sorted(tensors(before))


def test_load_gives_what_torch_gives(on_gpu: Path) -> None:
    ours, theirs = ckptmove.load(on_gpu), torch.load(on_gpu)
    assert content(ours) == content(theirs)
    assert devices(ours) == devices(theirs)
    assert set(devices(ckptmove.load(on_gpu, map_location="cpu")).values()) == {"cpu"}
    there = ckptmove.load(on_gpu, map_location=GPU)
    assert content(there) == content(theirs)
    assert set(devices(there).values()) == {GPU}


# -- validate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW fused", "SGD", "Adafactor"])
def test_the_whole_ladder_passes(tmp_path: Path, optimizer: str) -> None:
    source, moved = tmp_path / "run.pt", tmp_path / "gpu.pt"
    torch.save(trained("cpu", optimizer), source)
    ckptmove.relocate(source, moved, to=GPU)
    report = validate(
        moved, against=source, model=Convolutions, input=IMAGES, step="train", device=GPU
    )
    assert {each.check: each.outcome for each in report.checks} == dict.fromkeys(
        ALL_CHECKS, "passed"
    )
    assert (report.device, report.simulated) == (GPU, False)
    assert report.of("reload").data["device"] == GPU


def test_the_device_is_found_by_itself(on_gpu: Path) -> None:
    report = validate(on_gpu, model=Convolutions, input=IMAGES, step="train")
    assert report.ok
    assert report.device == GPU


def test_a_program_runs_on_the_gpu_in_its_fence(tmp_path: Path) -> None:
    """Its process may write nowhere else and open no sockets, but the driver must go on working."""
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    )
    torch.jit.script(module.eval().to(GPU)).save(str(tmp_path / "script.pt"))
    batch = (torch.ones(2, 3, 8, 8, device=GPU),)
    torch.export.save(torch.export.export(module, batch), tmp_path / "program.pt2")
    for name in ("script.pt", "program.pt2"):
        found = validate(tmp_path / name, input="float32[2,3,8,8]", step="forward", device=GPU)
        assert found.of("step").outcome == "passed", found


def test_one_flipped_bit_fails_on_the_gpu(on_gpu: Path, tmp_path: Path) -> None:
    tree = torch.load(on_gpu)
    tree["model"]["conv.weight"].view(torch.int32).view(-1)[7:8].bitwise_xor_(1)
    torch.save(tree, tmp_path / "bad.pt")
    report = validate(tmp_path / "bad.pt", against=on_gpu)
    assert report.of("reload").outcome == "passed"
    assert report.of("against").details[0].startswith("model.conv.weight: changed in 1 of 216")
