"""Headers are read many at once where records are small, and alone where they are large."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from ckptmove.errors import InputError
from ckptmove.sources.file import File
from ckptmove.sources.nearby import NearbyReads
from ckptmove.sources.source import Memory
from ckptmove.zips.archive import Archive
from ckptmove.zips.local_headers import check_layout


class Counted(File):
    """A file that counts what is read of it."""

    reads = nbytes_read = 0

    def read(self, start: int, nbytes: int) -> bytes:
        self.reads += 1
        self.nbytes_read += nbytes
        return super().read(start, nbytes)


@pytest.mark.parametrize(
    ("records", "nbytes", "most_reads", "most_nbytes"),
    [(3000, 64, 40, 1 << 21), (100, 100_000, 300, 1 << 18)],
)
def test_headers_take_few_reads(
    records: int, nbytes: int, most_reads: int, most_nbytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as made:
        for n in range(records):
            made.writestr(f"a/data/{n}", os.urandom(8) * (nbytes // 8))
    with Counted.open(path) as source:
        assert isinstance(source, Counted)
        archive = Archive(source)
        directory, source.reads, source.nbytes_read = source.nbytes_read, 0, 0
        check_layout(archive)
        assert source.reads <= most_reads
        assert source.nbytes_read <= most_nbytes
        assert directory < 1 << 20
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as theirs:
            for name, record in archive.records.items():
                assert archive.read(record, at_most=nbytes) == theirs.read(name)


def test_a_read_that_fails_does_not_change_later_ones() -> None:
    """As in salvage, which goes on after a part that is behind the end of its file."""
    content = bytes(range(256)) * 8
    nearby = NearbyReads(Memory(content, "a"))
    assert nearby.read(0, 16) == content[:16]
    with pytest.raises(InputError):
        nearby.read(len(content) - 7, 16)
    for start in (len(content) - 7, len(content) - 4, 3):
        assert nearby.read(start, 4) == content[start : start + 4]
