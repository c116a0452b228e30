"""Plain tensors: every dtype, every way to look at a storage."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tests.making.registry import maker, register

# Those that torch.save writes; int1–7 and uint1–7 are shell dtypes without a storage.
DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float4_e2m1fn_x2", "uint8", "uint16", "uint32", "uint64"),
        *("int8", "int16", "int32", "int64", "bool", "complex32", "complex64", "complex128"),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
    if hasattr(torch, name)
)


def of_dtype(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """A vector of `dtype` with unmistakable bytes, including NaNs."""
    nbytes = count * dtype.itemsize
    pattern = torch.arange(nbytes, dtype=torch.uint8) * 37 + 11
    return (pattern & 1 if dtype is torch.bool else pattern).view(dtype)


for _dtype in DTYPES:
    register(str(_dtype).replace("torch.", "dtype_"), partial(of_dtype, _dtype))


@maker
def every_dtype() -> object:
    return {str(dtype): of_dtype(dtype) for dtype in DTYPES}


@maker
def nan_payloads() -> object:
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0x7F800000, -0x80000000])
    return {"tensor": bits.to(torch.int32).view(torch.float32), "float": [float("nan"), -0.0]}


@maker
def zero_dimensional() -> object:
    return {"f": torch.tensor(1.5), "i": torch.tensor(7), "b": torch.tensor(True)}


@maker
def empty() -> object:
    shapes: list[tuple[int, ...]] = [(0,), (3, 0, 2), (0, 0), (1, 0)]
    return {"some": torch.ones(2), **{str(shape): torch.empty(shape) for shape in shapes}}


@maker
def empty_shared() -> object:
    nothing = torch.empty(0)
    return [nothing, nothing, nothing.view(0, 3), torch.empty(0, dtype=torch.int64)]


@maker
def empty_view_of_something() -> object:
    base = torch.arange(6.0)
    return {"base": base, "none": base[3:3], "end": base[6:]}


@maker
def expanded() -> object:
    return torch.arange(3.0)[:, None].expand(3, 1000)


@maker
def transposed() -> object:
    return torch.arange(6.0).view(2, 3).t()


@maker
def channels_last() -> object:
    return torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)


@maker
def overlapping() -> object:
    return torch.arange(9.0).as_strided((3, 4), (2, 1), 1)


@maker
def slices_of_one_storage() -> object:
    base = torch.arange(1000.0)
    return {"head": base[:10], "tail": base[-10:], "every_other": base[::2], "one": base[500]}


@maker
def small_view_of_a_big_storage() -> object:
    return torch.zeros(100_000)[17:20]


@maker
def same_storage_as_three_dtypes() -> object:
    """One key under two storage types. torch.save permits only uint8 of the older dtypes."""
    raw = torch.arange(8, dtype=torch.uint8)
    return {"bytes": raw, "words": raw.view(torch.uint16), "floats": raw.view(torch.float8_e5m2)}


@maker
def same_tensor_twice() -> object:
    tensor = torch.randn(3)
    return {"first": tensor, "second": tensor, "alike": tensor.clone(), "list": [tensor] * 3}


@maker
def many_storages() -> object:
    """More than 256 memo slots and keys: BINGET and LONG_BINGET, keys of one to three digits."""
    return {f"layer.{i}.weight": torch.full((2,), float(i)) for i in range(300)}


@maker
def wide_shapes() -> object:
    """Sizes, strides and offsets on either side of each width of integer."""
    base = torch.zeros(70_000, dtype=torch.uint8)
    bounds = (255, 256, 65_535, 65_536)
    return {
        "sizes": [base[:bound] for bound in bounds],
        "offsets": [base[bound:] for bound in bounds],
        "strides": [base.as_strided((2, 2), (bound, 1)) for bound in bounds],
        "storages": [torch.zeros(bound, dtype=torch.uint8) for bound in bounds],
    }


@maker
def parameter() -> object:
    return nn.Parameter(torch.randn(2, 3))


@maker
def frozen_parameter() -> object:
    return nn.Parameter(torch.randn(2), requires_grad=False)


@maker
def requiring_grad() -> object:
    return torch.randn(2, requires_grad=True)


@maker
def bare_tensor() -> object:
    return torch.tensor([1.0, 2.0, 3.0])


@maker
def untyped_storage() -> object:
    alone, tensor = torch.randn(2).untyped_storage(), torch.arange(3, dtype=torch.uint8)
    return {"alone": alone, "shared": tensor.untyped_storage(), "tensor": tensor}


@maker
def typed_storage() -> object:
    tensor = torch.randn(3)
    return {"storage": tensor.storage(), "tensor": tensor}
