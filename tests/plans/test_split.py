"""Plans that are carried out in parts: what comes of it is what comes of the whole."""

from __future__ import annotations

import os
import pickle
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptmove
from ckptmove import CorruptError
from ckptmove.plans.plan import Checksum, Copy, CrcRange, Gather, Plan, Write
from ckptmove.plans.split import combined, divided
from ckptmove.writing.distributed import SPREAD, Part, RemoteParts
from ckptmove.writing.execute import write_part
from ckptmove.writing.staged_file import LocalFile
from tests.making.checkpoints import MAKERS, save
from tests.making.plans import Case, cases, opened
from tests.making.trees import contents
from tests.oracles.steps import steps


@pytest.fixture(autouse=True, scope="module")
def fine() -> Iterator[None]:
    """Limits wherever they may be, as if small files were large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptmove.plans.split._ALIGNED", 64)
        yield


@contextmanager
def spread(nbytes: int) -> Iterator[list[Part]]:
    """Have parts written one by one, from the last to the first; gives all of them."""
    seen = list[Part]()

    def write(parts: Sequence[Part]) -> Sequence[Sequence[int]]:
        seen.extend(parts)
        sent = [pickle.dumps(part) for part in parts]
        return [write_part(pickle.loads(part)) for part in reversed(sent)][::-1]

    token = SPREAD.set(RemoteParts(nbytes, write))
    try:
        yield seen
    finally:
        SPREAD.reset(token)


def test_sums_are_put_together_as_zlib_has_them() -> None:
    chance = random.Random(1)
    for _ in range(200):
        one, two = (chance.randbytes(chance.choice((0, 1, 7, 4096, 70_001))) for _ in range(2))
        assert combined(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


def test_sums_are_put_together_in_few_steps() -> None:
    combined(1, 2, 1 << 40)
    assert steps(lambda: combined(0, 2, 1 << 40)) < 50
    assert steps(lambda: combined(1, 2, 0)) < 50
    assert steps(lambda: combined(1, 2, 1 << 40)) < 2000, "the matrices are kept"


def test_neither_writes_nor_gathers_are_cut() -> None:
    gather = Gather(200, 100, 0, 0, 400, "float32", (25,), (4,), 0)
    copies = (Copy(0, 100, 0), Copy(100, 700, 300))
    checksums = (Checksum(300, 50, 1, "a", 100), Checksum(400, 300, 2, "b", 200))
    measures = (CrcRange(0, 350), CrcRange(900, 60))
    writes = (Write(120, b"x" * 80), Write(600, b"y"))
    plan = Plan("relay", 1000, copies, writes, checksums, (gather,), measures)
    whole = divided(plan, 128)
    ends = [0, *(part.nbytes for part in whole.parts)]
    assert ends == [0, 320, 448, 576, 704, 832, 960, 1000]
    assert [each.at for part in whole.parts for each in part.writes] == [120, 600]
    assert [part.gathers for part in whole.parts] == [(gather,), (), (), (), (), (), ()]
    assert sum(copy.nbytes for part in whole.parts for copy in part.copies) == 800
    assert [each.name for each in whole.cut] == ["a", "b"]
    for part, (start, end) in zip(whole.parts, pairwise(ends), strict=True):
        ranges = [(each.at, each.nbytes) for each in part.copies]
        ranges += [(each.at, each.nbytes) for each in part.measures]
        ranges += [(each.at, each.nbytes) for each in part.checksums]
        assert all(start <= at < at + nbytes <= end for at, nbytes in ranges)


@given(cases(), st.sampled_from([5000, 1 << 16]))
@settings(max_examples=60, deadline=None)
def test_each_byte_is_as_the_model_has_it(case: Case, nbytes: int) -> None:
    with (
        TemporaryDirectory() as folder,
        opened(Path(folder), case.contents) as sources,
        spread(nbytes),
        LocalFile(Path(folder) / "out", sources, force=False) as staged,
    ):
        told = list[int]()
        staged.write(case.plan, told.append)
        staged.commit()
        assert (Path(folder) / "out").read_bytes() == case.expected


@pytest.mark.parametrize("name", ["adamw_training", "lstm_state_dict"])
def test_parts_make_the_same_file(name: str, tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", MAKERS[name](), "cuda:1")

    def make(folder: str) -> Mapping[str, bytes]:
        to = tmp_path / folder
        to.mkdir()
        ckptmove.relocate(source, to / "a.pt", to="cpu")
        ckptmove.convert(source, to / "a.safetensors")
        ckptmove.convert(source, to / "cast.pt", format="torch-zip", dtype="bf16")
        ckptmove.convert(source, f"{to}/shards/", max_shard_size=2000)
        return contents(to)

    whole = make("whole")
    with spread(256) as parts:
        assert make("parts") == whole
    assert len(parts) > 10
    assert any(part.plan.measures for part in parts)


def test_damage_is_found_in_a_record_that_is_cut(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", {"w": torch.arange(5000.0)}, "cuda:1")
    data = bytearray(source.read_bytes())
    data[data.index(torch.arange(5000.0)[2000:2004].numpy().tobytes())] ^= 1
    source.write_bytes(data)
    for nbytes in (1024, 1 << 20):
        with (
            spread(nbytes) as parts,
            pytest.raises(CorruptError, match=r"'.*/data/0' is damaged: its checksum is wrong"),
        ):
            ckptmove.relocate(source, tmp_path / "out.pt", to="cpu")
        assert (len(parts) > 10) == (nbytes == 1024)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_source_that_was_changed_meanwhile_is_not_read(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", {"w": torch.arange(5000.0)}, "cuda:1")

    def write(parts: Sequence[Part]) -> Sequence[Sequence[int]]:
        os.utime(source)
        return [write_part(part) for part in parts]

    token = SPREAD.set(RemoteParts(1024, write))
    try:
        with pytest.raises(CorruptError, match="was changed while it was read"):
            ckptmove.relocate(source, tmp_path / "out.pt", to="cpu")
    finally:
        SPREAD.reset(token)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
