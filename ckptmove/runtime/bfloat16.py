"""Cast between float32 and bfloat16 by numpy, whose import takes a tenth of that of torch.

The results are those of torch, except that a NaN keeps its sign and the upper bits of its payload;
torch's depend on the processor, and on where in a tensor the NaN is.
"""

from __future__ import annotations

import numpy as np

_SIGN = 0x8000_0000
_INFINITY = 0x7F80_0000
_QUIET = 0x40  # of a bfloat16: the bit that any NaN has once it was computed with


def to_bfloat16(raw: bytearray) -> bytearray:
    """The bytes of float32s as bfloat16s, rounded to the nearest, and to even between two."""
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
    """The bytes of bfloat16s as float32s, which are the same numbers."""
    bits = np.frombuffer(raw, "<u2").astype("<u4")
    bits <<= 16
    return bytearray(bits.data)
