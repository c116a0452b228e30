"""A copy of a zip with new content in a record is told from one in which anything else differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptmove import relocate
from ckptmove.sources.source import Memory
from ckptmove.zips.archive import Archive
from ckptmove.zips.checking import holds_patched


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A checkpoint, and what relocating it makes of it as a patch."""
    folder: Path = tmp_path_factory.mktemp("patched")
    torch.save({f"t{n}": torch.zeros(3) for n in range(20)}, folder / "a.pt")
    report = relocate(folder / "a.pt", folder / "b.pt", to="meta")
    assert report.method == "patch"
    return (folder / "a.pt").read_bytes(), (folder / "b.pt").read_bytes()


def holds(before: bytes, after: bytes) -> bool:
    archive = Archive(Memory(before, "a.pt"))
    record = next(each for each in archive.records.values() if each.name.endswith("data.pkl"))
    return holds_patched(archive, Memory(after, "b.pt"), [record])


def test_a_patch_is_one(pair: tuple[bytes, bytes]) -> None:
    assert holds(*pair)
    assert holds(pair[0], pair[0])


def test_a_byte_more_or_less_is_none(pair: tuple[bytes, bytes]) -> None:
    assert not holds(pair[0], pair[1] + b"\0")
    assert not holds(pair[0], pair[1][:-1])


def test_each_byte_of_the_frame_counts(pair: tuple[bytes, bytes]) -> None:
    before, after = pair
    archive = Archive(Memory(before, "a.pt"))
    record = next(each for each in archive.records.values() if each.name.endswith("data.pkl"))
    start = archive.data_at(record)
    end = start + record.nbytes
    looked_at = [
        *range(record.header_at, start),  # the local header
        *range(start, end, 97),  # the content, whose checksum is no longer right then
        *range(end, end + 8),  # the descriptor
        *range(archive.directory_at, len(after)),
    ]
    for at in looked_at:
        damaged = bytearray(after)
        damaged[at] ^= 1
        assert not holds(before, bytes(damaged)), at
