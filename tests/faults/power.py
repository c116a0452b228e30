"""A disk whose power is cut.

It is the image of a mounted file system: bytes that were written but not synced are not in it. A
copy of the image, mounted, is the disk after the cut.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.making.staging import mounted, or_skip


class Disk:
    """A mounted file system whose writes wait for a sync."""

    def __init__(self, folder: Path, image: Path, path: Path) -> None:
        self._folder, self._image, self.path = folder, image, path

    def sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.sync()

    def write_back(self, path: Path) -> None:
        """Write the bytes of a file, and no names: what a disk may do by itself at any time."""
        wait_before, write, wait_after = 1, 2, 4
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        with path.open("rb") as file:
            if call(file.fileno(), 0, 0, wait_before | write | wait_after):
                raise OSError(ctypes.get_errno(), "sync_file_range")

    @contextmanager
    def after_the_cut(self) -> Iterator[Path]:
        """The disk as it is found after a power cut now."""
        copy, there = self._folder / "copy", self._folder / "after"
        shutil.copyfile(self._image, copy)
        try:
            with mounted(there, "-o", "loop", os.fspath(copy)) as found:
                yield found
        finally:
            there.rmdir()


@contextmanager
def disk_of(folder: Path, mib: int = 16) -> Iterator[Disk]:
    """A new disk; the test is skipped where none can be mounted."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(mib << 20)
    or_skip("mkfs.ext4", "-q", image)
    with mounted(folder / "disk", "-o", "loop,noatime,commit=300", os.fspath(image)) as path:
        yield Disk(folder, image, path)
