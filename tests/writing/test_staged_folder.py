"""Directories that appear whole: names, force, and faults at every step there is."""

from __future__ import annotations

import os
import signal
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import CorruptError, RefusedError, WriteError
from ckptmove.plans.plan import Copy, Plan, Write
from ckptmove.writing.staged_folder import LocalFolder
from tests.conftest import some
from tests.faults.injecting import WRITING, Call, calls_of, needs_strace, run
from tests.making.plans import content, open_sources
from tests.making.staging import Once, leaving_nothing, mounted

BOTH = (content(1, 300_000), content(2, 5000))
NAMES = (*WRITING, "mkdir", "mkdirat", "rmdir")


@pytest.fixture(autouse=True)
def as_many_open_files(tmp_path: Path) -> Iterator[None]:
    """After each test: as many open files as before, and nothing temporary but after a kill."""
    killed = tmp_path / "killed"
    killed.mkdir()
    with leaving_nothing(tmp_path):
        yield
        for path in killed.rglob("*.ckptmove-tmp"):
            path.rename(tmp_path / f"{path.name}.seen")


def cloned(n: int) -> Plan:
    """A copy of a source."""
    return Plan("clone", len(BOTH[n]), (Copy(0, len(BOTH[n]), 0, n),), ())


def staged(
    out: Path, *, force: bool = False, meanwhile: Callable[[], object] | None = None
) -> None:
    """A directory with both sources in it."""
    with (
        open_sources(out.parent, BOTH) as sources,
        LocalFolder(out, sources, force=force) as folder,
    ):
        for name, plan in {"first": cloned(0), "a/b/second": cloned(1)}.items():
            with folder.file(name) as file:
                file.write(plan)
                with file.open_written() as again:
                    assert again.nbytes == plan.nbytes
            assert Path(folder.hidden, name).read_bytes() == BOTH["second" in name]
        if meanwhile is not None:
            meanwhile()
        folder.commit()


def tree(path: Path) -> dict[str, bytes | None]:
    """All that is in a directory; None is a directory."""
    return {
        str(each.relative_to(path)): None if each.is_dir() else each.read_bytes()
        for each in sorted(path.rglob("*"))
    }


WHOLE = {"first": BOTH[0], "a": None, "a/b": None, "a/b/second": BOTH[1]}


def test_it_appears_with_all_that_is_in_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    staged(out, meanwhile=lambda: out.exists() and pytest.fail("too soon"))
    assert tree(out) == WHOLE


def test_a_slash_at_the_end_is_no_part_of_the_name(tmp_path: Path) -> None:
    with LocalFolder(f"{tmp_path}/out///", [], force=False) as folder:
        with folder.file("settings.json") as file:
            file.write(Plan("relay", 2, (), (Write(0, b"{}"),)))
        folder.commit()
    assert tree(tmp_path / "out") == {"settings.json": b"{}"}


