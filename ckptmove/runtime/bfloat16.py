"""Cast between float32 and bfloat16 with numpy, which imports ten times as fast as torch.

The results are those of torch, except that a NaN keeps its sign and the upper bits of its payload;
torch's depend on the processor, and on where in a tensor the NaN is.
"""

from __future__ import annotations

import numpy as np

_SIGN = 0x8000_0000
_INFINITY = 0x7F80_0000
_QUIET = 0x40  # of a bfloat16: the quiet bit, which a NaN has after any computation


def to_bfloat16(raw: bytearray) -> bytearray:
    """Convert the bytes of float32s to bfloat16s, rounded to the nearest, ties to even."""
    bits = np.frombuffer(raw, "<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if np.isnan(bits.view("<f4")).any():
        is_nan = (bits & ~np.uint32(_SIGN)) > _INFINITY
        rounded[is_nan] = bits[is_nan] >> 16 | _QUIET
    return bytearray(rounded.astype("<u2").data)


def from_bfloat16(raw: bytearray) -> bytearray:
    """Convert the bytes of bfloat16s to float32s, without a change of value."""
    bits = np.frombuffer(raw, "<u2").astype("<u4")
    bits <<= 16
    return bytearray(bits.data)
