"""load() to another device: bytes go there straight from the file, in blocks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove import DeviceError
from ckptmove.errors import CorruptError
from ckptmove.runtime import device_copies
from ckptmove.runtime.device_copies import DeviceCopies
from ckptmove.sources.file import File
from tests.devices.second_device import DEVICE, apart, limited

GPU = "cuda:0"
cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def tensors() -> dict[str, torch.Tensor]:
    """Many small tensors, of several dtypes, and one that is longer than a block."""
    made: dict[str, torch.Tensor] = {f"t{n}": torch.randn(n * 37 + 1, 3) for n in range(40)}
    made["long"] = torch.randn((device_copies._BLOCK >> 2) + 1001)
    made["bytes"] = torch.arange(251, dtype=torch.uint8)
    made["flags"] = torch.tensor([True, False, True])
    made["half"] = torch.randn(7, 5).bfloat16()
    return made


def check_safetensors(folder: Path, device: str) -> None:
    made = tensors()
    save_file(made, folder / "x.safetensors")
    found = ckptmove.load(folder / "x.safetensors", map_location=device)
    check_same(found, made, device)
    places = {each.untyped_storage().data_ptr() for each in found.values()}
    assert len(places) == len(made)  # each has a storage of its own
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in found.values())


def check_zip(folder: Path, device: str, *others: object) -> None:
    """The same of a file of torch.save, where some tensors share a storage."""
    made = tensors()
    views = {"turned": made["t9"].t(), "later": made["long"][-900:], "one": made["t9"][2, 1]}
    torch.save({"a": made, "b": views, "others": others}, folder / "x.pt")
    found: Any = ckptmove.load(folder / "x.pt", map_location=device)
    check_same(found["a"], made, device)
    check_same(found["b"], views, device)
    assert found["b"]["turned"].stride() == views["turned"].stride()
    for name, whole in (("turned", "t9"), ("later", "long"), ("one", "t9")):
        view, owner = found["b"][name], found["a"][whole]
        assert view.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()


def check_same(found: dict[str, Any], made: dict[str, torch.Tensor], device: str) -> None:
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert str(found[name].device) == device
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu(), tensor), name


def check_unusual(folder: Path, device: str) -> None:
    """With what only the general builder makes."""
    check_zip(folder, device, argparse.Namespace(a=1), torch.nn.Parameter(torch.ones(3)))


def check_sparse(folder: Path, device: str) -> None:
    """What is checked while it is made must be there by then."""
    torch.save({"rows": torch.eye(300).to_sparse_csr(), "after": torch.ones(9)}, folder / "x.pt")
    with torch.sparse.check_sparse_tensor_invariants():
        found: Any = ckptmove.load(folder / "x.pt", map_location=device)
    assert torch.equal(found["rows"].to("cpu").to_dense(), torch.eye(300))
    assert torch.equal(found["after"].cpu(), torch.ones(9))


@apart
def test_on_a_second_device(tmp_path: Path) -> None:
    check_safetensors(tmp_path, DEVICE)
    check_zip(tmp_path, DEVICE)
    check_unusual(tmp_path, DEVICE)


@apart
def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100_000))
    with File.open(path) as file:
        copies = DeviceCopies()
        copies.storage(90_000, torch.device(DEVICE), file, 10_000)
        path.write_bytes(bytes(50_000))
        with pytest.raises(CorruptError, match="shrank"):
            copies.finish()


@pytest.mark.slow
@apart
def test_ranges_that_overlap(tmp_path: Path) -> None:
    path, device = tmp_path / "x", torch.device(DEVICE)
    content = torch.randint(0, 256, (2 * device_copies._BLOCK + 99,), dtype=torch.uint8)
    path.write_bytes(bytes(content.tolist()))
    with File.open(path) as file:
        copies = DeviceCopies()
        whole = copies.storage(len(content), device, file, 0)
        part = copies.storage(1000, device, file, 100)
        copies.finish()
    for found, wanted in ((whole, content), (part, content[100:1100])):
        assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(found.cpu()), wanted)


@pytest.mark.slow
@apart
def test_modes_memory_and_views(tmp_path: Path) -> None:
    made = tensors()
    path = tmp_path / "x.pt"
    torch.save({**made, "none": torch.empty(0)}, path)  # the general builder takes over
    with torch.inference_mode():
        check_same(
            ckptmove.load(path, map_location=DEVICE), {**made, "none": torch.empty(0)}, DEVICE
        )
    nbytes = sum(each.nbytes for each in made.values())
    with limited(int(1.2 * nbytes)):
        found: Any = ckptmove.load(path, map_location=DEVICE)
    found["long"].detach_()
    del found
    save_file(made, tmp_path / "x.safetensors")
    with torch.inference_mode(), limited(int(1.2 * nbytes)):
        ckptmove.load(tmp_path / "x.safetensors", map_location=DEVICE)["long"].detach_()
    with limited(nbytes // 2), pytest.raises(DeviceError, match=r"memory.*map_location=\"cpu\""):
        ckptmove.load(path, map_location=DEVICE)


@pytest.mark.parametrize("check", [check_safetensors, check_zip, check_unusual, check_sparse])
@pytest.mark.parametrize("device", [pytest.param(GPU, marks=cuda, id="gpu")])
def test_on_a_gpu(check: Callable[[Path, str], None], device: str, tmp_path: Path) -> None:
    check(tmp_path, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_the_device_it_is_said(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "x.safetensors")
    with pytest.raises(DeviceError, match='map_location="cpu" loads it on the CPU'):
        ckptmove.load(tmp_path / "x.safetensors", map_location=GPU)
