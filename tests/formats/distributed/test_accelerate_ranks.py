"""What accelerate saves of FSDP without DCP: a file of each rank, or the whole in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

import ckptmove
from ckptmove.errors import InputError, UnsupportedError
from tests.making.ranks import divided as sharded_rows
from tests.making.ranks import over_gloo, save_ranks
from tests.oracles.sameness import assert_same_tree

WORLD = 2


def model_and_optimizer(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A model after a step, on each rank with other data."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rank = distributed.get_rank()
    model(torch.arange(20.0).reshape(4, 5) + rank).square().mean().backward()
    optimizer.step()
    for buffer in model.buffers():
        distributed.broadcast(buffer, 0)
    return model, optimizer


def divided(model: torch.nn.Module) -> Any:
    """The model as FSDP2 divides it."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for each in model.children():
        if isinstance(each, torch.nn.Linear):
            fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def flat(model: torch.nn.Module) -> Any:
    """The model as FSDP1 divides it."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def save_by_accelerate(folder: Path, version: int, kind: str) -> None:
    """Save with accelerate's own functions, as `Accelerator.save_state` does; `kind` as its."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    def save(rank: int) -> None:
        class Process:
            """What the functions ask of an Accelerator."""

            process_index, num_processes = rank, WORLD
            is_main_process, is_fsdp2, multi_device = rank == 0, version == 2, True

            def wait_for_everyone(self) -> None:
                distributed.barrier()

        accelerate.PartialState(cpu=True)
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=version, state_dict_type=kind
        )
        model, optimizer = model_and_optimizer(divided if version == 2 else flat)
        to = os.fspath(folder)
        save_fsdp_model(plugin, Process(), model, to, use_dcp=False)
        save_fsdp_optimizer(plugin, Process(), optimizer, model, to, use_dcp=False)
        save_whole(folder, model, optimizer, version)

    over_gloo(folder, WORLD, save)
    torch.save({"last_epoch": 1}, folder / "scheduler.bin")


def save_whole(folder: Path, model: Any, optimizer: Any, version: int) -> None:
    """Save the oracle beside the folder: what the ranks hold together."""
    if version == 2:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True)
        weights, states = get_state_dict(model, optimizer, options=options)
    else:
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            StateDictType,
        )

        both = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *both):
            weights = model.state_dict()
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if distributed.get_rank() == 0:
        torch.save({"model": weights, "optimizer": states}, folder.parent / "whole.pt")


def plain(tree: Any) -> Any:
    """The same with plain dicts, in the order of names, and tensors with storages of their own."""
    if isinstance(tree, dict):
        return {key: plain(tree[key]) for key in sorted(tree)}
    if isinstance(tree, (list, tuple)):
        return [plain(each) for each in tree]
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def test_what_a_trainer_has_once_lies_beside_two_models(tmp_path: Path) -> None:
    folder, weight = tmp_path / "checkpoint-1", torch.arange(15.0).reshape(5, 3)
    for n in range(2):
        for stem, key in (("pytorch_model_fsdp", "w"), ("optimizer", "exp_avg")):

            def state(_: int, key: str = key, tensor: torch.Tensor = weight + n) -> dict[str, Any]:
                return {key: sharded_rows(tensor, (2,), [Shard(0)])}

            save_ranks(folder, 2, state, f"{stem}_{n}_rank{{rank}}.bin")
    torch.save({"last_epoch": 1}, folder / "scheduler.bin")
    torch.save({"seed": 3}, folder / "random_states_0.pkl")
    whole = {
        "model": {"w": weight},
        "model_1": {"w": weight + 1},
        "optimizer": {"exp_avg": weight},
        "optimizer_1": {"exp_avg": weight + 1},
        "rng": {0: {"seed": 3}},
        "scheduler": {"last_epoch": 1},
    }
    assert_same_tree(plain(ckptmove.load(folder)), plain(whole))
    sections = {each.name: str(each.section) for each in ckptmove.inspect(folder).tensors}
    assert sections["model_1.w"] == "model"
    assert sections["optimizer_1.exp_avg"] == "optimizer"
    (folder / "optimizer_1_rank1.bin").unlink()
    with pytest.raises(InputError, match="different numbers of ranks"):
        ckptmove.load(folder)


CASES = [(2, "SHARDED_STATE_DICT"), (1, "SHARDED_STATE_DICT"), (2, "FULL_STATE_DICT")]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "kind"), CASES)
def test_it_is_what_was_trained(version: int, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "tree" / "checkpoint-1"
    save_by_accelerate(folder, version, kind)
    whole = torch.load(folder.parent / "whole.pt", weights_only=True)
    (folder.parent / "whole.pt").unlink()
    found = ckptmove.load(folder)
    assert_same_tree(plain(found["model"]), plain(whole["model"]))
    if version == 2:  # on a CPU, FSDP1 gives two states of one optimizer, divided and whole
        assert_same_tree(plain(found["optimizer"]), plain(whole["optimizer"]))
    assert found["optimizer"]["state"].keys() == whole["optimizer"]["state"].keys()
    assert found["scheduler"] == {"last_epoch": 1}
    if kind.startswith("SHARDED"):
        assert ckptmove.inspect(folder).divisions["model.0.weight"] == f"rows/{WORLD}"
    for name in ("all.pt", "all.safetensors"):
        ckptmove.convert(folder, tmp_path / name)
        assert ckptmove.diff(folder, tmp_path / name).equal
    ckptmove.convert(folder, tmp_path / "hf", preset="hf")
    assert_same_tree(plain(ckptmove.load(tmp_path / "hf")), plain(whole["model"]))
    (done,) = ckptmove.batch("convert", folder.parent, tmp_path / "out")
    assert (done.name, done.outcome) == ("checkpoint-1", "done")
    ckptmove.relocate(folder, tmp_path / "moved", to="cuda:0")
    moved = ckptmove.load(tmp_path / "moved", map_location="cpu")
    assert_same_tree(plain(moved["model"]), plain(whole["model"]))
    for name in ("pytorch_model_fsdp_0_rank1.bin", "optimizer_0_rank1.bin"):
        if (folder / name).exists():
            held = (folder / name).read_bytes()
            (folder / name).unlink()
            with pytest.raises(InputError):
                ckptmove.convert(folder, tmp_path / "gone.pt")
            (folder / name).write_bytes(held[:900])
            with pytest.raises(InputError):
                ckptmove.convert(folder, tmp_path / "gone.pt")
            (folder / name).write_bytes(held)


@pytest.mark.slow
def test_flat_parameters_of_ranks_are_refused_by_name(tmp_path: Path) -> None:
    """LOCAL_STATE_DICT, which FSDP1 alone has: only the model's code knows what lies in them."""
    folder = tmp_path / "checkpoint-1"
    save_by_accelerate(folder, 1, "LOCAL_STATE_DICT")
    assert (folder / "pytorch_model_fsdp_rank1.bin").exists()
    for verb in (ckptmove.inspect, ckptmove.load):
        with pytest.raises(UnsupportedError, match="flat parameter"):
            verb(folder)