@pytest.mark.parametrize("force", [True, False])
def test_an_empty_directory_is_replaced(force: bool, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    staged(tmp_path / "out", force=force)
    assert tree(tmp_path / "out") == WHOLE


def old(out: Path) -> None:
    """A directory with something in it."""
    (out / "deep").mkdir(parents=True)
    (out / "deep" / "old").write_bytes(b"mine")


OLD = {"deep": None, "deep/old": b"mine"}


def test_a_directory_with_something_in_it_is_replaced_by_force_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old(out)
    with pytest.raises(RefusedError, match="the destination exists"):
        staged(out)
    assert tree(out) == OLD
    staged(out, force=True)
    assert tree(out) == WHOLE


def to_nothing(path: Path) -> None:
    """A link that leads nowhere."""
    path.symlink_to("nothing")


def to_a_folder(path: Path) -> None:
    """A link to a directory."""
    path.symlink_to(".")


@pytest.mark.sample(3)
@pytest.mark.parametrize("take", [Path.touch, os.mkfifo, to_nothing, to_a_folder])
@pytest.mark.parametrize("force", [True, False])
def test_what_is_no_directory_is_never_replaced(
    take: Callable[[Path], object], force: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    take(out)
    before = out.lstat()
    with pytest.raises(RefusedError, match=r"not a directory|not a valid name for a directory"):
        staged(out, force=force)
    now = out.lstat()  # when a link was read last may change
    assert (now.st_ino, now.st_mode, now.st_ctime_ns) == (
        before.st_ino,
        before.st_mode,
        before.st_ctime_ns,
    )
    out.unlink()
    with pytest.raises(RefusedError, match="exists"):
        staged(out, force=force, meanwhile=lambda: take(out))
    assert out.lstat().st_mode == before.st_mode


def test_a_name_that_is_taken_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RefusedError, match="the destination exists"):
        staged(out, meanwhile=lambda: old(out))
    assert tree(out) == OLD


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [".", "..", "/", "", "no/where", "in-0", "in-0/out", "a\0b"])
def test_a_name_that_no_directory_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with open_sources(tmp_path, BOTH) as sources, pytest.raises(RefusedError):
        LocalFolder(f"{tmp_path}/{name}" if name else "", sources, force=True)


@pytest.mark.parametrize("name", ["/a", "a/../../b", "a\0b"])
def test_files_stay_inside(name: str, tmp_path: Path) -> None:
    before = tree(tmp_path)
    with LocalFolder(tmp_path / "out", [], force=False) as folder, pytest.raises(RefusedError):
        folder.file(name)
    assert tree(tmp_path) == before


def test_a_file_is_there_once(tmp_path: Path) -> None:
    with LocalFolder(tmp_path / "out", [], force=False) as folder:
        folder.file("a")
        for name in ("a", "a/b"):
            with pytest.raises((WriteError, RefusedError)):
                folder.file(name)


def test_who_may_not_read_the_source_may_not_read_the_directory(tmp_path: Path) -> None:
    (tmp_path / "in-0").touch(0o640)
    before = os.umask(0o022)
    try:
        staged(tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*")}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert modes == {"first": 0o640, "a": 0o750, "b": 0o750, "second": 0o640}


def test_a_source_that_changes_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    with (
        open_sources(tmp_path, BOTH) as sources,
        LocalFolder(tmp_path / "out", sources, force=False) as folder,
        folder.file("first") as file,
        pytest.raises(CorruptError, match="changed"),
    ):
        file.write(cloned(0), Once(lambda: os.utime(tmp_path / "in-1")))
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=320k", "none") as small,
        open_sources(tmp_path, BOTH) as sources,
    ):
        old(small / "out")
        with LocalFolder(small / "out", sources, force=True) as folder:
            with folder.file("first") as file:
                file.write(cloned(0))
            with folder.file("second") as file, pytest.raises((RefusedError, WriteError)):
                file.write(Plan("relay", 99_999, (), (Write(0, bytes(99_999)),)))
        assert tree(small) == {"out": None, **{f"out/{name}": OLD[name] for name in OLD}}


# Faults


