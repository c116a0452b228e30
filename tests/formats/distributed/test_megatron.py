"""What Megatron-FSDP saves (`fsdp_dtensor`): DCP, with parts of a parameter that are not even."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptmove
from tests.making.distributed import save_dcp
from tests.making.ranks import over_gloo
from tests.oracles.sameness import assert_same_tree

#: The rows of each rank: it cuts a buffer of all parameters, and a cut may leave a rank nothing.
ROWS = {"a.weight": (5, 2), "b.bias": (0, 4), "c.weight": (1, 5)}


def whole(name: str) -> torch.Tensor:
    torch.manual_seed(len(name))
    rows = sum(ROWS[name])
    return torch.randn(rows) if name.endswith("bias") else torch.randn(rows, 3)


def trained(part: Any = lambda name, tensor: tensor) -> dict[str, Any]:
    """A model and its optimizer, of what `part` makes of each tensor."""
    weights = {name: whole(name) for name in ROWS}
    state = {
        name: {"exp_avg": part(name, weight + 1), "step": torch.tensor(4.0)}
        for name, weight in weights.items()
    }
    model = {name: part(name, weight) for name, weight in weights.items()}
    return {"model": model, "optimizer": {"state": state}, "iteration": 5}


@pytest.mark.parametrize("size", [list, tuple])
def test_offsets_and_sizes_of_other_types(size: Any, tmp_path: Path) -> None:
    boxes = {
        f"model.{name}": [((0, 0), (rows[0], 3)), ((rows[0], 0), (rows[1], 3))]
        for name, rows in ROWS.items()
        if name.endswith("weight")
    }
    folder = save_dcp(tmp_path / "dcp", trained(), boxes, size=size)
    assert ckptmove.inspect(folder).divisions["model.a.weight"] == "rows/2"
    assert_same_tree(ckptmove.load(folder), trained())


@pytest.mark.slow
def test_it_is_what_was_trained(tmp_path: Path) -> None:
    """Two ranks describe their parts with Megatron's own code."""
    uneven = pytest.importorskip(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor", exc_type=ImportError
    )
    folder = tmp_path / "iter_0000005"

    def save_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def part(name: str, tensor: torch.Tensor) -> DTensor:
            local = tensor.split(ROWS[name])[rank].clone()
            by, shape = [Shard(0)], tensor.shape
            return DTensor.from_local(local, mesh, by, shape=shape, stride=tensor.stride())

        state = uneven.preprocess_state_dict_for_uneven_dtensor(trained(part))
        save(state, checkpoint_id=folder)

    over_gloo(folder, 2, save_rank)
    assert ckptmove.inspect(folder).divisions["model.a.weight"] == "rows/2"
    assert_same_tree(ckptmove.load(folder), trained())
