"""Sources that join ranges of files: every range of them, whatever the runs."""

from __future__ import annotations

import threading
import zlib
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ckptmove.errors import CkptmoveError
from ckptmove.formats.distributed.boxes import Box, check_tiling, division_of, runs_of
from ckptmove.formats.distributed.dcp.items import in_order
from ckptmove.sources.file import File
from ckptmove.sources.joined import Filler, JoinedFiles, Strip
from tests.conftest import examples
from tests.making.distributed import boxes_of

WIDTHS = (1, 2, 3, 4, 8, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("joined")


def strip(source: Filler, at: int, shape: tuple[int, ...], box: Box, width: int) -> Strip:
    runs = runs_of(shape, box)
    pitches = tuple(each * width for each in runs.pitches)
    return Strip(source, at, runs.at * width, runs.length * width, runs.counts, pitches)


@hypothesis_settings(max_examples=examples(150))
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    width=st.sampled_from(WIDTHS),
    seed=st.integers(0, 1 << 30),
)
def test_chunks_read_like_one_array(
    folder: Path, shape: tuple[int, ...], width: int, seed: int
) -> None:
    random = Random(seed)
    whole = np.frombuffer(random.randbytes(prod(shape) * width), np.uint8).reshape(*shape, width)
    boxes = [Box(*each) for each in boxes_of(shape, random)]
    assert check_tiling("t", shape, boxes) == sorted(boxes)
    path, strips, content = folder / "file", list[Strip](), b"head"
    for box in boxes:
        content += whole[box_slices(box)].tobytes()
    path.write_bytes(content)
    with File.open(path) as file:
        at = 4
        for box in boxes:
            strips.append(strip(file, at, shape, box, width))
            at += box.numel * width
        joined = JoinedFiles("t")
        joined.add(4, lambda: [Strip(file, 0, 0, 4)])  # the next region is aligned
        start = joined.add(whole.nbytes, partial(sorted, strips, key=lambda each: each.at))
        assert joined.read(start, whole.nbytes) == whole.tobytes()
        expected = b"head".ljust(start, b"\0") + whole.tobytes()
        for _ in range(8):
            low = random.randint(0, len(expected))
            high = random.randint(low, len(expected))
            assert joined.read(low, high - low) == expected[low:high]
            pieces = list(joined.pieces(low, high - low))
            assert (
                b"".join(each.source.read(each.at, each.nbytes) for each in pieces)
                == (expected[low:high])
            )


def box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(*box, strict=True))


@hypothesis_settings(max_examples=examples(80))
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    width=st.sampled_from((1, 2, 4, 8, 16)),
    data=st.data(),
)
def test_transposed_elements_are_put_in_order(
    shape: tuple[int, ...], width: int, data: st.DataObject
) -> None:
    lies = data.draw(st.permutations(range(len(shape))))
    array = np.frombuffer(Random(3).randbytes(prod(shape) * width), np.uint8)
    array = array.reshape(*(shape[n] for n in lies), width)
    back = array.transpose(*(lies.index(n) for n in range(len(shape))), len(shape))
    stride = tuple(each // width for each in back.strides[:-1])
    assert bytes(in_order(array.tobytes(), shape, stride, width)) == back.tobytes()


@hypothesis_settings(max_examples=examples(100))
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 1 << 30),
)
def test_what_is_missing_or_overlaps_is_told(shape: tuple[int, ...], seed: int) -> None:
    random = Random(seed)
    boxes = [Box(*each) for each in boxes_of(shape, random)]
    n = random.randrange(len(boxes))
    with pytest.raises(CkptmoveError, match="missing"):
        check_tiling("t", shape, [*boxes[:n], *boxes[n + 1 :]])
    with pytest.raises(CkptmoveError, match="overlap"):
        check_tiling("t", shape, [*boxes, boxes[n]])
    start, size = boxes[n]
    moved = Box(start, (*size[:-1], size[-1] + 1))
    with pytest.raises(CkptmoveError, match=r"overlap|outside"):
        check_tiling("t", shape, [*boxes[:n], moved, *boxes[n + 1 :]])
    if len(boxes) > 1:  # as many elements as it has, but not all of them
        other = boxes[(n + 1) % len(boxes)]
        if other.numel == boxes[n].numel:
            with pytest.raises(CkptmoveError, match="overlap"):
                check_tiling("t", shape, [*boxes[:n], other, *boxes[n + 1 :]])