class Scene:
    """A staging, the calls that it makes, and what is there when it is done."""

    def __init__(self, folder: Path, kind: str, *, force: bool) -> None:
        self.folder, self.force = folder, force
        self.out = folder / "there" / "out"
        self.out.parent.mkdir()
        sources = [folder / "in-0", folder / "in-1"]
        for path, data in zip(sources, BOTH, strict=True):
            path.write_bytes(data)
        self.command = [sys.executable, "-B", "-m", "tests.faults.staged_job"]
        self.command += [kind, "1" if force else ""]
        self.command += [os.fspath(path) for path in (self.out, *sources)]
        self.clear()
        self.calls = [
            call
            for call in calls_of(self.command, sources[0], folder / "log", NAMES)
            if call.name != "close" and (call.name != "openat" or "O_CREAT" in call.text)
        ]
        self.good = self.there()

    def clear(self) -> None:
        """Empty the directory, but for what is to be replaced."""
        for path in sorted(self.out.parent.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if self.force:
            old(self.out)

    def there(self) -> dict[str, bytes | None] | bytes | None:
        """What has the name."""
        if self.out.is_file():
            return self.out.read_bytes()
        return tree(self.out) if self.out.exists() else None

    def hidden(self) -> list[dict[str, bytes | None]]:
        """What has another name."""
        return [tree(path) for path in self.out.parent.iterdir() if path != self.out]

    @property
    def is_file(self) -> bool:
        """Whether it makes a file."""
        return isinstance(self.good, bytes)

    def injected(self, call: Call, what: str) -> int:
        """Run it with a fault; gives the exit code."""
        self.clear()
        return run(self.command, f"{call.name}:{what}:when={call.ordinal}", names=NAMES).code


@pytest.fixture(params=["file", "folder", "replaced"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    """One file of several sources, a directory, one that replaces another."""
    kind = "file" if request.param == "file" else "folder"
    return Scene(tmp_path / "killed", kind, force=request.param == "replaced")


@needs_strace
def test_what_is_staged_is_right(scene: Scene) -> None:
    body = b"".join(BOTH)
    joined = b"a head: " + struct.pack("<I", zlib.crc32(body)) + body
    if isinstance(scene.good, bytes):
        assert scene.good == joined
        return
    assert scene.good == {
        "joined": joined,
        "a": None,
        "a/b": None,
        "a/b/first": BOTH[0],
        "a/settings.json": b"{}",
    }
    names = [call.name for call in scene.calls]
    assert names.count("fsync") == 4 + 3 + 1  # files, one of them sealed; directories; the name
    last_rename = max(n for n, name in enumerate(names) if name.startswith("rename"))
    assert names[last_rename + 1] == "fsync"


@pytest.mark.sample(1)
@needs_strace
def test_killed_at_any_call_it_is_whole_or_not_there(scene: Scene) -> None:
    before = OLD if scene.force else None
    for call in scene.calls:
        assert scene.injected(call, "signal=KILL") == -signal.SIGKILL, call
        there, hidden = scene.there(), scene.hidden()
        if there is None and scene.force:  # between two renames: both are whole, and hidden
            assert OLD in hidden, call
            assert scene.good in hidden, call
        else:
            assert there in (before, scene.good), call
        report = ckptmove.recover(scene.out.parent)  # which loses nothing of these
        assert scene.there() == there
        assert len(scene.hidden()) == (0 if there is not None or scene.is_file else len(hidden))
        assert len(report.files) == len(hidden)
        assert {each.outcome for each in report.files} <= {"removed", "kept"}
    assert scene.there() == scene.good


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("what", ["error=EIO", "error=ENOSPC", "signal=TERM"])
def test_a_fault_at_any_call_leaves_all_or_nothing(what: str, scene: Scene) -> None:
    if what == "signal=TERM":
        what = "signal=INT"
    harmless = {"ioctl", "unlinkat", "rmdir", "unlink"}  # no shared blocks; cleaning up
    for call in some(scene.calls, 8):
        code = scene.injected(call, what)
        there = scene.there()
        assert there in (OLD if scene.force else None, scene.good), call
        assert (there == scene.good) or code not in (0,), call
        assert code in (0, 1, 3, 4, 5, 130, -signal.SIGINT), call
        if call.name not in harmless:
            assert scene.hidden() == [], call


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("kind", ["file", "turned"])
def test_what_was_not_written_is_noticed(kind: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "killed", kind, force=False)
    for call in scene.calls:
        if call.name in ("pwrite64", "copy_file_range"):
            assert scene.injected(call, f"retval={call.text.rsplit(' ', 1)[-1]}") == 5, call
            assert (scene.there(), scene.hidden()) == (None, []), call
