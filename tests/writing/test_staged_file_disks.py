"""Disks that are full, read-only, elsewhere, or can share blocks: real ones, mounted for a test."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import CkptmoveError, CorruptError, RefusedError, WriteError
from tests.making.staging import (
    Once,
    mounted,
    moved,
    or_skip,
    overwritten,
)
from tests.oracles.readers import assert_same_checkpoint, pid_locations

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_from_one_file_system_to_another(source: Path, sparse: Path) -> None:
    with mounted(source.parent / "other", "-t", "tmpfs", "-o", "size=4m", "none") as other:
        for path in (source, sparse):
            report = moved(path, other / "out.pt")
            assert report.copied in ("kernel", "read")
            assert set(dict(pid_locations(other / "out.pt")).values()) == {"cuda:0"}
            assert (other / "out.pt").stat().st_blocks * 512 < 1 << 20
            back = ckptmove.relocate(
                other / "out.pt", path.with_name("back.pt"), to="cpu", all=True
            )
            assert back.bytes_written == path.stat().st_size
            assert_same_checkpoint(path, path.with_name("back.pt"), lambda _key, _old: "cpu")
            (other / "out.pt").unlink()
            path.with_name("back.pt").unlink()


@contextmanager
def sharing_disk(kind: str, folder: Path) -> Iterator[Path]:
    """A file system that can share blocks between files."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    or_skip(f"mkfs.{kind}", "-q", image)
    with mounted(folder / "disk", "-o", "loop", os.fspath(image)) as disk:
        yield disk


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
@pytest.mark.parametrize("to", ["cuda:0", "cpu"])
def test_blocks_are_shared_where_the_file_system_can(kind: str, to: str, source: Path) -> None:
    steps: list[int] = []
    with sharing_disk(kind, source.parent) as disk:
        inside, out = shutil.copyfile(source, disk / "in.pt"), disk / "out.pt"
        report = ckptmove.relocate(inside, out, to=to, progress=steps.append)
        assert report.copied == "reflink"
        assert_same_checkpoint(inside, out, {"cpu": to})
        assert sum(steps) == out.stat().st_size


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_damage_is_seen_where_blocks_are_shared(kind: str, source: Path) -> None:
    with sharing_disk(kind, source.parent) as disk:
        inside = shutil.copyfile(source, disk / "in.pt")
        overwritten(inside)
        with pytest.raises(CorruptError, match="data/0"):
            moved(inside, disk / "out.pt")
        assert [path.name for path in disk.iterdir()] == ["in.pt"]


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(source: Path) -> None:
    with mounted(source.parent / "small", "-t", "tmpfs", "-o", "size=100k", "none") as small:
        with pytest.raises(RefusedError, match="not enough free space") as caught:
            moved(source, small / "out.pt")
        assert caught.value.exit_code == 4
        assert list(small.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_an_error(sparse: Path) -> None:
    with mounted(sparse.parent / "small", "-t", "tmpfs", "-o", "size=1m", "none") as small:

        def fill() -> None:
            with (small / "filler").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass

        with pytest.raises(WriteError, match=os.strerror(errno.ENOSPC)) as caught:
            moved(sparse, small / "out.pt", progress=Once(fill))
        assert caught.value.exit_code == 5
        assert [path.name for path in small.iterdir()] == ["filler"]


def test_a_disk_without_inodes_is_an_error(source: Path) -> None:
    options = "size=9m,nr_inodes=2"
    with mounted(source.parent / "small", "-t", "tmpfs", "-o", options, "none") as small:
        (small / "last").touch()
        with pytest.raises(CkptmoveError, match=os.strerror(errno.ENOSPC)):
            moved(source, small / "out.pt")


def test_a_disk_that_is_read_only_is_refused(source: Path) -> None:
    read_only = mounted(source.parent / "small", "-t", "tmpfs", "-o", "ro", "none")
    with read_only as small, pytest.raises(RefusedError, match=os.strerror(errno.EROFS)):
        moved(source, small / "out.pt")


def test_a_folder_that_takes_no_files_is_refused(source: Path) -> None:
    folder = source.parent / "locked"
    folder.mkdir()
    or_skip("chattr", "+i", folder)
    try:
        with pytest.raises(RefusedError, match=os.strerror(errno.EPERM)):
            moved(source, folder / "out.pt")
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)
