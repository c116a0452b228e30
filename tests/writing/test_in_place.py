"""relocate --in-place: what it changes, keeps, refuses and says."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove import (
    CorruptError,
    InputError,
    RefusedError,
    UsageError,
    WriteError,
    formats,
    inspect,
    relocate,
)
from ckptmove.placement.place import place
from ckptmove.placement.rules import rules_of
from ckptmove.sources.file import File
from ckptmove.system.locks import is_locked
from ckptmove.writing.in_place.change import InPlace
from ckptmove.writing.in_place.locked_file import LockedFile
from tests.conftest import ROOT, RunCli
from tests.faults.injecting import command
from tests.making.checkpoints import MAKERS, kept_on_cpu, rezip, save, save_tagged, squeeze
from tests.making.staging import (
    LONG_AGO,
    in_place,
    journal_of,
    journals,
    mounted,
    or_skip,
    untouched,
)
from tests.oracles.readers import assert_same_checkpoint
from tests.servers.fronts import HANG
from tests.servers.warm_python import WarmCommand

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# -- what is changed, and what is not ------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("to", ["cpu", "cuda:0", "mps"])
@pytest.mark.parametrize("name", ["adamw_training", "gan", "many_storages", "whole_module"])
def test_it_becomes_what_a_copy_would_be(name: str, to: str, tmp_path: Path) -> None:
    saved = MAKERS[name]()
    path = save(tmp_path / "in.pt", saved, "cuda:1", keep_cpu=kept_on_cpu(saved))
    old = Path(shutil.copyfile(path, tmp_path / "old.pt"))
    ckptmove.relocate(path, tmp_path / "copy.pt", to=to)
    report = in_place(path, to=to)
    new = path.read_bytes()
    assert new == (tmp_path / "copy.pt").read_bytes()
    assert_same_checkpoint(old, path, {"cuda:1": to}, trust=True)
    assert (report.source, report.destination) == (str(path), str(path))
    assert (report.method, report.copied, report.written) == ("in-place", None, True)
    assert journals(tmp_path) == []
    differ = sum(a != b for a, b in zip(new, old.read_bytes(), strict=True))
    assert differ <= report.bytes_written < len(new)


def test_there_and_back_is_the_same_checkpoint(run_pt: Path) -> None:
    old = Path(shutil.copyfile(run_pt, run_pt.with_name("old.pt")))
    in_place(run_pt, to="cuda:0")
    assert run_pt.read_bytes() != old.read_bytes()
    in_place(run_pt, to="cuda:1")
    assert_same_checkpoint(old, run_pt, {})


def test_it_stays_the_same_file_in_all_but_time(run_pt: Path) -> None:
    run_pt.chmod(0o640)
    if not os.geteuid():
        os.chown(run_pt, 65534, 12345)
    os.setxattr(run_pt, "user.origin", b"a run")
    before = run_pt.stat()
    in_place(run_pt)
    after = run_pt.stat()
    for name in ("st_ino", "st_mode", "st_uid", "st_gid", "st_nlink", "st_size", "st_blocks"):
        assert getattr(before, name) == getattr(after, name), name
    assert os.getxattr(run_pt, "user.origin") == b"a run"
    assert after.st_mtime_ns > before.st_mtime_ns  # backups must see it


def test_who_has_it_mapped_sees_the_same_tensors(run_pt: Path) -> None:
    loaded = torch.load(run_pt, map_location="cpu", mmap=True, weights_only=False)
    wanted = [p.clone() for p in loaded["model"].values()]
    in_place(run_pt, to="cuda:0")
    assert all(torch.equal(a, b) for a, b in zip(wanted, loaded["model"].values(), strict=True))


def test_the_report_is_that_of_the_change(run_pt: Path, run_cli: RunCli) -> None:
    size = run_pt.stat().st_size
    dry = in_place(run_pt, dry_run=True)
    assert (dry.method, dry.destination, dry.written) == ("in-place", str(run_pt), False)
    assert (dry.bytes_written, dry.nbytes) == (0, size)
    said = json.loads(
        run_cli("relocate", run_pt, "--to", "cpu", "--in-place", "--json", exit=0).stdout
    )
    assert said["method"] == "in-place"
    assert (said["nbytes"], said["written"]) == (size, True)
    assert 0 < said["bytes_written"] < 20_000
    assert said["moved"] == dry.to_json()["moved"]


def test_what_it_says(run_pt: Path, run_cli: RunCli) -> None:
    options = ("--to", "cpu", "--in-place")
    said = run_cli("relocate", "run.pt", *options, "--dry-run", exit=0).stdout
    assert said.splitlines()[-1] == "would change run.pt in place"
    said = run_cli("relocate", "run.pt", *options, exit=0).stdout
    assert re.fullmatch(
        r"changed run.pt in place: 2\.\d kB of 22\.9 kB written in \d\.\d\d s, verified",
        said.splitlines()[-1],
    )
    assert run_cli("recover", "run.pt", exit=0).stdout == "run.pt: nothing to recover\n"


@pytest.mark.parametrize("options", [{}, {"dry_run": True}])
def test_what_is_there_already_is_not_touched(options: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path / "in.pt", MAKERS["gan"](), "cpu")
    os.utime(path, LONG_AGO)
    (tmp_path / "link.pt").symlink_to(path)
    before = path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ctime_ns
    for each in (path, tmp_path / "link.pt"):  # nothing is done, so nothing is refused
        report = in_place(each, **options)
        assert (report.method, report.destination, report.written) == ("none", None, False)
        assert report.bytes_written == 0
    assert before == (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ctime_ns)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("kind", ["squeezed", "deflated"])
def test_a_pickle_that_can_not_keep_its_length(
    kind: str, dry_run: bool, tmp_path: Path, run_cli: RunCli
) -> None:
    plain = save(tmp_path / "plain.pt", MAKERS["adamw_training"](), "cpu")
    how = squeeze if kind == "squeezed" else rezip
    path = how(plain, tmp_path / "in.pt")
    options = {"to": "privateuseone:15", "all": True, "dry_run": dry_run}
    for force in (False, True):
        hint = untouched(
            path,
            partial(in_place, path, force=force, **options),
            RefusedError,
            "do not fit",
        )
        assert "copy" in hint
    run_cli("relocate", path, "--to", "privateuseone:15", "--all", "--in-place", exit=4)
    assert ckptmove.relocate(path, to="cuda:0", all=True).written


def test_there_is_no_other_destination(run_pt: Path, run_cli: RunCli) -> None:
    untouched(
        run_pt,
        lambda: ckptmove.relocate(run_pt, run_pt.with_name("x.pt"), to="cpu", in_place=True),
        UsageError,
        "in place",
    )
    for more in (("x.pt",), ("-o", "x.pt")):
        done = run_cli("relocate", "run.pt", *more, "--to", "cpu", "--in-place", exit=2)
        assert "in place there is no other destination" in done.stderr


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_symbolic_link_is_refused(run_pt: Path, dry_run: bool, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    link = folder / "link.pt"
    link.symlink_to(run_pt)
    run = partial(in_place, link, dry_run=dry_run)
    assert untouched(run_pt, run, RefusedError, "is a symbolic link") == "--force changes it anyway"
    assert in_place(link, force=True, dry_run=dry_run).written != dry_run
    assert link.is_symlink()
    folder.rename(tmp_path / "moved")
    (tmp_path / "alias").symlink_to(tmp_path)
    assert in_place(tmp_path / "alias" / "run.pt", to="mps").written  # a folder may be a link


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_file_of_several_names_is_refused(run_pt: Path, dry_run: bool, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    other.hardlink_to(run_pt)
    run = partial(in_place, run_pt, dry_run=dry_run)
    assert untouched(run_pt, run, RefusedError, "has 2 hard links") == "--force changes it anyway"
    if not dry_run:
        assert in_place(run_pt, force=True).written
        assert other.samefile(run_pt)
        assert ckptmove.inspect(other).verdict == "uniform cpu"


@pytest.mark.sample(1)
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_is_open_for_writing_is_refused(
    run_pt: Path, mapped: bool, dry_run: bool
) -> None:
    run = partial(in_place, run_pt, dry_run=dry_run)
    with run_pt.open("rb"):  # readers may be there
        assert in_place(run_pt, to="mps").written
    with run_pt.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0) if mapped else None
        if mapped:
            file.close()
        hint = untouched(run_pt, run, RefusedError, "is open for writing elsewhere")
        assert hint == "--force changes it anyway"
        assert in_place(run_pt, force=True, dry_run=dry_run).written != dry_run
        if shared is not None:
            shared.close()


def test_a_file_that_may_not_be_written_is_refused(run_pt: Path) -> None:
    or_skip("chattr", "+i", run_pt)
    try:
        for dry_run in (False, True):
            untouched(
                run_pt,
                partial(in_place, run_pt, dry_run=dry_run),
                RefusedError,
                "can't be",
            )
    finally:
        subprocess.run(["chattr", "-i", run_pt], check=True)


def test_a_folder_that_takes_no_journal_is_refused(run_pt: Path) -> None:
    or_skip("chattr", "+i", run_pt.parent)
    try:
        untouched(run_pt, partial(in_place, run_pt), RefusedError, "can't be")
    finally:
        subprocess.run(["chattr", "-i", run_pt.parent], check=True)


def test_a_full_disk_leaves_it_as_it_was(run_pt: Path, tmp_path: Path) -> None:
    size = (run_pt.stat().st_size >> 12) + 9
    options = ("-t", "tmpfs", "-o", f"size={size * 4}k", "none")
    with mounted(tmp_path / "disk", *options) as disk:
        path = Path(shutil.copyfile(run_pt, disk / "run.pt"))
        with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        untouched(path, partial(in_place, path), WriteError, os.strerror(errno.ENOSPC))
        (disk / "filler").unlink()
        assert in_place(path).written


@contextmanager
def changing(path: Path) -> Iterator[InPlace]:
    """A change in place, as the verb makes it, step by step; to the CPU."""
    with File.open(path) as source:
        checkpoint = formats.read(source)
        plan = checkpoint.plan_relocate(place(checkpoint.manifest, rules_of(to="cpu")))
        with InPlace(source, plan, force=False) as change:
            yield change


def test_a_file_that_changes_meanwhile_is_left_alone(run_pt: Path) -> None:
    with changing(run_pt) as change:
        os.utime(run_pt)
        before = run_pt.read_bytes(), run_pt.stat().st_mtime_ns
        with pytest.raises(InputError, match="was changed while it was read"):
            change.write()
    assert before == (run_pt.read_bytes(), run_pt.stat().st_mtime_ns)
    assert journals(run_pt.parent) == []
    with changing(run_pt) as change:
        other = Path(shutil.copyfile(run_pt, run_pt.with_name("other.pt")))
        other.replace(run_pt)
        with pytest.raises(InputError, match="while it was read"):
            change.write()
    assert journals(run_pt.parent) == []


# -- others at the same time ---------------------------------------------------------------------


def test_what_is_being_changed_is_not_recovered(
    run_pt: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmove.writing.in_place.undo.PATIENCE", 0.01)
    before = run_pt.read_bytes()
    with changing(run_pt) as change:
        change.write()
        now = run_pt.read_bytes()
        for verb in (ckptmove.recover, ckptmove.inspect, in_place):
            with pytest.raises(
                InputError, match="changed in place by another call in this process"
            ):
                verb(run_pt)
        done = run_cli("inspect", run_pt, exit=3)
        assert "is being changed in place by another process" in done.stderr
        assert (run_pt.read_bytes(), len(journals(run_pt.parent))) == (now, 1)
    assert run_pt.read_bytes() == before  # it was not committed
    assert journals(run_pt.parent) == []


def test_without_its_journal_it_can_still_be_undone(run_pt: Path) -> None:
    """Somebody removes it in the midst of the change."""
    before = run_pt.read_bytes()
    with changing(run_pt) as change:
        change.write()
        journal_of(run_pt).unlink()
    assert run_pt.read_bytes() == before
    with changing(run_pt) as change:
        change.write()
        journal_of(run_pt).unlink()
        with pytest.raises(WriteError, match="committing failed"):
            change.commit()


def test_the_journal_of_another_change_is_kept(run_pt: Path) -> None:
    """One that was interrupted after this one looked for it."""
    journal_of(run_pt).write_text("theirs")
    with pytest.raises(RefusedError, match="already has a journal"), changing(run_pt):
        pytest.fail("it should not begin")
    journal_of(run_pt).unlink()
    with changing(run_pt) as change:
        journal_of(run_pt).write_text("theirs")
        with pytest.raises(RefusedError, match="already has a journal"):
            change.write()
    assert journal_of(run_pt).read_text() == "theirs"


def test_the_journal_is_for_its_owner_alone(run_pt: Path) -> None:
    with changing(run_pt) as change:
        change.write()
        assert stat.S_IMODE(journal_of(run_pt).stat().st_mode) == 0o600


def test_before_it_has_a_journal_it_is_held_too(run_pt: Path) -> None:
    with changing(run_pt):
        for force in (False, True):
            with pytest.raises(
                InputError, match="changed in place by another call in this process"
            ):
                in_place(run_pt, force=force)
        ckptmove.inspect(run_pt)


def test_who_met_a_change_waits_for_its_end_and_then_blames_it(run_pt: Path) -> None:
    """Between two writes nothing tells that a file is being changed but its lock."""

    def end() -> None:
        os.pwrite(fd, os.pread(fd, 1, 0), 0)
        fcntl.flock(fd, fcntl.LOCK_UN)

    def meet() -> None:
        with File.open(run_pt):
            writer.start()
            raise CorruptError("its checksum is wrong")

    fd = os.open(run_pt, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    writer = threading.Timer(0.2, end)
    try:
        with pytest.raises(CorruptError, match="changed while it was read"):
            meet()
    finally:
        writer.join()
        os.close(fd)


def test_threads_are_refused_for_what_they_do(run_pt: Path) -> None:
    """A file that another thread writes looks damaged, and open for writing; it is neither."""
    said: list[str] = []

    def change(first: int) -> None:
        for n in range(first, first + 12):
            try:
                said.append(f"done: {in_place(run_pt, to=f'cuda:{n % 5}').written}")
            except ckptmove.CkptmoveError as error:
                said.append(str(error))

    threads = [threading.Thread(target=change, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allowed = {
        "done: True",
        "done: False",  # it is there already
        "is being changed in place by another call in this process",
        "the file was changed while it was read",
    }
    assert len(said) == 48
    assert set(said) <= allowed
    assert "done: True" in said
    assert journals(run_pt.parent) == []
    ckptmove.inspect(run_pt)


def test_a_check_in_another_thread_is_not_taken_for_a_change(
    run_pt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to lock and unlock the file."""
    done: list[object] = []

    def change() -> None:
        try:
            done.append(in_place(run_pt).written)
        except ckptmove.CkptmoveError as error:
            done.append(error)

    def flock(fd: int, how: int) -> None:
        if how == fcntl.LOCK_UN and changing.ident is None:
            changing.start()
            changing.join(0.2)
        lock(fd, how)

    lock, changing = fcntl.flock, threading.Thread(target=change)
    monkeypatch.setattr(fcntl, "flock", flock)
    with run_pt.open("rb") as file:
        assert not is_locked(file.fileno())
    changing.join()
    assert done == [True]


