"""Checkpoints of very many ranks need few descriptors; items that look alike are read alike."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import CorruptError, InputError
from ckptmove.formats.distributed.boxes import Box
from ckptmove.formats.distributed.dcp import items
from ckptmove.formats.distributed.dcp.items import DcpItem, open_item
from ckptmove.formats.distributed.dcp.metadata import SavedTensor
from ckptmove.formats.distributed.dcp.metadata_walk import ItemRange
from ckptmove.sources.file import File
from ckptmove.sources.nearby import NearbyFiles
from tests.making.distributed import save_dcp
from tests.making.zero import Run, save_zero
from tests.oracles.sameness import assert_same_tree

ROWS = 4
DESCRIPTORS = Path("/proc/self/fd")


def weights(ranks: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(ROWS * ranks, 3), "b": torch.randn(7)}


def dcp(folder: Path, ranks: int) -> Path:
    boxes = [((ROWS * n, 0), (ROWS, 3)) for n in range(ranks)]
    return save_dcp(folder, {"module": weights(ranks)}, {"module.a": boxes}, files=ranks)


def zero(folder: Path, ranks: int) -> Path:
    return save_zero(folder, Run(stage=2, ranks=ranks, groups=[weights(ranks)]))


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Leave room for 48 more, of which the runner of the tests has some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(each.name) for each in DESCRIPTORS.iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 48, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="counts descriptors in /proc")
@pytest.mark.parametrize(("make", "ranks"), [(dcp, 1000), (zero, 300)])
def test_files_of_very_many_ranks(
    make: Callable[[Path, int], Path], ranks: int, tmp_path: Path
) -> None:
    folder = make(tmp_path / "in", ranks)  # with as many descriptors as torch takes
    with few_descriptors():
        assert ckptmove.validate(folder).ok
        before = len(list(DESCRIPTORS.iterdir()))
        ckptmove.convert(folder, tmp_path / "out.safetensors")
        assert len(list(DESCRIPTORS.iterdir())) == before
        assert ckptmove.diff(folder, tmp_path / "out.safetensors").equal
        assert_same_tree(dict(ckptmove.load(folder)["module"]), weights(ranks))


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="counts descriptors in /proc")
def test_very_many_files_are_written(tmp_path: Path) -> None:
    torch.save(weights(300), tmp_path / "in.pt")
    with few_descriptors():
        before = len(list(DESCRIPTORS.iterdir()))
        ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="dcp", ranks=300)
        assert len(list(DESCRIPTORS.iterdir())) == before
        assert len(list((tmp_path / "out").iterdir())) == 301
        assert ckptmove.diff(tmp_path / "in.pt", tmp_path / "out").equal


def test_a_file_that_is_opened_again_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmove.sources.file._MOST_HELD", 0)
    path = tmp_path / "a"
    path.write_bytes(b"abcd")
    with File.open(path) as file:
        assert (file.read(1, 2), list(file.data_ranges(0, 4))) == (b"bc", [(0, 4)])
        file.check_unchanged()
        (tmp_path / "b").write_bytes(b"efgh")
        (tmp_path / "b").rename(path)
        for look in (lambda: file.read(0, 1), file.check_unchanged):
            with pytest.raises(CorruptError, match="was changed"):
                look()
        path.unlink()
        with pytest.raises(InputError, match="can't be read"):
            file.read(0, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [torch.tensor, lambda x: torch.full((3,), x)], ids=["0-d", "1-d"])
def test_an_item_that_looks_like_another_is_read_like_it(
    make: Callable[[float], torch.Tensor], tmp_path: Path
) -> None:
    """Whatever byte of it is damaged, it is found as by an item that nothing is known of."""
    saved = {name: make(n + 0.5) for n, name in enumerate("ab")}
    folder = save_dcp(tmp_path / "in", saved)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensor = SavedTensor("float32", tuple(saved["a"].shape), {})
    box = Box((0,) * len(tensor.shape), tensor.shape)
    first, second = (
        ItemRange(each.relative_path, each.offset, each.length)
        for each in sorted(metadata.storage_data.values(), key=lambda each: each.offset)
    )
    path = folder / first.file
    content = path.read_bytes()

    def found(source: File) -> tuple[int, ...] | str:
        try:
            item: DcpItem = open_item(source, second, "b", tensor, box, NearbyFiles())
        except InputError as error:
            return str(error)
        return (item.at, item.nbytes, *item.stride, item.crc32)

    taken = 0
    for at in range(second.at, second.at + second.nbytes):
        damaged = bytearray(content)
        damaged[at] ^= 255
        path.write_bytes(damaged)
        with File.open(path) as source:
            items._layouts.clear()
            alone = found(source)
            items._layouts.clear()
            open_item(source, first, "a", tensor, box, NearbyFiles())
            assert len(items._layouts) == 1
            assert found(source) == alone
        taken += not isinstance(alone, str)
    assert 0 < taken < second.nbytes
