"""`python -m tests.oracles.fsdp_ranks WORLD MESH FOLDER AFTER RANK STORE`: a rank that goes on.

It loads a folder of torch.distributed.checkpoint into a model and an optimizer that are sharded by
FSDP2 over this mesh, takes three steps, and compares with what a process alone has got.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.oracles.sameness import assert_same_tree


def _copied(node: Any) -> Any:
    """The same in plain dicts, each tensor with bytes of its own."""
    if isinstance(node, dict):
        return {key: _copied(value) for key, value in node.items()}
    return node.clone()


def main(world: int, mesh: str, folder: str, after: str, rank: int, store: str) -> None:
    """Load, go on, compare."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    sizes = tuple(map(int, mesh.split("x")))
    names = ("replicate", "shard")[-len(sizes) :]
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    over = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for each in (*model, model):
        fully_shard(each, mesh=over)
    rest = list(model[1].parameters())
    groups: list[dict[str, Any]] = [{"params": [*model[0].parameters()]}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.9)
    about, state = get_state_dict(model, optimizer)
    whole: dict[str, Any] = {"model": about, "optim": state}
    load(whole, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"]
    )
    for n in range(3):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(n))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    about, state = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        expected = torch.load(after, weights_only=True)
        assert_same_tree(_copied(about), _copied(expected["model"]))
        assert_same_tree(_copied(state["state"]), _copied(expected["optim"]["state"]))
        assert state["param_groups"] == expected["optim"]["param_groups"]
    distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    world, mesh, folder, after, rank, store = sys.argv[1:]
    main(int(world), mesh, folder, after, int(rank), store)
