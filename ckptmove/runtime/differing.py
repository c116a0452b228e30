"""Which elements of two runs of bytes differ, and by how much."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..dtypes import BITS

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {
    "complex32": torch.float16,
    "complex64": torch.float32,
    "complex128": torch.float64,
}
#: Of these torch can't make other numbers.
_NO_NUMBERS = ("float4_e2m1fn_x2",)


class Unlike(NamedTuple):
    """How two runs of elements differ.

    Attributes:
        far: how many elements differ, by more than the tolerance.
        close: how many differ by less.
        first: which element is the first that does by more, counted from the start; -1 if none.
        max_abs, max_rel: as `drafts.differing.Values` has them.
    """

    far: int
    close: int
    first: int
    max_abs: float | None
    max_rel: float | None


def unlike(old: bytes, new: bytes, dtype: str, atol: float, rtol: float) -> Unlike:
    """Compare elements by their bits, and those that differ as numbers.

    Args:
        old, new: contiguous little-endian elements, as many.
        dtype: theirs, by torch's name.
        atol, rtol: floating elements are close if their difference is at most `atol` plus `rtol`
            times the old one, or if neither is a number; without tolerance none are.
    """
    width = max(1, BITS[dtype] // 8)
    mine, other = bytearray(old), bytearray(new)
    unit = min(width, 8)
    bits = [torch.frombuffer(raw, dtype=_INTEGERS[unit]) for raw in (mine, other)]
    differs = bits[0] != bits[1]
    if width > unit:
        differs = differs.view(-1, width // unit).any(1)
    where = differs.nonzero().flatten()
    pair = _numbers(mine, dtype, where), _numbers(other, dtype, where)
    if pair[0] is None or pair[1] is None:
        return Unlike(len(where), 0, int(where[0]) if len(where) else -1, None, None)
    before, after = pair[0], pair[1]
    apart = (after - before).abs()
    if atol or rtol:
        finite = before.isfinite() & after.isfinite()
        close = (apart <= atol + rtol * before.abs()) & finite
        close |= before.isnan() & after.isnan()
        beyond = ~close
        where, before, apart = where[beyond], before[beyond], apart[beyond]
    known = ~apart.isnan()
    relative = (apart / before.abs())[known & (before != 0)]
    relative = relative[~relative.isnan()]
    return Unlike(
        far=len(where),
        close=int(differs.count_nonzero()) - len(where),
        first=int(where[0]) if len(where) else -1,
        max_abs=_largest(apart[known]),
        max_rel=_largest(relative),
    )


def spelled(raw: bytes, dtype: str) -> str:
    """One element, in little-endian bytes, as people write it."""
    number = _numbers(bytearray(raw), dtype, torch.zeros(1, dtype=torch.int64))
    if number is None:
        return f"0x{raw[::-1].hex()}"
    value = number.item()
    return f"{value:.9g}" if BITS[dtype] <= 32 and isinstance(value, float) else repr(value)


def _numbers(raw: bytearray, dtype: str, where: torch.Tensor) -> torch.Tensor | None:
    """Some elements in the widest of floating dtypes, if they are floating."""
    if not _is_floating(dtype):
        return None
    if dtype in _PARTS:
        parts = torch.frombuffer(raw, dtype=_PARTS[dtype]).view(-1, 2)[where]
        return torch.view_as_complex(parts.to(torch.float64).contiguous())
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        return None
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind)[where].to(torch.float64)


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex")) and dtype not in _NO_NUMBERS


def _largest(numbers: torch.Tensor) -> float | None:
    return float(numbers.max()) if len(numbers) else None