@pytest.mark.slow
def test_many_chunks_are_checked_soon() -> None:
    many = 20_000  # compared with each other, they would take minutes
    rows = [Box((n, 0), (1, 2)) for n in range(many)]
    assert len(check_tiling("t", (many, 2), rows)) == many
    columns = [Box((0, n), (2, 1)) for n in range(many)]
    assert len(check_tiling("t", (2, many), columns)) == many
    columns[-2:] = [Box((0, many - 2), (1, 2)), Box((1, many - 2), (1, 2))]
    assert len(check_tiling("t", (2, many), columns)) == many
    columns[-2:] = [Box((0, many - 2), (1, 2)), Box((1, many - 3), (1, 2))]
    with pytest.raises(CkptmoveError, match="overlap"):
        check_tiling("t", (2, many), columns)


@pytest.mark.parametrize(
    ("shape", "boxes", "said"),
    [
        ((4, 2), [((0, 0), (4, 2))], "whole"),
        ((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))], "rows/2"),
        ((4, 2), [((0, 0), (4, 1)), ((0, 1), (4, 1))], "columns/2"),
        ((4, 2, 2), [((0, 0, 0), (4, 1, 2)), ((0, 1, 0), (4, 1, 2))], "1×2×1"),
        ((2, 3), [((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 1), (1, 2))], "3 chunks"),
    ],
)
def test_how_chunks_divide_a_tensor(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], said: str
) -> None:
    assert division_of(shape, [Box(*each) for each in boxes]) == said


@pytest.mark.parametrize("seed", range(3))
def test_what_was_read_of_a_file_is_summed_in_any_order(seed: int, tmp_path: Path) -> None:
    random, joined = Random(seed), JoinedFiles("joined")
    content = random.randbytes(1000)
    path = tmp_path / "a"
    path.write_bytes(content)
    cuts = [0, *sorted(random.sample(range(1, 1000), 9)), 1000]
    parts = list(pairwise(cuts))
    random.shuffle(parts)
    with File.open(path) as file:
        assert joined.read_before(file, 0, 1000) == (0, 0)
        for low, high in parts:
            joined.note(file, low, content[low:high])
        assert joined.read_before(file, 0, 1000) == (1000, zlib.crc32(content))


def test_large_columns_are_read_block_by_block(tmp_path: Path) -> None:
    """Each block has its bytes until the next is asked for, and all that was read is summed."""
    rows, width = 5000, 601
    whole = np.frombuffer(Random(1).randbytes(rows * width), np.uint8).reshape(rows, width)
    boxes = [Box((0, 0), (rows, 400)), Box((0, 400), (rows, 201))]
    joined, strips = JoinedFiles("joined"), list[Strip]()
    files = list[File]()
    for n, box in enumerate(boxes):
        (tmp_path / str(n)).write_bytes(whole[box_slices(box)].tobytes())
        files.append(File.open(tmp_path / str(n)))
        strips.append(strip(files[-1], 0, whole.shape, box, 1))
    start = joined.add(whole.nbytes, lambda: strips)
    at, buffer = start + 5, object()
    for where, data in joined.chunks(at, whole.nbytes - 5):
        assert data.obj is not buffer  # the block after this one is read into another meanwhile
        buffer = data.obj
        assert where == at
        assert bytes(data) == whole.tobytes()[at - start : at - start + len(data)]
        at += len(data)
    assert at == start + whole.nbytes
    assert joined.read_before(files[1], 0, files[1].nbytes) == (
        files[1].nbytes,
        zlib.crc32(whole[:, 400:].tobytes()),
    )
    (tmp_path / "1").write_bytes(b"short")
    with pytest.raises(CkptmoveError, match=r"shrank|truncated"):
        for _ in joined.chunks(start, whole.nbytes):
            pass
    assert list(joined.chunks(start, 0)) == []
    for file in files:
        file.close()


class Streamed(NamedTuple):
    """Bytes that only one thread may read, as what is decompressed."""

    content: bytes

    def read_into(self, start: int, buffer: bytearray | memoryview) -> None:
        assert threading.current_thread() is threading.main_thread()
        memoryview(buffer)[:] = self.content[start : start + len(buffer)]


def test_only_files_are_read_by_another_thread() -> None:
    rows, width = 5000, 2000
    whole = np.frombuffer(Random(1).randbytes(rows * width), np.uint8).reshape(rows, width)
    boxes = [Box((0, 0), (rows, 1500)), Box((0, 1500), (rows, 500))]
    joined = JoinedFiles("joined")
    strips = [
        strip(Streamed(whole[box_slices(box)].tobytes()), 0, whole.shape, box, 1) for box in boxes
    ]
    start = joined.add(whole.nbytes, lambda: strips)
    read = b"".join(bytes(data) for _, data in joined.chunks(start, whole.nbytes))
    assert read == whole.tobytes()
