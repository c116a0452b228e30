"""The zip reader: what real writers write is read as others read it; contradictions are refused."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import struct
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove.errors import CkptmoveError, CorruptError, UnsupportedError
from ckptmove.sources.file import File
from ckptmove.zips.archive import Archive
from ckptmove.zips.local_headers import check_layout
from tests.making.building import Part, build_zip, deflate
from tests.making.checkpoints import MAKERS, rezip, save, save_by_cpp, sparse_zip64

MOST = 1 << 24


def read_all(path: Path) -> dict[str, bytes]:
    """Every record by ckptmove, once all headers are checked."""
    with File.open(path) as source:
        archive = Archive(source)
        check_layout(archive)
        return {name: archive.read(each, at_most=MOST) for name, each in archive.records.items()}


def assert_reads_as_zipfile(path: Path) -> None:
    """The same records in the same order, with the same facts and bytes."""
    with zipfile.ZipFile(path) as theirs, File.open(path) as source:
        ours = Archive(source)
        check_layout(ours)
        assert list(ours.records) == theirs.namelist()
        for info in theirs.infolist():
            record = ours.records[info.filename]
            assert record.crc32 == info.CRC
            assert (record.stored_nbytes, record.nbytes) == (info.compress_size, info.file_size)
            assert (record.method, record.flags) == (info.compress_type, info.flag_bits)
            assert record.header_at == info.header_offset
            if info.file_size <= MOST and (info.CRC or not info.file_size):
                content = ours.read(record, at_most=MOST)
                assert content == theirs.read(info)
                assert source.read(ours.data_at(record), record.stored_nbytes) == (
                    content if info.compress_type == 0 else raw_of(path, info)
                )


def raw_of(path: Path, info: zipfile.ZipInfo) -> bytes:
    """The stored bytes of a record, from its local header."""
    data = path.read_bytes()
    name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + name + extra
    return data[start : start + info.compress_size]


# What others write

CONTENT = {
    "a/data.pkl": b"pickle " * 40,
    "a/data/0": bytes(range(256)),
    "a/empty": b"",
    "a/ü": b"u",
}


def by_zipfile(path: Path, *, wide: bool = False, streamed: bool = False, **options: Any) -> None:
    """Python's writer; streamed, sizes follow in descriptors."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    file = Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.comment = b"a comment"
        archive.mkdir("a")
        for name, content in CONTENT.items():
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=wide) as record:
                record.write(content)
    path.write_bytes(file.getvalue())


def by_info_zip(path: Path, *options: str, streamed: bool = False) -> None:
    """The `zip` command; streamed, it writes to a pipe."""
    if shutil.which("zip") is None:
        pytest.skip("needs Info-ZIP's zip")
    folder = path.parent / "packed"
    for name, content in list(CONTENT.items())[:3]:  # it writes others without the UTF-8 flag
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    target = "-" if streamed else os.fspath(path)
    command = ["zip", "-q", "-r", *options, target, "a"]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE)
    if streamed:
        path.write_bytes(done.stdout)


