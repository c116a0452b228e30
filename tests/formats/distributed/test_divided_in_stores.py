"""Distributed checkpoints in a store: read by ranges, and no more of them than is wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

import ckptmove
from tests.making.distributed import save_dcp
from tests.making.ranks import divided, save_ranks
from tests.making.zero import Run, save_universal, save_zero
from tests.oracles.sameness import assert_same_tree
from tests.servers.object_store import Store

from .test_hf_shards import save_shards

WEIGHTS = {f"layer{n}.weight": (400, 1000) for n in range(6)}  # 1.6 MB each
ROWS = [((0, 0), (200, 1000)), ((200, 0), (200, 1000))]
COLUMNS = [((0, 0), (400, 500)), ((0, 500), (400, 500))]


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in WEIGHTS.items()}


def dcp(folder: Path, boxes: Any) -> Path:
    """Weights with their optimizer state, in four files."""
    state = {name: {"step": torch.tensor(3.0), "exp_avg": w} for name, w in weights().items()}
    groups = [{"lr": 0.1, "params": list(WEIGHTS)}]
    names = [f"model.{name}" for name in WEIGHTS]
    return save_dcp(
        folder,
        {"model": weights(), "optimizer": {"state": state, "param_groups": groups}},
        dict.fromkeys([*names, *(f"optimizer.state.{n}.exp_avg" for n in WEIGHTS)], boxes),
        files=4,
    )


def zero(folder: Path) -> Path:
    return save_zero(folder, Run(stage=2, ranks=4, groups=[weights()]))


def universal(folder: Path) -> Path:
    return save_universal(folder, Run(stage=2, ranks=4, groups=[weights()]))


def hf_shards(folder: Path) -> Path:
    return save_shards(folder, weights(), dict.fromkeys(WEIGHTS, ROWS), 4)


def rank_files(folder: Path) -> Path:
    held = weights()
    return save_ranks(
        folder, 4, lambda _: {n: divided(w, (4,), [Shard(0)]) for n, w in held.items()}
    )


KINDS: dict[str, tuple[Callable[[Path], Path], str, int, int]] = {
    # what makes it, its weights, the most requests to inspect it, and to convert these
    "rows": (lambda folder: dcp(folder, ROWS), "model", 10, 60),
    "columns": (lambda folder: dcp(folder, COLUMNS), "model", 10, 60),
    "zero": (zero, "module", 30, 50),
    "universal": (universal, "module", 60, 80),
    "hf shards": (hf_shards, "", 4, 20),
    "rank files": (rank_files, "model", 30, 60),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_wanted_is_fetched(kind: str, store: Store, tmp_path: Path) -> None:
    make, module, few, some = KINDS[kind]
    folder = make(tmp_path / "in")
    url = store.put_folder("run", folder)
    total = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    store.front.reset()
    found = ckptmove.inspect(url)
    assert [each.name for each in found.tensors] == [
        each.name for each in ckptmove.inspect(folder).tensors
    ]
    assert store.front.nbytes("/run/") < total // 16
    assert len(store.front.asked("GET", "/run/")) <= few
    store.front.reset()
    ckptmove.convert(url, tmp_path / "out.safetensors", select=module or ())
    wanted = sum(each.nbytes for each in weights().values())
    assert store.front.nbytes("/run/") < wanted + total // 16
    assert len(store.front.asked("GET", "/run/")) <= some
    out = load_file(tmp_path / "out.safetensors")
    start = f"{module}." if module else ""
    for name, weight in weights().items():
        (held,) = (each for key, each in out.items() if key.removeprefix(start) == name)
        assert_same_tree(held.clone(), weight)


@pytest.mark.slow
def test_columns_of_many_ranks_are_fetched_once(store: Store, tmp_path: Path) -> None:
    """Together, they are more than is kept of what was fetched."""
    ranks, rows, width = 16, 4096, 2048
    weight = torch.arange(rows * width, dtype=torch.int32).reshape(rows, width)
    wide = width // ranks
    boxes = [((0, n * wide), (rows, wide)) for n in range(ranks)]
    folder = save_dcp(tmp_path / "in", {"w": weight}, {"w": boxes}, files=ranks)
    url = store.put_folder("run", folder)
    store.front.reset()
    ckptmove.convert(url, tmp_path / "out.safetensors")
    assert store.front.nbytes("/run/") < 1.01 * weight.nbytes
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], weight)
