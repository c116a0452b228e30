"""What recover, and every other command before it reads, does where a change was interrupted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove import CorruptError, InputError
from ckptmove.writing.in_place.journal import Journal
from ckptmove.writing.in_place.journal_name import SUFFIX, UNFINISHED, journal_name
from ckptmove.writing.staged_file import LocalFile
from ckptmove.writing.staged_folder import LocalFolder
from tests.conftest import RunCli
from tests.making.checkpoints import MAKERS, save
from tests.making.staging import (
    in_place,
    interrupted,
    journal_of,
    journals,
    mounted,
    or_skip,
    unfinished_of,
    untouched,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["run.pt", "ключ.pt", "a" * 233, "a" * 234, "я" * 127, ".hidden"])
def test_whatever_its_name(name: str, run_pt: Path, run_cli: RunCli) -> None:
    path = run_pt.rename(run_pt.with_name(name))
    assert len(os.fsencode(journal_name(name) + UNFINISHED)) <= 255
    old = interrupted(path)
    assert stat.S_IMODE(journal_of(path).stat().st_mode) == 0o644
    said = run_cli("recover", name, exit=0).stdout
    assert said.startswith(f"{name}: restored: undid an interrupted in-place change, ")
    assert path.read_bytes() == old
    assert in_place(path, dry_run=True).method == "in-place"
    interrupted(path)
    assert ckptmove.recover(path.parent).files[0].path == str(path)
    assert path.read_bytes() == old


def test_names_that_are_cut_stay_apart() -> None:
    names = {journal_name(f"{'a' * 240}{end}") for end in ("x", "y")}
    assert len(names) == 2
    assert all(name.endswith(SUFFIX) for name in names)


@pytest.mark.sample(2)
@pytest.mark.parametrize("through", ["run.pt", "link.pt", "alias/run.pt"])
@pytest.mark.parametrize("verb", ["inspect", "relocate --to cuda:0 -o out.pt", "recover"])
def test_the_next_command_recovers_and_says_so(
    verb: str, through: str, run_pt: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    (tmp_path / "link.pt").symlink_to("run.pt")
    (tmp_path / "alias").symlink_to(".")
    old = interrupted(run_pt)
    name, *options = verb.split()
    done = run_cli(name, through, *options, exit=0)
    assert run_pt.read_bytes() == old
    assert journals(tmp_path) == []
    if verb != "recover":
        note = f"ckptmove: {through}: an interrupted in-place change was undone first\n"
        assert done.stderr == note
        assert run_cli(name, through, *options, "--force" if "-o" in verb else "-v", exit=0)


def test_the_library_says_so_too(run_pt: Path) -> None:
    note = "an interrupted in-place change was undone first"
    interrupted(run_pt)
    assert ckptmove.inspect(run_pt).warnings == (note,)
    assert ckptmove.inspect(run_pt).warnings == ()
    interrupted(run_pt)
    assert in_place(run_pt).warnings == (note,)
    assert ckptmove.inspect(run_pt).verdict == "uniform cpu"


def test_a_journal_without_a_change_is_removed(run_pt: Path, run_cli: RunCli) -> None:
    old = interrupted(run_pt)
    journal = journal_of(run_pt).read_bytes()
    run_pt.write_bytes(old)
    journal_of(run_pt).write_bytes(journal)
    said = run_cli("recover", "run.pt", exit=0).stdout
    assert said == ("run.pt: not changed by the interrupted in-place change; removed its journal\n")
    assert (run_pt.read_bytes(), journals(run_pt.parent)) == (old, [])
    journal_of(run_pt).write_bytes(journal)
    assert ckptmove.inspect(run_pt).warnings == (
        "an interrupted in-place change had not changed the file; removed its journal",
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("there", [b"", b"ckptmove-undo-1\n", b"any"])
def test_a_journal_that_was_not_finished_goes_silently(
    there: bytes, run_pt: Path, run_cli: RunCli
) -> None:
    old, unfinished = run_pt.read_bytes(), unfinished_of(run_pt)
    for command in ("inspect run.pt", "recover run.pt", "recover .", "relocate run.pt --to mps"):
        unfinished.write_bytes(there)
        done = run_cli(*command.split(), exit=0)
        assert "journal" not in done.stdout + done.stderr
        assert command.startswith("relocate") or "rolled" not in done.stdout
        assert not unfinished.exists()
        assert run_pt.read_bytes() == old
    unfinished.write_bytes(there)
    assert in_place(run_pt).warnings == ()
    assert journals(run_pt.parent) == []


def test_a_journal_in_the_making_is_left_to_its_maker(run_pt: Path, run_cli: RunCli) -> None:
    unfinished_of(run_pt).touch()
    with run_pt.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for command in ("inspect run.pt", "recover run.pt", "recover ."):
            assert run_cli(*command.split(), exit=0).stderr == ""
            assert unfinished_of(run_pt).exists()
    assert ckptmove.recover(run_pt.parent).files == ()
    assert not unfinished_of(run_pt).exists()


def test_an_unfinished_journal_is_of_no_other_file(run_pt: Path, run_cli: RunCli) -> None:
    """Nor is one without a file an error, nor what is no file at all."""
    orphan = unfinished_of(run_pt.with_name("gone.pt"))
    orphan.touch()
    unfinished_of(run_pt).mkdir()
    assert ckptmove.recover(run_pt.parent).files == ()
    assert "is a journal (name" in run_cli("recover", orphan, exit=3).stderr
    with pytest.raises(ckptmove.CkptmoveError, match=r"already has a journal|directory"):
        in_place(run_pt)
    assert len(journals(run_pt.parent)) == 2


def test_a_directory_is_recovered_with_all_below(run_pt: Path, run_cli: RunCli) -> None:
    root = run_pt.parent / "runs"
    (root / "deep" / "er").mkdir(parents=True)
    paths = [root / "a.pt", root / "deep" / "b.pt", root / "deep" / "er" / f"{'c' * 250}.pt"]
    for path in paths:
        shutil.copyfile(run_pt, path)
        interrupted(path)
    (root / "d.pt").write_bytes(run_pt.read_bytes())
    said = json.loads(run_cli("recover", root, "--json", exit=0).stdout)
    assert (said["schema"], said["path"]) == (1, str(root))
    assert [each["path"] for each in said["files"]] == [str(path) for path in paths]
    assert {each["outcome"] for each in said["files"]} == {"rolled-back"}
    assert all(path.read_bytes() == run_pt.read_bytes() for path in paths)
    assert run_cli("recover", root, exit=0).stdout == f"{root}: nothing to recover\n"


def test_in_a_directory_one_that_fails_does_not_keep_the_others(run_pt: Path) -> None:
    root = run_pt.parent
    for name in ("a.pt", "z.pt"):
        shutil.copyfile(run_pt, root / name)
        interrupted(root / name)
    interrupted(run_pt)
    run_pt.unlink()
    with pytest.raises(InputError, match="is missing") as raised:
        ckptmove.recover(root)
    assert raised.value.path == str(run_pt)
    assert journals(root) == [journal_name("run.pt")]


def other_byte(path: Path, at: int) -> None:
    """A byte that is neither the old one nor the new one."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xee")


