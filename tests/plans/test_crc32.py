"""CRC-32s that are put together: what comes of it is what zlib has."""

from __future__ import annotations

import random
import sys
import zlib

import pytest

from ckptmove.plans import crc32
from ckptmove.plans.crc32 import combine_crc32, extend_crc32
from tests.oracles.steps import steps


@pytest.mark.parametrize("missing", [False, True])
def test_sums_go_on_as_those_of_zlib(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    crc32._fastest.cache_clear()
    chance = random.Random(2)
    for size in (0, 1, 65_535, 65_536, 300_001):
        one, data = chance.randbytes(5), chance.randbytes(size)
        for each in (data, bytearray(data), memoryview(data)[3:]):
            assert extend_crc32(zlib.crc32(one), each) == zlib.crc32(each, zlib.crc32(one))
    assert (crc32._fastest() is zlib.crc32) == missing
    crc32._fastest.cache_clear()


def test_sums_are_put_together_as_zlib_has_them() -> None:
    chance = random.Random(1)
    for _ in range(200):
        one, two = (chance.randbytes(chance.choice((0, 1, 7, 4096, 70_001))) for _ in range(2))
        assert combine_crc32(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


def test_sums_are_put_together_in_few_steps() -> None:
    combine_crc32(1, 2, 1 << 40)
    assert steps(lambda: combine_crc32(0, 2, 1 << 40)) < 50
    assert steps(lambda: combine_crc32(1, 2, 0)) < 50
    assert steps(lambda: combine_crc32(1, 2, 1 << 40)) < 2000, "the matrices are kept"
