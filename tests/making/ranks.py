"""Files of ranks, as each of them saves them: made in one process, which is each rank in turn."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.making.distributed import Box


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be a rank; the others are not there, and nobody waits for them."""
    distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def save_ranks(
    folder: Path,
    world: int,
    state: Callable[[int], object],
    name: str = "model",
    *,
    apart: bool = False,
) -> Path:
    """Save what each rank has as verl does, or in files that `name` spells for each rank.

    `apart`: in a process for each rank, since torch keeps the mesh of one for a module of another.
    """
    spelled = name if "{" in name else f"{name}_world_size_{{world}}_rank_{{rank}}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated
        for rank in range(world):
            child = os.fork() if apart else 0
            if child:
                assert os.waitpid(child, 0)[1] == 0
                continue
            try:
                with as_rank(rank, world):
                    torch.save(state(rank), folder / spelled.format(world=world, rank=rank))
            except BaseException:
                if apart:
                    os._exit(1)
                raise
            if apart:
                os._exit(0)
    return folder


def save_dcp_ranks(folder: Path, world: int, state: Callable[[int], dict[str, Any]]) -> Path:
    """Have each rank plan and write its part of a folder of torch.distributed.checkpoint."""
    planners, writers, plans = list[DefaultSavePlanner](), list[FileSystemWriter](), list[Any]()
    for rank in range(world):
        with as_rank(rank, world):
            planners.append(DefaultSavePlanner())
            planners[-1].set_up_planner(state(rank), is_coordinator=not rank)
            writers.append(FileSystemWriter(folder))
            writers[-1].set_up_storage_writer(not rank)
            plans.append(writers[-1].prepare_local_plan(planners[-1].create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return folder


def over_gloo(folder: Path, world: int, save: Callable[[int], None]) -> None:
    """Have ranks save into a folder, in processes of their own that talk to each other."""
    folder.mkdir(parents=True, exist_ok=True)
    children = list[int]()
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            warnings.simplefilter("ignore")  # of what is deprecated
            store = (folder.parent / "store").as_uri()
            distributed.init_process_group("gloo", store, rank=rank, world_size=world)
            save(rank)
            distributed.barrier()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * world


def divided(tensor: torch.Tensor, sizes: Sequence[int], placements: Sequence[Any]) -> Any:
    """A DTensor, of which this rank has what torch gives it."""
    mesh = init_device_mesh("cpu", tuple(sizes))
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def sharded(tensor: torch.Tensor, boxes: Sequence[Box], rank: int) -> Any:
    """A ShardedTensor, of which rank R has box R."""

    def about(n: int) -> ShardMetadata:
        return ShardMetadata([*boxes[n][0]], [*boxes[n][1]], f"rank:{n}/cpu")

    def part(n: int) -> torch.Tensor:
        slices = tuple(slice(at, at + size) for at, size in zip(*boxes[n], strict=True))
        return tensor[slices].clone()

    properties = TensorProperties(dtype=tensor.dtype)
    metadata = ShardedTensorMetadata([*map(about, range(len(boxes)))], tensor.shape, properties)
    local = [Shard(part(rank), about(rank))]
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)
