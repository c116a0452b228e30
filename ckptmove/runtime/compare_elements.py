"""Find which elements of two byte strings differ, and by how much."""

from __future__ import annotations

from math import inf, nan
from typing import NamedTuple

import torch

from ..manifest.dtypes import BITS

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {
    "complex32": torch.float16,
    "complex64": torch.float32,
    "complex128": torch.float64,
}
#: Dtypes that torch can't convert to other numbers.
_NO_NUMBERS = ("float4_e2m1fn_x2",)
_FLOATING = ("float", "bfloat", "complex")


class ElementDifferences(NamedTuple):
    """The differences of two runs of elements."""

    far: int  #: the number of elements that differ by more than the tolerance
    close: int  #: the number that differ by less
    #: The index of the first element that differs by more; -1 if there is none, or if it was not
    #: requested.
    first: int
    max_abs: float | None  #: as in `reports.diff.Values`
    max_rel: float | None


def element_differences(
    old: memoryview,
    new: memoryview,
    dtype: str,
    atol: float,
    rtol: float,
    *,
    first: bool = True,
    nan_alike: bool = False,
) -> ElementDifferences:
    """Compare two buffers of contiguous little-endian elements by bits, then as numbers.

    Floating elements are close if their difference is at most `atol` plus `rtol` times the old one,
    or if both are NaN; without tolerance none are. `nan_alike`: no NaN differs from another, as
    after a cast, whose NaNs depend on the processor.
    """
    differs = _differs(old, new, max(1, BITS[dtype] // 8))
    before, after = _numbers(old, dtype), _numbers(new, dtype)
    if nan_alike and before is not None and after is not None:
        differs &= ~(before.isnan() & after.isnan())
    total = int(differs.count_nonzero())
    max_abs = max_rel = None
    if before is not None and after is not None:
        apart = (after - before).abs()
        size = before.abs()
        if atol or rtol:
            finite = before.isfinite() & after.isfinite()
            close = (apart <= atol + rtol * size) & finite
            differs &= ~(close | (before.isnan() & after.isnan()))
        apart.masked_fill_(~differs, nan)
        max_abs = _largest(apart)
        max_rel = _largest(apart.div_(size).masked_fill_(size == 0, nan))
    far = int(differs.count_nonzero())
    found = int(differs.nonzero()[0]) if first and far else -1
    return ElementDifferences(far, total - far, found, max_abs, max_rel)


def _differs(old: memoryview, new: memoryview, width: int) -> torch.Tensor:
    """Return which elements differ in their bits."""
    unit = min(width, 8)
    mine, other = (torch.frombuffer(raw, dtype=_INTEGERS[unit]) for raw in (old, new))
    differs = mine != other
    return differs.view(-1, width // unit).any(1) if width > unit else differs


def element_text(raw: bytes, dtype: str) -> str:
    """Return one element, given as little-endian bytes, as readable text."""
    number = _numbers(memoryview(bytearray(raw)), dtype)
    if number is None:
        return f"0x{raw[::-1].hex()}"
    value = number.item()
    return f"{value:.9g}" if BITS[dtype] <= 32 and isinstance(value, float) else repr(value)


def _numbers(raw: memoryview, dtype: str) -> torch.Tensor | None:
    """Return floating-point elements in the widest floating dtype; None for others."""
    if not dtype.startswith(_FLOATING) or dtype in _NO_NUMBERS:
        return None
    if dtype in _PARTS:
        parts = torch.frombuffer(raw, dtype=_PARTS[dtype]).view(-1, 2)
        return torch.view_as_complex(parts.to(torch.float64))
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        return None
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).to(torch.float64)


def _largest(numbers: torch.Tensor) -> float | None:
    """Return the largest of these nonnegative values, ignoring NaN."""
    largest = float(numbers.nan_to_num(-1.0, posinf=inf).max())
    return None if largest < 0 else largest
