"""Autocast on the simulated device, with torch's own lists of operations."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .device_kernels import operation
from .device_memory import NAME, Op, is_there, tensors_in

_LOWER, _HIGHER, _HIGHER_IF_UNSET, _WIDEST = (
    *("LOWER_PRECISION_FP", "FP32"),
    *("FP32_SET_OPT_DTYPE", "PROMOTE"),
)


def casts() -> Iterator[tuple[Op, Callable[..., Any]]]:
    """Each operation that autocast handles, and the function that replaces it."""
    # Every wheel of torch has this header.
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", " ")
    for kind in (_LOWER, _HIGHER, _HIGHER_IF_UNSET, _WIDEST):
        body = re.search(rf"#define AT_FORALL_{kind}\(_\)(.*)", text)
        for each in re.findall(r"_\(([^)]*)\)", body[1]) if body else ():
            name = ".".join(part.strip() for part in each.split(","))
            try:
                op = operation(name)
            except (AttributeError, RuntimeError):  # an overload that no longer exists
                continue
            yield op, functools.partial(_cast, kind, op)
    yield operation("binary_cross_entropy"), _unsafe


def _cast(kind: str, op: Op, *args: Any, **kwargs: Any) -> Any:
    with torch._C._DisableAutocast():
        if kind == _HIGHER_IF_UNSET:
            named = [each.name for each in op._schema.arguments[: len(args)]]
            if _is_cast(args[0]) and kwargs.get("dtype") is None and "dtype" not in named:
                kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)
        dtype = torch.float32
        if kind == _LOWER:
            dtype = torch.get_autocast_dtype(NAME)
        elif kind == _WIDEST:
            taken = [each for each in tensors_in([*args, *kwargs.values()]) if _is_cast(each)]
            if not any(each.dtype is torch.float32 for each in taken):
                lower = torch.get_autocast_dtype(NAME)
                dtypes = [each.dtype for each in taken]
                dtype = functools.reduce(torch.promote_types, dtypes, lower)
        brought = {name: _to(each, dtype) for name, each in kwargs.items()}
        return op(*(_to(each, dtype) for each in args), **brought)


def _is_cast(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and is_there(value)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _to(value: Any, dtype: torch.dtype) -> Any:
    if _is_cast(value):
        return value.to(dtype)
    return type(value)(_to(e, dtype) for e in value) if type(value) in (list, tuple) else value


def _unsafe(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using "
        "torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )
