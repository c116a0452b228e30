"""Tensors of other classes, tensors with attributes, distributed tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from tests.making.registry import maker


class NamedTensor(torch.Tensor):
    """A subclass with a storage of its own and a label."""

    label: str


class PairTensor(torch.Tensor):
    """A wrapper: it has no storage, its values are two tensors that it holds."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[PairTensor],
        first: torch.Tensor,
        second: torch.Tensor,
        device: torch.device | None = None,
    ) -> PairTensor:
        """Looks like `first`, on `device` if given."""
        where = device or first.device
        pair: PairTensor = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=where
        )
        pair.first, pair.second = first, second
        return pair

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], _meta: None, _size: object, _stride: object
    ) -> PairTensor:
        return PairTensor(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first, second = (
            func(*tree_map_only(PairTensor, part, args), **(kwargs or {}))
            for part in (lambda pair: pair.first, lambda pair: pair.second)
        )
        return PairTensor(first, second) if isinstance(first, torch.Tensor) else first


@maker
def tensor_with_attributes() -> object:
    tensor = torch.randn(2)
    vars(tensor).update(note="seen", device_name="cpu", mask=torch.tensor([True, False]))
    return tensor


@maker
def parameter_with_attributes() -> object:
    parameter = nn.Parameter(torch.randn(2))
    vars(parameter).update(is_shared=True, tensor_model_parallel=False)
    return parameter


@maker
def tensor_subclass() -> object:
    tensor = torch.Tensor._make_subclass(NamedTensor, torch.randn(3), True)
    tensor.label = "named"
    return {"named": tensor, "parameter": nn.Parameter(torch.ones(1))}


@maker
def wrapper_subclass() -> object:
    return {"pair": PairTensor(torch.ones(2, 3), torch.zeros(2, 3)), "plain": torch.ones(2)}


@maker
def wrapper_subclass_on_cuda() -> object:
    """The wrapper stores cuda:0, as one saved on a CUDA machine does."""
    return {"pair": PairTensor(torch.ones(2), torch.zeros(2), torch.device("cuda", 0))}


@contextmanager
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@maker
def dtensor_state_dict() -> object:
    with one_process_group():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        return {
            "weight": distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]),
            "bias": distribute_tensor(torch.randn(4), mesh, [Replicate()]),
        }
