"""DeepSpeed on the CPU, one process: train from the beginning, or from a universal checkpoint.

`python -m tests.oracles.deepspeed_engine STAGE DTYPE FOLDER RESULT` trains three steps and saves
FOLDER if it is not there, else it loads that. RESULT gets what the model and its losses are after
five more steps, and what the engine says of the checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn, optim
from torch._C._distributed_c10d import HashStore

from tests.making.frameworks import library, quietly

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_and_optimizer(seed: int) -> tuple[nn.Module, optim.AdamW]:
    """A model with two groups of parameters that are trained otherwise."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    names = dict(net.named_parameters())
    weights = {"params": [each for name, each in names.items() if name.endswith("weight")]}
    biases = {"params": [each for name, each in names.items() if name.endswith("bias")]}
    groups: list[dict[str, Any]] = [weights | {"weight_decay": 0.1}, biases | {"weight_decay": 0.0}]
    return net, optim.AdamW(groups, lr=0.01)


def batches(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a model is trained with."""
    torch.manual_seed(count)
    return [torch.rand(2, 3).to(dtype) for _ in range(count)]


def _train(engine: Any, count: int, dtype: torch.dtype) -> list[float]:
    losses = list[float]()
    for batch in batches(count, dtype):
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _main(stage: int, dtype: torch.dtype, folder: Path, result: Path) -> None:
    library("tests.making.mended_libraries")  # it looks for fairseq
    deepspeed = library("deepspeed")
    os.environ["LOCAL_RANK"] = "0"
    library("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False  # minutes to compile
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    resumes = folder.exists()
    net, optimizer = model_and_optimizer(seed=9 if resumes else 0)
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "checkpoint": {"load_universal": resumes},
    }
    with quietly():
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=optimizer, dist_init_required=False, config=config
        )
    client: dict[str, object] = {}
    if resumes:
        path, client = engine.load_checkpoint(str(folder))
        assert path is not None
    else:
        _train(engine, 3, dtype)
        engine.save_checkpoint(str(folder), client_state={"epoch": 3})
    losses = _train(engine, 5, dtype)
    found = {"losses": losses, "epoch": client.get("epoch"), "steps": engine.global_steps}
    if stage < 3:
        found["module"] = {name: each.clone() for name, each in engine.module.state_dict().items()}
    torch.save(found, result)
    distributed.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), DTYPES[sys.argv[2]], Path(sys.argv[3]), Path(sys.argv[4]))