def first_change(path: Path) -> int:
    """Where the first change of the journal is."""
    return Journal.from_bytes(journal_of(path).read_bytes()).changes[0].at


STRANGERS: dict[str, Callable[[Path], object]] = {
    "a byte that was to change": lambda path: other_byte(path, first_change(path)),
    "a byte of the directory": lambda path: other_byte(path, path.stat().st_size - 60),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "trained again": lambda path: save(path, MAKERS["adamw_training"](), "cpu"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_file_that_was_replaced_is_left_alone(kind: str, run_pt: Path, run_cli: RunCli) -> None:
    interrupted(run_pt)
    STRANGERS[kind](run_pt)
    for verb in (ckptmove.recover, ckptmove.inspect, in_place):
        hint = untouched(
            run_pt,
            partial(verb, run_pt),
            InputError,
            "is not in the state that its journal describes",
        )
        assert hint == f"if the file is whole, remove {journal_of(run_pt)}"
    done = run_cli("recover", "run.pt", exit=3)
    assert done.stderr.count("\n") == 1
    journal_of(run_pt).unlink()
    ckptmove.recover(run_pt)


@pytest.mark.parametrize("state", ["half", "new", "old"])
def test_a_journal_of_another_file_of_the_same_bytes_is_refused(
    state: str, run_pt: Path, tmp_path: Path
) -> None:
    """One that came with an archive, or a copy that was put back beside an old journal."""
    old = interrupted(run_pt)
    half, new = run_pt.read_bytes(), changed_whole(old, journal_of(run_pt))
    copy = tmp_path / "copy.pt"
    copy.write_bytes({"half": half, "new": new, "old": old}[state])
    copy.replace(run_pt)
    for verb in (ckptmove.recover, ckptmove.inspect, in_place):
        hint = untouched(
            run_pt,
            partial(verb, run_pt),
            CorruptError,
            "is not the file that its journal belongs to",
        )
        assert hint == f"if the file is whole, remove {journal_of(run_pt)}"


def changed_whole(old: bytes, journal: Path) -> bytes:
    """What the change that the journal undoes would have made."""
    content = bytearray(old)
    for change in Journal.from_bytes(journal.read_bytes()).changes:
        content[change.at : change.at + len(change.new)] = change.new
    return bytes(content)


def test_a_damaged_journal_is_kept(run_pt: Path, run_cli: RunCli) -> None:
    interrupted(run_pt)
    journal = journal_of(run_pt).read_bytes()
    longer = journal[:-32] + b"\0"
    damaged = [
        longer + hashlib.sha256(longer).digest(),
        journal[:-1],
        b"",
        journal + b"\0",
        bytes(len(journal)),
    ]
    for at in (*range(0, 100, 5), len(journal) // 2, len(journal) - 40, len(journal) - 1):
        damaged.append(journal[:at] + bytes([journal[at] ^ 1]) + journal[at + 1 :])
        damaged.append(journal[:at])
    for there in damaged:
        journal_of(run_pt).write_bytes(there)
        hint = untouched(run_pt, partial(ckptmove.recover, run_pt), InputError, "journal")
        assert str(journal_of(run_pt)) in hint or there[:14] == journal[:14]
        assert journal_of(run_pt).read_bytes() == there
    journal_of(run_pt).write_bytes(journal[:-1])
    done = run_cli("inspect", "run.pt", exit=3)
    assert "its journal is damaged (if the file is whole, remove " in done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("kept", [0, 80, 10**6])
def test_a_huge_journal_is_not_read(kept: int, run_pt: Path, run_cli: RunCli) -> None:
    interrupted(run_pt)
    os.truncate(journal_of(run_pt), min(kept, journal_of(run_pt).stat().st_size))
    os.truncate(journal_of(run_pt), 300 << 30)
    done = run_cli("inspect", "run.pt", exit=3)
    assert "its journal is damaged" in done.stderr
    untouched(run_pt, partial(ckptmove.recover, run_pt), CorruptError, "its journal is damaged")


def test_a_file_that_is_gone_has_left_its_journal(run_pt: Path, run_cli: RunCli) -> None:
    interrupted(run_pt)
    away = run_pt.rename(run_pt.with_name("away.pt"))
    save(run_pt.with_name("in.pt"), torch.ones(1))
    for verb in ("recover run.pt", "inspect run.pt", "relocate in.pt --to cpu -o run.pt"):
        done = run_cli(*verb.split(), exit=3)
        assert (
            "is missing, but the journal of an interrupted in-place change is there "
            "(put the file back" in done.stderr
        )
    assert journals(run_pt.parent)
    away.rename(run_pt)
    assert ckptmove.recover(run_pt).files[0].outcome == "rolled-back"
    assert "no such file" in run_cli("recover", "none.pt", exit=3).stderr


def test_a_destination_is_recovered_before_it_is_replaced(run_pt: Path, tmp_path: Path) -> None:
    out = Path(shutil.copyfile(run_pt, tmp_path / "out.pt"))
    interrupted(out)
    ckptmove.relocate(run_pt, out, to="cuda:0", force=True)
    assert journals(tmp_path) == []
    assert ckptmove.inspect(out).warnings == ()


def test_a_journal_is_no_file_to_be_recovered(run_pt: Path, run_cli: RunCli) -> None:
    interrupted(run_pt)
    assert "is a journal (name" in run_cli("recover", journal_of(run_pt), exit=3).stderr
    shutil.copyfile(journal_of(run_pt), unfinished_of(run_pt))
    for path in (journal_of(run_pt), unfinished_of(run_pt)):
        said = run_cli("inspect", path.name, exit=3).stderr
        assert said.endswith(": is a journal of ckptmove (ckptmove recover run.pt)\n")
        assert f"(ckptmove recover {run_pt})" in run_cli("inspect", path, exit=3).stderr
    said = run_cli("inspect", journal_of(run_pt).rename(run_pt.with_name("x.pt")), exit=3).stderr
    assert (
        "is a journal of ckptmove (ckptmove recover FILE, where FILE is the file that "
        "it was beside)" in said
    )


def test_a_journal_of_another_version_is_kept(run_pt: Path) -> None:
    interrupted(run_pt)
    body = journal_of(run_pt).read_bytes()[:-32].replace(b"undo-1\n", b"undo-2\n", 1)
    journal_of(run_pt).write_bytes(body + hashlib.sha256(body).digest())
    untouched(run_pt, partial(ckptmove.recover, run_pt), InputError, "another version of ckptmove")


def test_a_journal_that_somebody_else_put_there_is_not_followed(run_pt: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to be somebody else")
    interrupted(run_pt)
    os.chown(journal_of(run_pt), 65534, 65534)
    untouched(run_pt, partial(ckptmove.recover, run_pt), InputError, "belongs to another user")
    os.chown(run_pt, 65534, 65534)
    assert ckptmove.recover(run_pt).files[0].outcome == "rolled-back"


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_a_journal_that_is_no_file_is_not_followed(kind: str, run_pt: Path) -> None:
    interrupted(run_pt)
    journal = journal_of(run_pt)
    away = journal.rename(run_pt.with_name("journal"))
    if kind == "link":
        journal.symlink_to(away)
    elif kind == "folder":
        journal.mkdir()
    else:
        os.mkfifo(journal)
    for verb in (ckptmove.recover, ckptmove.inspect):
        untouched(run_pt, partial(verb, run_pt), ckptmove.CkptmoveError, ".")


def test_what_can_not_be_written_can_not_be_recovered(
    run_pt: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    path = run_pt.rename(folder / "run.pt")
    interrupted(path)
    with mounted(tmp_path / "disk", "--bind", os.fspath(folder)) as disk:
        or_skip("mount", "-o", "remount,ro,bind", disk)
        said = run_cli("inspect", disk / "run.pt", exit=3).stderr
        assert "an interrupted in-place change can't be undone: can't be written: Read-only" in said
        assert f"(ckptmove recover {disk / 'run.pt'})" in said
        said = run_cli("recover", disk / "run.pt", exit=4).stderr
        assert "can't be written: Read-only file system" in said
    assert ckptmove.recover(path).files[0].outcome == "rolled-back"


def test_temporary_files_of_killed_processes_are_removed_and_those_of_others_kept(
    tmp_path: Path, run_cli: RunCli
) -> None:
    save(tmp_path / "run.pt", {"w": torch.ones(3)}, "cpu")
    (tmp_path / "out").mkdir()
    left = [
        tmp_path / ".new.pt.0123abcd.ckptmove-tmp",
        tmp_path / "out" / ".run.pt.00000000.ckptmove-tmp",
    ]
    others = [tmp_path / ".new.pt.0123.ckptmove-tmp", tmp_path / "new.pt.01234567.ckptmove-tmp"]
    for each in (*left, *others):
        each.write_bytes(b"half of it")
    said = run_cli("recover", "new.pt", exit=0).stdout
    assert (
        said == ".new.pt.0123abcd.ckptmove-tmp: removed what a killed process had begun to write\n"
    )
    assert [each.exists() for each in (*left, *others)] == [False, True, True, True]
    run_cli("recover", "new.pt", exit=3)  # nothing is there now
    run_cli("recover", ".", exit=0)
    assert [each.exists() for each in (*left, *others)] == [False, False, True, True]
    for each in others:
        each.unlink()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_being_written_is_kept(kind: str, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        if kind == "file":
            stack.enter_context(LocalFile(out, [], force=False))
        else:
            stack.enter_context(LocalFolder(out, [], force=True))
            out.mkdir()  # by another
        (hidden,) = tmp_path.glob("*.ckptmove-tmp")
        said = run_cli("recover", "out", exit=0).stdout
        assert f"{hidden.name}: kept: a process may be writing it" in said
        assert hidden.exists()


def test_a_folder_is_kept_that_may_be_what_was_there(tmp_path: Path, run_cli: RunCli) -> None:
    hidden = tmp_path / ".out.0123abcd.ckptmove-tmp"
    hidden.mkdir()
    (hidden / "w").write_bytes(b"the only copy")
    assert "kept: " in run_cli("recover", "out", exit=0).stdout
    assert (hidden / "w").exists()
    (tmp_path / "out").mkdir()
    assert "removed what" in run_cli("recover", "out", exit=0).stdout
    assert not hidden.exists()