def test_a_file_that_is_only_opened_to_be_locked_is_not_open_elsewhere(
    run_pt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread opens it, which looks for a journal and ends at once."""
    opened: list[bool] = []

    def control(fd: int, how: int, *given: int) -> int:
        if how != fcntl.F_SETLEASE or opened:
            return ask(fd, how, *given)
        opened.append(True)
        with LockedFile(os.fspath(run_pt)):
            return ask(fd, how, *given)

    ask = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", control)
    assert in_place(run_pt).written
    assert opened


def test_who_comes_shortly_before_the_end_waits(
    run_pt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmove.writing.in_place.undo.PATIENCE", HANG)
    met, lock = threading.Event(), fcntl.flock

    def flock(fd: int, how: int) -> None:
        try:
            lock(fd, how)
        except BlockingIOError:
            met.set()
            raise

    monkeypatch.setattr(fcntl, "flock", flock)
    with changing(run_pt) as change:
        change.write()
        done: list[str] = []
        waiting = threading.Thread(target=lambda: done.append(ckptmove.inspect(run_pt).verdict))
        waiting.start()
        assert met.wait(HANG)
        assert not done
        change.commit()
    waiting.join()
    assert done == ["uniform cpu"]


@pytest.mark.slow
def test_of_two_at_once_the_file_is_one_whole(run_pt: Path, tmp_path: Path) -> None:
    old = run_pt.read_bytes()
    wanted = {}
    for to in ("cpu", "cuda:0"):
        ckptmove.relocate(run_pt, tmp_path / "out.pt", to=to, force=True)
        wanted[to] = (tmp_path / "out.pt").read_bytes()
    for _ in range(5):
        run_pt.write_bytes(old)
        running = [
            (
                to,
                WarmCommand(
                    command("relocate", "-q", run_pt, "--to", to, "--in-place"),
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
                ),
            )
            for to in ("cpu", "cuda:0", "cpu", "cuda:0")
        ]
        ended = [(to, each.communicate(timeout=HANG)[1], each.returncode) for to, each in running]
        assert all(code in (0, 3, 4) for _, _, code in ended), ended
        assert all(said.count("\n") == (code != 0) for _, said, code in ended), ended
        won = [to for to, _, code in ended if code == 0]
        assert won, ended
        assert run_pt.read_bytes() in [wanted[to] for to in won] or len(set(won)) > 1
        assert ckptmove.inspect(run_pt).verdict.split("%")[0] in (
            *("uniform cpu", "mixed: cuda:0 99.9 ", "mixed: cuda:0 99.7 "),
            ckptmove.inspect(tmp_path / "out.pt").verdict.split("%")[0],
        )
        assert journals(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_training", "gan", "many_storages", "bare_tensor"])
def test_a_file_that_goes_to_and_fro_does_not_wear_out(name: str, tmp_path: Path) -> None:
    save_tagged(MAKERS[name](), path := tmp_path / "run.pt", "cpu")
    before = inspect(path).storages
    for n in range(40):
        to = ("cuda:1", "cpu", "mps", "privateuseone:15")[n % 4]
        assert relocate(path, in_place=True, to=to, all=True).method == "in-place"
        assert set(inspect(path).devices) <= {to, "meta"}
    after = inspect(path).storages
    assert {key: each.extent for key, each in after.items()} == {
        key: each.extent for key, each in before.items()
    }
