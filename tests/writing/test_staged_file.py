"""What is written, where, and how: names, sources that change, holes, modes."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import CorruptError, RefusedError, WriteError
from ckptmove.sources.file import File
from tests.making.checkpoints import rezip
from tests.making.staging import (
    Once,
    moved,
    overwritten,
)
from tests.oracles.readers import (
    assert_same_checkpoint,
    pid_locations,
    record_name,
    storage_records,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# Destinations


def a_file(path: Path) -> None:
    path.write_bytes(b"mine")


def a_link(path: Path) -> None:
    a_file(path.with_name("target"))
    path.symlink_to("target")


TAKEN: dict[str, Callable[[Path], object]] = {
    "a file": a_file,
    "an empty file": Path.touch,
    "a folder": Path.mkdir,
    "a link to a file": a_link,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a folder": lambda path: path.symlink_to("."),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to the source": lambda path: path.symlink_to("in.pt"),
    "the source by another name": lambda path: path.hardlink_to(path.with_name("in.pt")),
    "a FIFO": os.mkfifo,
    "a socket": lambda path: os.mknod(path, 0o140600),
}
REPLACED = {"a file", "an empty file", "a link to a file", "a link to nothing"}
REPLACED |= {"a link to a folder", "a link to itself"}


def state(folder: Path) -> dict[str, object]:
    """Everything there, without following links."""
    found: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        link = path.readlink() if path.is_symlink() else None
        found[path.name] = (facts.st_ino, facts.st_mode, content, link)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", TAKEN)
def test_a_name_that_is_taken_stays_as_it_is(what: str, source: Path) -> None:
    TAKEN[what](source.with_name("out.pt"))
    before = state(source.parent)
    with pytest.raises(RefusedError) as caught:
        moved(source, source.with_name("out.pt"))
    assert caught.value.exit_code == 4
    assert state(source.parent) == before


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", TAKEN)
def test_by_force_files_and_links_are_replaced_and_nothing_else(what: str, source: Path) -> None:
    out = source.with_name("out.pt")
    TAKEN[what](out)
    before = state(source.parent)
    if what in REPLACED:
        moved(source, out, force=True)
        assert out.is_file()
        assert not out.is_symlink()
        assert_same_checkpoint(source, out, {"cpu": "cuda:0"})
        del before["out.pt"]
        assert {
            name: each for name, each in state(source.parent).items() if name in before
        } == before
    else:
        with pytest.raises(RefusedError):
            moved(source, out, force=True)
        assert state(source.parent) == before


def test_who_has_the_old_file_open_keeps_it(source: Path) -> None:
    out = source.with_name("out.pt")
    out.write_bytes(b"old")
    with out.open("rb") as file:
        moved(source, out, force=True)
        assert file.read() == b"old"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    ["no/such/folder.pt", "in.pt/below.pt", "a/", ".", "..", "", "a\0b", "x" * 256, "link/out.pt"],
)
def test_a_name_that_nothing_can_have_is_refused(name: str, source: Path) -> None:
    (source.parent / "link").symlink_to("link")
    before = state(source.parent)
    with pytest.raises((RefusedError, WriteError)):
        moved(source, f"{source.parent}/{name}" if name else "")
    assert state(source.parent) == before


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "-o", "a\nb", " ", "\udcff", "*.pt", ".pt"])
def test_a_name_that_something_can_have_is_fine(
    name: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    assert moved(source, name).destination == name
    assert pid_locations(Path(name))[0] == ("0", "cuda:0")


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["a file", "a folder", "a link to nothing", "a FIFO"])
def test_a_name_that_is_taken_meanwhile_stays_as_it_is(what: str, sparse: Path) -> None:
    out, found = sparse.with_name("out.pt"), {}

    def take() -> None:
        TAKEN[what](out)
        found["out.pt"] = state(sparse.parent)["out.pt"]

    with pytest.raises(RefusedError):
        moved(sparse, out, progress=Once(take))
    assert state(sparse.parent)["out.pt"] == found["out.pt"]


# Sources that change, or are damaged


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES: dict[str, Callable[[Path], object]] = {
    "grows": appended,
    "shrinks": lambda path: os.truncate(path, path.stat().st_size - 1),
    "is emptied": lambda path: os.truncate(path, 0),
    "is overwritten": overwritten,
    "is touched": os.utime,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("force", [True, False])
def test_a_source_that_changes_meanwhile_is_refused(how: str, force: bool, sparse: Path) -> None:
    out = sparse.with_name("out.pt")
    if force:
        out.write_bytes(b"mine")
    with pytest.raises(CorruptError) as caught:
        moved(sparse, out, force=force, progress=Once(lambda: CHANGES[how](sparse)))
    assert caught.value.path == os.fspath(sparse)
    assert out.exists() == force
    assert not force or out.read_bytes() == b"mine"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["data/0", "data/1", "version", "byteorder", ".format_version"])
@pytest.mark.parametrize("way", ["patch", "relay"])
def test_a_damaged_record_is_named_and_nothing_is_written(
    name: str, way: str, source: Path
) -> None:
    path = source if way == "patch" else rezip(source, source.with_name("packed.pt"))
    with zipfile.ZipFile(path) as archive:
        record = next(each for each in archive.infolist() if record_name(each) == name)
        content = archive.read(record)
    data = bytearray(path.read_bytes())
    at = data.index(content, record.header_offset + 30 + len(record.filename))
    data[at + len(content) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=f"'[^']*/{name}'") as caught:
        moved(path, source.with_name("out.pt"))
    assert (caught.value.exit_code, caught.value.path) == (3, os.fspath(path))
    assert not source.with_name("out.pt").exists()


def test_damage_can_not_be_seen_where_there_is_no_checksum(sparse: Path) -> None:
    report = moved(sparse, sparse.with_name("out.pt"))
    assert any("no checksum" in each for each in report.warnings)


# How it is written


def test_holes_stay_holes(sparse: Path) -> None:
    report = moved(sparse, sparse.with_name("out.pt"))
    out = sparse.with_name("out.pt").stat()
    assert out.st_size == report.bytes_written == sparse.stat().st_size > 1 << 26
    assert out.st_blocks <= sparse.stat().st_blocks + 16
    with sparse.open("rb") as ours, sparse.with_name("out.pt").open("rb") as theirs:
        for record in storage_records(sparse):
            ours.seek(record.header_offset)
            theirs.seek(record.header_offset)
            assert ours.read(150) == theirs.read(150)


def test_holes_are_looked_for_once(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, step = sparse.stat().st_size, 1 << 16
    extents = [(at, min(at + step, nbytes)) for at in range(0, nbytes, step)]
    alone = []
    for start, end in extents:
        with File.open(sparse) as source:
            alone.append(list(source.data_ranges(start, end)))
    asked, lseek = count(), os.lseek
    monkeypatch.setattr(os, "lseek", lambda *args: (next(asked), lseek(*args))[1])
    with File.open(sparse) as source:
        assert [list(source.data_ranges(*extent)) for extent in extents] == alone
        assert next(asked) < 10 < len(extents)
        assert [list(source.data_ranges(*extent)) for extent in extents[::-1]] == alone[::-1]


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o664, 0o666, 0o755, 0o777])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0])
@pytest.mark.parametrize("force", [True, False])
def test_the_mode_is_the_sources_under_the_umask(
    mode: int, mask: int, force: bool, source: Path
) -> None:
    out = source.with_name("out.pt")
    if force:
        out.touch(0o600)
    source.chmod(mode)
    before = os.umask(mask)
    try:
        moved(source, out, force=force)
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o7777 == mode & ~mask


def test_special_bits_are_not_handed_on(source: Path) -> None:
    source.chmod(0o6755)
    moved(source, source.with_name("out.pt"))
    assert source.with_name("out.pt").stat().st_mode & 0o7000 == 0


@pytest.mark.parametrize("kind", ["patch", "relay", "clone", "sparse"])
def test_progress_adds_up_to_the_size(kind: str, source: Path, sparse: Path) -> None:
    path = {"relay": rezip(source, source.with_name("b.pt")), "sparse": sparse}.get(kind, source)
    steps: list[int] = []
    to = "cpu" if kind == "clone" else "cuda:0"
    out = source.with_name("out.pt")
    report = ckptmove.relocate(path, out, to=to, all=True, progress=steps.append)
    assert report.method == ("patch" if kind == "sparse" else kind)
    assert all(step >= 0 for step in steps)
    assert sum(steps) == out.stat().st_size