WRITERS: dict[str, Callable[[Path], object]] = {
    "zipfile stored": by_zipfile,
    "zipfile deflated": lambda path: by_zipfile(path, compression=zipfile.ZIP_DEFLATED),
    "zipfile zip64": lambda path: by_zipfile(path, wide=True),
    "zipfile streamed": lambda path: by_zipfile(path, streamed=True),
    "zipfile zip64 streamed": lambda path: by_zipfile(path, wide=True, streamed=True),
    "zip stored": lambda path: by_info_zip(path, "-0"),
    "zip deflated": lambda path: by_info_zip(path, "-9"),
    "zip without folders or extra fields": lambda path: by_info_zip(path, "-D", "-X"),
    "zip zip64": lambda path: by_info_zip(path, "-fz"),
    "zip streamed": lambda path: by_info_zip(path, streamed=True),
    "torch": lambda path: save(path, MAKERS["linear_state_dict"]()),
    "torch with empty storages": lambda path: save(path, [torch.ones(0), torch.ones(3)]),
    "libtorch": lambda path: save_by_cpp({"a": torch.ones(3)}, path),
    "torch, packed by zipfile": lambda path: rezip(
        save(path.with_suffix(".pt"), [torch.ones(99), torch.ones(0)]), path, lambda _: True
    ),
    "torch above 4 GiB": sparse_zip64,
    "by hand": lambda path: path.write_bytes(build_zip([Part("a", b"b")], wide=True)),
    "by hand, nothing": lambda path: path.write_bytes(build_zip([])),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_is_read_as_zipfile_reads_it(writer: str, tmp_path: Path) -> None:
    WRITERS[writer](tmp_path / "made.zip")
    assert_reads_as_zipfile(tmp_path / "made.zip")


@pytest.mark.parametrize("name", ["linear_state_dict", "many_storages", "empty_tensors"])
def test_records_lie_where_torch_looks_for_them(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "made.pt", MAKERS[name]() if name in MAKERS else [torch.ones(0)] * 2)
    theirs: Any = torch._C.PyTorchFileReader(os.fspath(path))
    with File.open(path) as source:
        ours = Archive(source)
        for full, record in ours.records.items():
            if record.nbytes:
                short = full.partition("/")[2]
                assert ours.data_at(record) == theirs.get_record_offset(short)
        assert ours.trailing_nbytes == 0


def test_a_comment_and_what_follows_it_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(build_zip([Part("a", b"b")], comment=b"hello", after=b"junk"))
    with File.open(tmp_path / "a") as source:
        assert Archive(source).trailing_nbytes == 4


def test_an_end_record_inside_a_record_is_content(tmp_path: Path) -> None:
    inner = build_zip([Part("a", b"b")], wide=True)
    (tmp_path / "a").write_bytes(build_zip([Part("x/inner", inner), Part("x/y", b"PK\5\6" * 9)]))
    assert read_all(tmp_path / "a") == {"x/inner": inner, "x/y": b"PK\5\6" * 9}


def test_a_record_longer_than_asked_for_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(build_zip([Part("a", b"12345")]))
    with File.open(tmp_path / "a") as source:
        archive = Archive(source)
        assert archive.read(archive.records["a"], at_most=5) == b"12345"
        with pytest.raises(UnsupportedError):
            archive.read(archive.records["a"], at_most=4)


def test_no_checksum_is_not_a_wrong_one(tmp_path: Path) -> None:
    zero = {"crc": 0}
    (tmp_path / "a").write_bytes(build_zip([Part("a", b"1", local=zero, central=zero)]))
    with File.open(tmp_path / "a") as source:
        record = Archive(source).records["a"]
        assert record.lacks_checksum
        assert Archive(source).read(record, at_most=9) == b"1"


# Cut, packed and blown up


def test_cut_anywhere_it_is_corrupt(tmp_path: Path) -> None:
    data = save(tmp_path / "made.pt", [torch.ones(3)]).read_bytes()
    wide = build_zip([Part("a", b"1", wide=True), Part("b", b"2", method=8)], comment=b"")
    for whole in (data, wide):
        for end in range(len(whole)):
            (tmp_path / "cut").write_bytes(whole[:end])
            with pytest.raises(CorruptError):
                read_all(tmp_path / "cut")


ZEROS = deflate(bytes(32 << 20))
SMALL = deflate(b"a" * 100)
BOMBS: dict[str, Part] = {
    "inflates to more than declared": Part("a", bytes(100), 8, raw=ZEROS),
    "inflates to one byte more": Part("a", b"a" * 99, 8, raw=SMALL),
    "inflates to one byte less": Part("a", b"a" * 101, 8, raw=SMALL),
    "claims more than deflate can do": Part("a", b"", 8, raw=SMALL, central={"nbytes": MOST}),
    "is cut": Part("a", b"a" * 100, 8, raw=SMALL[:-2]),
    "has no last block": Part("a", b"abc", 8, raw=b"\0\3\0\xfc\xffabc"),
    "is empty": Part("a", b"a" * 100, 8, raw=b""),
    "is no deflate": Part("a", b"a" * 100, 8, raw=b"\xff" * 20),
    "has the header of zlib": Part("a", b"a" * 100, 8, raw=b"\x78\x9c" + SMALL),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_record_that_does_not_inflate_to_its_size_is_corrupt(bomb: str, tmp_path: Path) -> None:
    part = BOMBS[bomb]
    now = replace(part, local=part.central)
    later = replace(part, flags=0x0808, descriptor=part.central)
    for each in (now, later):
        (tmp_path / "a").write_bytes(build_zip([each]))
        tracemalloc.start()
        with pytest.raises(CorruptError, match=r"inflate|deflate"):
            read_all(tmp_path / "a")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


def test_the_end_record_is_found_behind_the_longest_comment(tmp_path: Path) -> None:
    for nbytes, found in ((0xFFFF, True), (0x10000, False)):
        data = build_zip([Part("a", b"1")], comment=b"c" * min(nbytes, 0xFFFF))
        (tmp_path / "a").write_bytes(data + b"x" * (nbytes - 0xFFFF))
        if found:
            assert read_all(tmp_path / "a") == {"a": b"1"}
        else:
            with pytest.raises(CorruptError):
                read_all(tmp_path / "a")


# Two directories in one file


def two_directories(shown: bytes, hidden: bytes) -> tuple[bytes, bytes, bytes]:
    """Two zips on one set of records, as bytes up to the ends, and the end record of each."""
    parts = [Part("a/data.pkl", hidden), Part("a/data.pkl", shown), Part("a/version", b"3\n")]
    whole = build_zip(parts)
    at = struct.unpack_from("<I", whole, len(whole) - 6)[0]
    directory, sizes = whole[at:-22], [46 + len(part.name) for part in parts]
    starts = list(itertools.accumulate(sizes, initial=0))
    entries = [directory[a:b] for a, b in itertools.pairwise(starts)]
    body, ends = whole[:at], []
    for first in (entries[0], entries[1]):
        both = first + entries[2]
        ends.append(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(both), len(body), 0))
        body += both
    return body, ends[1], ends[0]


@pytest.mark.parametrize("where", ["in the comment", "after the end", "copied after the end"])
def test_a_second_end_record_is_refused(where: str, tmp_path: Path) -> None:
    """torch takes the last, wherever it points to: what we read is not what would be loaded."""
    body, end, other = two_directories(b"shown", b"hidden")
    (tmp_path / "a").write_bytes(body + end)
    assert read_all(tmp_path / "a")["a/data.pkl"] == b"shown"
    if where == "in the comment":
        data = body + end[:-2] + struct.pack("<H", len(other)) + other
    else:
        data = body + end + (end if where.startswith("copied") else other)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CkptmoveError):
        read_all(tmp_path / "a")


def test_two_zips_in_a_row_are_refused(tmp_path: Path) -> None:
    one, other = build_zip([Part("a", b"1")]), build_zip([Part("a", b"2")])
    (tmp_path / "a").write_bytes(one + other)
    with pytest.raises(UnsupportedError):
        read_all(tmp_path / "a")
