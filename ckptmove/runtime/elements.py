"""Convert gathered elements for writing: swapped, flipped and cast by torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CorruptError, UnsupportedError
from ..manifest.dtypes import BITS, storage_element_nbytes

if TYPE_CHECKING:
    from ..plans.plan import Gather

_ALONE = 1 << 15  # elements per cast: for more, torch uses threads, which mostly wait

_QUIET = 0x40  # the quiet bit of a bfloat16 NaN; `bfloat16` has the same rule for NaNs
_BIG_HOST = sys.byteorder == "big"
#: The integer dtypes by size in bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def finishing(gather: Gather) -> Callable[[bytearray], bytearray]:
    """Return a function that converts gathered elements for writing.

    Raises: see `gather_chunks`.
    """
    flips = _flips(gather)
    dtype, to = gather.dtype, gather.to or gather.dtype
    cast = None if dtype == to else _checked_cast(dtype, to)
    swapped = gather.big_endian is not _BIG_HOST

    def finish(raw: bytearray) -> bytearray:
        if swapped and (gather.big_endian or flips or cast):
            _swap(raw, dtype)
        for flip in flips:
            flip(raw)
        if cast is not None:
            raw = cast(raw)
        if _BIG_HOST and (gather.big_endian or flips or cast):
            _swap(raw, to)
        return raw

    return finish


def _swap(raw: bytearray, dtype: str) -> None:
    width = BITS[dtype] // (16 if dtype in _PARTS else 8)
    if width > 1:
        torch.frombuffer(raw, dtype=torch.uint8).untyped_storage().byteswap(INTEGERS[width])


def _flips(gather: Gather) -> list[Callable[[bytearray], None]]:
    """Return the functions for the conj and neg bits of a tensor."""
    dtype = gather.dtype
    if gather.conj and dtype not in _PARTS:
        raise CorruptError(f"a tensor of {dtype} is said to be conjugated")
    if dtype in _PARTS:
        half = INTEGERS[BITS[dtype] // 16]
        signs = (0, gather.neg), (1, gather.neg is not gather.conj)  # two flips cancel out
        return [_sign_flip(half, part, 2) for part, flipped in signs if flipped]
    if not gather.neg:
        return []
    integer = INTEGERS[max(1, BITS[dtype] // 8)]
    if dtype in _FLOATS:
        return [_sign_flip(integer, 0, 1)]
    if dtype in _WHOLE:
        return [_negation(integer)]
    raise UnsupportedError(f"a tensor of {dtype} is said to be negated")


def _sign_flip(integer: torch.dtype, start: int, step: int) -> Callable[[bytearray], None]:
    def flip(raw: bytearray) -> None:
        every = torch.frombuffer(raw, dtype=integer)[start::step]
        every.bitwise_xor_(torch.iinfo(integer).min)

    return flip


def _negation(integer: torch.dtype) -> Callable[[bytearray], None]:
    def negate(raw: bytearray) -> None:
        torch.frombuffer(raw, dtype=integer).neg_()

    return negate


def _checked_cast(dtype: str, to: str) -> Callable[[bytearray], bytearray]:
    """Return the cast from one dtype to another, if torch has it."""
    if dtype in _PARTS and to not in _PARTS:
        raise UnsupportedError(f"{dtype} can't be cast to {to}: the imaginary parts would be lost")
    widened = to in _PARTS and dtype not in _PARTS
    # Complex numbers are cast as pairs of real numbers: equal results, but no warnings of torch.
    values: Any = getattr(torch, _PARTS.get(dtype, dtype), None)
    wanted: Any = getattr(torch, _PARTS.get(to, to), None)

    def cast(raw: bytearray) -> bytearray:
        old = torch.frombuffer(raw, dtype=torch.uint8).view(values)
        made = bytearray(old.numel() * wanted.itemsize * (2 if widened else 1))
        new = torch.frombuffer(made, dtype=torch.uint8).view(wanted)
        new = new[:: 2 if widened else 1]
        for these, those in zip(old.split(_ALONE), new.split(_ALONE), strict=True):
            those.copy_(these)
        if (dtype, to) == ("float32", "bfloat16") and (is_nan := old.isnan()).any():
            bits = torch.frombuffer(raw, dtype=torch.int32)[is_nan]
            new.view(torch.int16)[is_nan] = (bits >> 16 | _QUIET).to(torch.int16)
        return made

    try:
        cast(bytearray(storage_element_nbytes(dtype)))
    except (RuntimeError, TypeError, AttributeError) as error:  # no such cast, or no such dtype
        raise UnsupportedError(f"torch {torch.__version__} can't cast {dtype} to {to}") from error
    return cast
