"""Tensors that say a device themselves, beside the location of what they hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.remote_device import _remote_device

from tests.making.expected import Expected, FileMaker, expecting, raw
from tests.making.saving import tagging
from tests.making.subclasses import one_process_group


class QuantizedTensor(torch.Tensor):
    """Built like torchao's: named inner tensors, and a state of plain values."""

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    block_size: list[int]

    @staticmethod
    def __new__(cls: type[QuantizedTensor], *parts: Any) -> QuantizedTensor:
        """From data, scale, zero point, block size and the device that it claims to be on."""
        qdata, scale, zero_point, block_size, device = parts
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, dtype=scale.dtype, device=device
        )
        self.qdata, self.scale, self.zero_point = qdata, scale, zero_point
        self.block_size = block_size
        return self

    def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
        return ["qdata", "scale", "zero_point"], [self.block_size, self.device]

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], rest: list[object], _size: object, _stride: object
    ) -> QuantizedTensor:
        return cls(inner["qdata"], inner["scale"], inner["zero_point"], *rest)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Supports only `detach`, which loading a parameter needs."""
        assert func is torch.ops.aten.detach.default, f"{func} is not for this class"
        self: QuantizedTensor = args[0]
        inner, rest = self.__tensor_flatten__()
        return cls(*(getattr(self, name) for name in inner), *rest)


class Elsewhere:
    """Pickled as a tensor on a device whose tensors have no storages (XLA, MAIA, MTIA)."""

    def __init__(self, rebuild: Callable[..., object], held: object, device: str) -> None:
        self.rebuild = rebuild
        self.held = held
        self.device = device

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.rebuild, (self.held, torch.float32, self.device, True)


def quantized(path: Path, tag: str) -> Expected:
    """A quantized weight as a parameter, twice, beside a plain one."""
    where = torch.device(tag)
    parts = (torch.arange(6, dtype=torch.int8).view(2, 3), torch.ones(2), torch.zeros(2))
    weight = nn.Parameter(QuantizedTensor(*parts, [1, 3], where), requires_grad=False)
    saved = {"weight": weight, "tied": weight, "bias": torch.ones(2)}
    with expecting(saved, tag, (tag,)) as expected:
        torch.save(saved, path)
    inner = dict(zip(("qdata", "scale", "zero_point"), parts, strict=True))
    for name in ("weight", "tied"):
        held = {f"{name}.{part}": raw(each.untyped_storage()) for part, each in inner.items()}
        expected = expected._replace(storages={**expected.storages, **held})
    return expected


def sharded(path: Path, tag: str) -> Expected:
    """A sharded tensor: its wrapper stores cpu wherever its shards are; its placements tell."""
    with one_process_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor is what is asked for today
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        tensor: Any = sharded_tensor.ones(spec, 4, 3)
        placement: Any = _remote_device(f"rank:0/{tag}")
        spec.placements[:] = [placement]
        tensor.metadata().shards_metadata[0].placement = placement
        with tagging(tag):
            torch.save({"weight": tensor}, path)
        data = raw(tensor.local_tensor().untyped_storage())
    return Expected({"weight": tag}, {"weight": data}, ("cpu", tag))


def storageless(path: Path, tag: str) -> Expected:
    """A tensor of a backend without storages: its location is cpu, an argument has the device."""
    held = torch.arange(3.0)
    rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
    torch.save({"weight": Elsewhere(rebuild, held, tag), "bias": torch.ones(2)}, path)
    storages = {"weight": raw(held.untyped_storage()), "bias": raw(torch.ones(2).untyped_storage())}
    return Expected({"weight": tag, "bias": "cpu"}, storages)


def storageless_by_numpy(path: Path, tag: str) -> Expected:
    """The same as torch 1.x wrote it: the values are an array in the pickle."""
    held = torch.arange(3.0)
    rebuild = torch._utils._rebuild_device_tensor_from_numpy
    torch.save({"weight": Elsewhere(rebuild, held.numpy(), tag)}, path)
    return Expected({"weight": tag}, {"weight": raw(held.untyped_storage())})


WRAPPED_MAKERS: dict[str, FileMaker] = {
    make.__name__: make for make in (quantized, sharded, storageless, storageless_by_numpy)
}
