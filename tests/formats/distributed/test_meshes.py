"""DCP over any mesh: what torch's planner has each rank write, and what it has each rank read."""

from __future__ import annotations

import shutil
import warnings
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import Replicate, Shard

import ckptmove
from tests.conftest import examples
from tests.making.ranks import as_rank, divided, save_dcp_ranks
from tests.oracles.sameness import assert_same_tree

pytestmark = pytest.mark.filterwarnings("ignore")  # torch: what is deprecated, and no process group
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
Mesh = tuple[int, ...]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of few dimensions, which meshes seldom divide evenly; some transposed."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    content = torch.arange(prod(shape) * dtype.itemsize) % (2 if dtype == torch.bool else 251)
    tensor = content.to(torch.uint8).view(dtype).reshape(shape)
    return tensor.mT if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def meshes(draw: st.DrawFn, tensor: torch.Tensor) -> tuple[Mesh, list[Any]]:
    """A mesh of at most six ranks, and how it divides a tensor."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2)]))
    kinds = [Replicate(), *map(Shard, range(tensor.dim()))]
    return sizes, [draw(st.sampled_from(kinds)) for _ in sizes]


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Mesh, list[Any]]:
    """A tensor, a mesh, and how this divides it."""
    tensor = draw(tensors())
    return tensor, *draw(meshes(tensor))


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of just its elements, in row-major order."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@hypothesis_settings(max_examples=examples(40))
@given(cases())
def test_what_ranks_of_any_mesh_write(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[torch.Tensor, Mesh, list[Any]]
) -> None:
    tensor, sizes, placements = case
    top = tmp_path_factory.mktemp("mesh")

    def state(rank: int) -> dict[str, Any]:
        return {"w": divided(tensor, sizes, placements), "rank": rank, "step": torch.tensor(3.0)}

    folder = save_dcp_ranks(top / "dcp", prod(sizes), state)
    found = ckptmove.load(folder)
    assert_same_tree(
        {"w": found["w"], "step": found["step"]},
        {"w": in_order(tensor), "step": torch.tensor(3.0)},
    )
    ckptmove.convert(folder, top / "out.safetensors")
    assert ckptmove.diff(folder, top / "out.safetensors").equal
    assert ckptmove.validate(folder).ok
    shutil.rmtree(top)


@hypothesis_settings(max_examples=examples(40))
@given(cases(), st.integers(1, 5))
def test_what_ranks_of_any_mesh_read(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[torch.Tensor, Mesh, list[Any]],
    ranks: int,
) -> None:
    tensor, sizes, placements = case
    top = tmp_path_factory.mktemp("mesh")
    torch.save({"w": tensor}, top / "in.pt")
    ckptmove.convert(top / "in.pt", top / "dcp", format="dcp", ranks=ranks)
    for rank in range(prod(sizes)):
        with as_rank(rank, prod(sizes)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = divided(tensor, sizes, placements)
            state = {"w": divided(torch.zeros_like(tensor), sizes, placements)}
            load(state, storage_reader=FileSystemReader(top / "dcp"), no_dist=True)
            got, whole = state["w"].to_local(), wanted.to_local()
        assert_same_tree(in_order(got), in_order(whole))
    shutil.rmtree(top)
