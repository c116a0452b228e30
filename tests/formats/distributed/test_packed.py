"""Items of DCP that torch compressed with zstd."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _extension
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ckptmove
from ckptmove import formats
from ckptmove.errors import CkptmoveError, CorruptError, UnsupportedError
from ckptmove.formats.distributed.dcp.folder import DcpContainer
from ckptmove.formats.distributed.dcp.packed import MOST_OPEN, PackedItem
from tests.making.distributed import Box, ChunkPlanner
from tests.oracles.sameness import assert_same_tree

zstandard = pytest.importorskip("zstandard")


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "rows": torch.randn(300, 400),
        "columns": torch.randn(40, 30).bfloat16(),
        "turned": torch.randn(50, 60).t(),
        "step": torch.tensor(3.0),
        "nothing": torch.empty(0, 3),
        "name": "x" * 1000,
        "pair": (torch.arange(3), 2),
    }


BOXES: dict[str, list[Box]] = {
    "rows": [((0, 0), (150, 400)), ((150, 0), (150, 400))],
    "columns": [((0, 0), (40, 15)), ((0, 15), (40, 15))],
}


class Zeros(_extension.ZStandard):
    """Makes of each item as many zeros as nobody expects."""

    def transform_to(self, output: Any) -> Any:
        made = super().transform_to(output)
        for _ in range(65):
            made.write(bytes(1 << 20))
        return made


class Grown(io.BytesIO):
    """Adds records without content to a zip before it is compressed."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def close(self) -> None:
        with zipfile.ZipFile(self, "a") as archive:
            for n in range(20):
                archive.writestr(f"archive/{n}", "")
        self.output.write(self.getvalue())
        self.output.close()


class ManyRecords(_extension.ZStandard):
    """Has more records in each item than torch writes."""

    def transform_to(self, output: Any) -> Any:
        return Grown(super().transform_to(output))


def save_packed(folder: Path, kind: Any = _extension.ZStandard) -> Path:
    writer = FileSystemWriter(folder, _extensions=[kind()])
    save(state(), storage_writer=writer, planner=ChunkPlanner(BOXES), no_dist=True)
    return folder


def test_they_are_read_as_if_they_were_not(tmp_path: Path) -> None:
    folder = save_packed(tmp_path / "dcp")
    expected = {**state(), "turned": state()["turned"].contiguous()}
    assert_same_tree(ckptmove.load(folder), expected)
    assert ckptmove.inspect(folder).divisions["columns"] == "columns/2"
    for name in ("all.pt", "all.safetensors"):
        ckptmove.convert(folder, tmp_path / name)
        assert_same_tree(ckptmove.load(tmp_path / name), expected)
        assert ckptmove.diff(folder, tmp_path / name).equal
    ckptmove.convert(folder, tmp_path / "again", format="dcp", ranks=2)
    assert_same_tree(ckptmove.load(tmp_path / "again"), expected)
    assert ckptmove.validate(folder).ok


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
def test_damage_is_told_or_harmless(seed: int, tmp_path: Path) -> None:
    folder, random_ = save_packed(tmp_path / "dcp"), random.Random(seed)
    (file,) = folder.glob("*.distcp")
    held, out = file.read_bytes(), tmp_path / "out.pt"
    for _ in range(8):
        spoiled = bytearray(held)
        spoiled[random_.randrange(len(held))] ^= 1 << random_.randrange(8)
        file.write_bytes(spoiled)
        out.unlink(missing_ok=True)
        with contextlib.suppress(CkptmoveError):
            ckptmove.convert(folder, out)
        if out.exists():
            assert_same_tree(ckptmove.load(out)["rows"], state()["rows"])
    file.write_bytes(held[:-100])
    with pytest.raises(CkptmoveError, match="truncated"):
        ckptmove.convert(folder, tmp_path / "never.pt")
    assert not (tmp_path / "never.pt").exists()


@pytest.mark.parametrize("width", [512, 64])
def test_a_few_streams_are_open_at_a_time(width: int, tmp_path: Path) -> None:
    """Chunks of columns are woven of as many items, all of which are read in turn."""
    tensor, folder = torch.randn(64, 4096), tmp_path / "dcp"
    boxes: dict[str, list[Box]] = {"w": [((0, n), (64, width)) for n in range(0, 4096, width)]}
    writer = FileSystemWriter(folder, _extensions=[_extension.ZStandard()])
    save({"w": tensor}, storage_writer=writer, planner=ChunkPlanner(boxes), no_dist=True)
    if width == 64:
        with pytest.raises(UnsupportedError, match="64 columns or boxes that are compressed"):
            ckptmove.load(folder)
    else:
        assert torch.equal(ckptmove.load(folder)["w"], tensor)
    with formats.open_checkpoint(folder) as found:
        container = found.container
        assert isinstance(container, DcpContainer)
        (storage,) = container.storages
        packed = [item.source for *_, item in container.items_of(storage)]
        held = [each for each in packed if isinstance(each, PackedItem)]
        assert len(held) == 4096 // width
        assert sum(each._stream is not None for each in held) <= MOST_OPEN
        assert not any(each._head or each._tail for each in held)


def test_no_thread_closes_what_another_reads(tmp_path: Path) -> None:
    tensor, folder = torch.randn(64, 1024), tmp_path / "dcp"
    boxes: dict[str, list[Box]] = {"w": [((0, n), (64, 64)) for n in range(0, 1024, 64)]}
    writer = FileSystemWriter(folder, _extensions=[_extension.ZStandard()])
    save({"w": tensor}, storage_writer=writer, planner=ChunkPlanner(boxes), no_dist=True)
    with formats.open_checkpoint(folder) as found:
        container = found.container
        assert isinstance(container, DcpContainer)
        *_, item = container.items_of(next(iter(container.storages)))[0]
        packed = item.source
        assert isinstance(packed, PackedItem)
        assert packed._stream is None  # all of it was read, and nothing of it is wanted yet
        start = packed.read(item.at, 100)
        stream = packed._stream
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(ckptmove.load, folder).result()["w"], tensor)
        assert packed._stream is stream is not None
        assert start + packed.read(item.at + 100, 60) == packed.read(item.at, 160)


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    folder = save_packed(tmp_path / "dcp", Zeros)
    with pytest.raises(CorruptError, match="it becomes more than"):
        ckptmove.convert(folder, tmp_path / "out.pt")


def test_many_records_in_an_item_are_refused(tmp_path: Path) -> None:
    """All that is compressed could be read again for each; torch writes seven."""
    folder = save_packed(tmp_path / "dcp", ManyRecords)
    with pytest.raises(CorruptError, match="that torch"):
        ckptmove.convert(folder, tmp_path / "out.pt")
    with formats.open_checkpoint(folder) as found:
        faults = list(found.container.damage(lambda _: None))
    assert faults
    assert all("not a tensor" in each for each in faults)


def test_without_zstd_they_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_packed(tmp_path / "dcp")
    for name in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="compressed by zstd"):
        ckptmove.load(folder)
