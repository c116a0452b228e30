"""Plans of every kind with their sources, and what they must make of them: a model in memory."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from ckptmove.plans.plan import Checksum, Copy, CrcRange, Gather, Plan, Write
from ckptmove.sources.file import File
from ckptmove.sources.source import Source

#: Sizes of sources: on both sides of what is read at once, and of nothing.
SIZES = (0, 1, 40, 3000, (1 << 17) + 5)
DTYPES = {"uint8": "u1", "int16": "<i2", "float32": "<f4", "complex64": "<c8"}


class Case(NamedTuple):
    """A plan, the contents of its sources, and what it must make of them."""

    contents: tuple[bytes, ...]
    plan: Plan
    expected: bytes


def content(seed: int, nbytes: int) -> bytes:
    """Random bytes that occur nowhere else."""
    return random.Random(seed).randbytes(nbytes)


def strided(data: bytes, gather: Gather) -> bytes:
    region = data[gather.source_at : gather.source_at + gather.source_nbytes]
    kind = np.dtype(DTYPES[gather.dtype])
    elements = np.frombuffer(region, kind, offset=gather.offset * kind.itemsize)
    strides = [step * kind.itemsize for step in gather.stride]
    return np.lib.stride_tricks.as_strided(elements, gather.shape, strides).tobytes()


@st.composite
def gathers(draw: st.DrawFn, at: int, source: int, nbytes: int) -> Gather:
    """A view with two dimensions in a source of some size."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    size = np.dtype(DTYPES[dtype]).itemsize
    rows, columns = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    stride = draw(st.sampled_from([(columns, 1), (1, rows), (0, 1), (columns + 2, 1), (0, 0)]))
    numel = 1 + max(rows - 1, 0) * stride[0] + max(columns - 1, 0) * stride[1]
    if numel * size > nbytes:
        rows, columns, stride, numel = 0, 3, (1, 1), 0
    start = draw(st.integers(0, nbytes - numel * size))
    offset = draw(st.integers(0, min(start // size, 5)))
    return Gather(
        at,
        rows * columns * size,
        source,
        start - offset * size,
        (numel + offset) * size,
        dtype,
        (rows, columns),
        stride,
        offset,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Copies, writes and gathers one after another, with gaps; patches, checksums, measures."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    contents = tuple(content(n, nbytes) for n, nbytes in enumerate(sizes))
    copies, writes, made, sums = list[Copy](), list[Write](), list[Gather](), list[Checksum]()
    expected = bytearray()
    for kind in draw(st.lists(st.sampled_from(["copy", "write", "gather", "gap"]), max_size=9)):
        at, source = len(expected), draw(st.integers(0, len(sizes) - 1))
        data = contents[source]
        if kind == "gap":
            expected += bytes(draw(st.sampled_from([1, 7, 1 << 17])))
        elif kind == "write":
            writes.append(Write(at, draw(st.binary(max_size=40))))
            expected += writes[-1].data
        elif kind == "gather":
            made.append(draw(gathers(at, source, len(data))))
            expected += strided(data, made[-1])
        else:
            start = draw(st.integers(0, len(data)))
            nbytes = draw(st.one_of(st.just(len(data) - start), st.integers(0, len(data) - start)))
            copies.append(Copy(start, nbytes, at, source))
            expected += data[start : start + nbytes]
            cuts = [draw(st.integers(0, nbytes)) for _ in range(3)]
            first, second, third = sorted(cuts)
            if draw(st.booleans()) and second > first:
                crc32 = zlib.crc32(data[start + first : start + second])
                name = f"record {len(sums)}"
                sums.append(
                    Checksum(at + first, second - first, crc32, name, start + first, source)
                )
            if draw(st.booleans()):
                writes.append(Write(at + second, draw(st.binary(max_size=third - second))))
                patched = len(writes[-1].data)
                expected[at + second : at + second + patched] = writes[-1].data
    cuts = sorted(draw(st.lists(st.integers(0, len(expected)), max_size=6)))
    measures = tuple(
        CrcRange(start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )
    places = [len(expected) + 4 * n for n in range(len(measures))]
    crcs = [zlib.crc32(expected[each.at : each.at + each.nbytes]) for each in measures]
    expected += b"".join(struct.pack("<I", crc32) for crc32 in crcs)

    def seal(found: Sequence[int]) -> list[Write]:
        return [
            Write(at, struct.pack("<I", crc32)) for at, crc32 in zip(places, found, strict=True)
        ]

    plan = Plan(
        "relay",
        len(expected),
        tuple(copies),
        tuple(draw(st.permutations(writes))),
        tuple(sums),
        tuple(made),
        measures,
        seal if measures else None,
    )
    return Case(contents, plan, bytes(expected))


@contextmanager
def open_sources(folder: Path, contents: Sequence[bytes]) -> Iterator[Sequence[Source]]:
    """The contents as sources with an old time of change."""
    with ExitStack() as stack:
        sources = []
        for n, data in enumerate(contents):
            path = folder / f"in-{n}"
            path.write_bytes(data)
            os.utime(path, (1_000_000_000, 1_000_000_000))
            sources.append(stack.enter_context(File.open(path)))
        yield sources
