"""What torch.distributed.checkpoint of any torch since 2.1 saves and loads; see scripts/matrix.

Usage: old_dcp.py save FOLDER     two ranks over gloo make FOLDER/dcp; FOLDER/whole.pt is the oracle
       old_dcp.py check FOLDER    ckptmove reads FOLDER/dcp as FOLDER/whole.pt; makes FOLDER/ours
       old_dcp.py load FOLDER     fills tensors like those of FOLDER/whole.pt from FOLDER/ours

To save and to load it imports torch alone: other versions run it, in their own environments.
"""

# ruff: noqa: ANN401 (a tree may hold anything)

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

WORLD = 2


def module_with(name: str, *modules: str) -> Any:
    """The first of these modules that is there and has a name."""
    for each in modules:
        try:
            found = importlib.import_module(each)
        except ImportError:
            continue
        if hasattr(found, name):
            return found
    raise SystemExit(f"this torch has no {name}")


def whole() -> dict[str, Any]:
    """What is saved, as one process would have it."""
    torch.manual_seed(0)
    weights = {
        "up.weight": torch.randn(5, 3),
        "up.bias": torch.randn(5).bfloat16(),
        "down.weight": torch.randn(3, 4).t().contiguous(),
        "mask": torch.tensor([True, False, True]),
        "scale": torch.tensor(7.5),
        "nothing": torch.empty(0, 3),
    }
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": weights[name] + 1}
        for name in ("up.weight", "up.bias", "down.weight")
    }
    groups = [{"lr": 0.5, "betas": (0.9, 0.999), "params": [*state]}]
    return {
        "model": weights,
        "optimizer": {"state": state, "param_groups": groups},
        "epoch": 3,
        "name": "run with.dots",
        "lists": [torch.arange(3), {"a": torch.ones(2)}],
    }


def divided(tensor: torch.Tensor, mesh: Any) -> Any:
    """A DTensor of its rows, or of its columns if it has more of these."""
    tensors = module_with(
        "distribute_tensor", "torch.distributed.tensor", "torch.distributed._tensor"
    )
    by_columns = tensor.ndim > 1 and tensor.shape[1] > tensor.shape[0]
    return tensors.distribute_tensor(tensor, mesh, [tensors.Shard(int(by_columns))])


def saved(tree: Any, mesh: Any) -> Any:
    """The same with DTensors for what has a dimension, elements, and a dtype that gloo moves."""
    if isinstance(tree, dict):
        return {key: saved(value, mesh) for key, value in tree.items()}
    if (
        isinstance(tree, torch.Tensor)
        and tree.ndim
        and tree.numel()
        and tree.dtype == torch.float32
    ):
        return divided(tree, mesh)
    return tree


def _save(rank: int, folder: Path) -> None:
    meshes = module_with("DeviceMesh", "torch.distributed.device_mesh", "torch.distributed._tensor")
    store = (folder / "store").absolute().as_uri()
    dist.init_process_group("gloo", store, rank=rank, world_size=WORLD)
    state = saved(whole(), meshes.DeviceMesh("cpu", list(range(WORLD))))
    write = getattr(dcp, "save", None) or dcp.save_state_dict
    write(state, storage_writer=dcp.FileSystemWriter(str(folder / "dcp")))
    dist.barrier()


def save(folder: Path) -> None:
    """Save it, with a process for each rank, and the oracle."""
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            _save(rank, folder)
            os._exit(0)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a rank failed")
    (folder / "store").unlink(missing_ok=True)
    torch.save(whole(), folder / "whole.pt")


def load(folder: Path) -> None:
    """Load what ckptmove wrote; ends with 1 if that is not what was saved."""
    told = torch.load(folder / "whole.pt", weights_only=True)

    def empty(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: empty(value) for key, value in tree.items()}
        return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None

    def tensors(tree: Any) -> list[torch.Tensor]:
        if isinstance(tree, dict):
            return [each for value in tree.values() for each in tensors(value)]
        return [tree] if isinstance(tree, torch.Tensor) else []

    wanted = {"model": told["model"], "optimizer": {"state": told["optimizer"]["state"]}}
    state = empty(wanted)
    read = getattr(dcp, "load", None)
    dist.init_process_group("gloo", (folder / "one").absolute().as_uri(), rank=0, world_size=1)
    (read or dcp.load_state_dict)(state, storage_reader=dcp.FileSystemReader(str(folder / "ours")))
    pairs = list(zip(tensors(state), tensors(wanted), strict=True))
    if not pairs or not all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs):
        raise SystemExit("what was loaded differs")
    print(f"loaded {len(pairs)} tensors that ckptmove wrote")


def check(folder: Path) -> None:
    """Read what was saved with ckptmove; ends with 1 if that is something else."""
    import ckptmove

    def told(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: told(tree[key]) for key in sorted(tree)}
        if isinstance(tree, (list, tuple)):
            return [told(each) for each in tree]
        if isinstance(tree, torch.Tensor):
            return tree.dtype, tree.shape, tree.flatten().view(torch.uint8).tolist()
        return tree

    expected = folder / "whole.pt"
    found, wanted = ckptmove.load(folder / "dcp"), torch.load(expected, weights_only=True)
    if told(found) != told(wanted):
        raise SystemExit("ckptmove reads something else than was saved")
    divided = ckptmove.inspect(folder / "dcp").divisions
    if divided["model.up.weight"] != "rows/2":
        raise SystemExit("it is not divided")
    ckptmove.convert(expected, folder / "ours", format="dcp", ranks=3, force=True)
    print(f"read {len(divided)} tensors as they were saved")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"save": save, "load": load, "check": check}[sys.argv[1]](Path(sys.argv[2]))
