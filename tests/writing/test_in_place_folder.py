"""A folder that is changed in place, and killed or lied to: all files are old, or all are new."""

from __future__ import annotations

import os
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptmove
from ckptmove import InputError, formats
from ckptmove.placement.place import place
from ckptmove.placement.rules import rules_of
from ckptmove.plans.plan import Write
from ckptmove.sources.file import File
from ckptmove.writing.in_place.change import InPlaceFolder
from ckptmove.writing.in_place.folder_journal import folder_journal, journals_in
from ckptmove.writing.in_place.journal import Journal, Read
from ckptmove.writing.in_place.journal_name import FOLDER_JOURNAL
from tests.conftest import RunCli
from tests.faults.breaking_folder import FolderScene, settlers
from tests.faults.injecting import Call, few, needs_strace, run
from tests.making.saving import sparse_zip64
from tests.making.staging import interrupted, journals, leaving_nothing, mounted


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> FolderScene:
    made = FolderScene(tmp_path_factory.mktemp("scene"))
    assert made.changed == ["epochs/last.pt", "optimizer.pt"]
    assert not made.converted.keys() & set(made.changed)
    return made


@pytest.fixture(scope="module")
def calls(scene: FolderScene, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    return scene.calls(scene.in_place, tmp_path_factory.mktemp("log") / "log")


@pytest.fixture(scope="module")
def journal(scene: FolderScene) -> bytes:
    return scene.journal_bytes()


def parsed(scene: FolderScene, journal: bytes) -> dict[str, Journal]:
    read = memoryview(journal)
    return dict(
        journals_in(
            lambda at, nbytes: bytes(read[at : at + nbytes]),
            len(journal),
            lambda name: (scene.folder / name).stat(),
        )
    )


# Killed


def killed_at(scene: FolderScene, calls: list[Call]) -> list[tuple[bool, bool, bool]]:
    """Kill a change at each of these calls, and settle what is left in every way."""
    ends = []
    for call in calls:
        scene.reset()
        ended = run(scene.in_place, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        begun, unnamed = scene.journal.exists(), scene.unfinished.exists()
        assert not (begun and unnamed), call
        for settle in settlers(scene):
            settle()
            found = scene.contents(scene.folder)
            if unnamed:  # which only a command on the folder removes; its files are untouched
                found.pop(scene.unfinished.name, None)
            is_old = found == scene.old
            assert is_old or (found == scene.new and not begun), call
        ends.append((unnamed, begun, is_old))
    return list(dict.fromkeys(ends))


@needs_strace
def test_killed_at_some_calls_all_files_are_old_or_all_are_new(
    scene: FolderScene, calls: list[Call]
) -> None:
    """At the removal of the journal, and around it; the rest is below."""
    last = max(n for n, call in enumerate(calls) if call.name == "unlinkat")
    written = [call for call in calls if call.name == "pwrite64"]
    chosen = [written[len(written) // 2], written[-1], calls[last], calls[last + 1]]
    assert killed_at(scene, chosen) == [(False, True, True), (False, False, False)]


@pytest.mark.slow
@needs_strace
def test_killed_at_any_call_all_files_are_old_or_all_are_new(
    scene: FolderScene, calls: list[Call]
) -> None:
    steps = killed_at(scene, calls)
    assert steps == [
        *((False, False, True), (True, False, True)),
        *((False, True, True), (False, False, False)),
    ]


@needs_strace
def test_the_journal_is_on_disk_before_any_file_and_all_files_before_it_goes(
    calls: list[Call],
) -> None:
    names = [call.name for call in calls]
    synced = [n for n, name in enumerate(names) if name == "fsync"]
    named = next(n for n, name in enumerate(names) if name.startswith("rename"))
    gone = max(n for n, name in enumerate(names) if name.startswith("unlink"))
    written = [n for n, name in enumerate(names) if name == "pwrite64"]
    assert [n for n in written if n < named] == [written[0]], "the journal, in one"
    assert written[0] < synced[0] < named < synced[1] < written[1]
    assert written[-1] < synced[3] < gone < synced[4]
    assert len(synced) == 5, "journal, folder, two files, folder"
    assert FOLDER_JOURNAL in calls[gone].text


@pytest.mark.slow
@needs_strace
def test_killed_at_any_call_of_the_recovery_it_is_recovered_again(
    scene: FolderScene, journal: bytes, tmp_path: Path
) -> None:
    half = {**scene.old, "optimizer.pt": scene.new["optimizer.pt"], FOLDER_JOURNAL: journal}
    scene.reset(half)
    assert run(scene.recover, log=tmp_path / "log").code == 0
    lines = (tmp_path / "log").read_text()
    assert scene.contents(scene.folder) == scene.old
    for name in ("pwrite64", "fsync", "unlinkat", "flock"):
        for ordinal in range(1, 2 + lines.count(f" {name}(")):
            scene.reset(half)
            run(scene.recover, inject=f"{name}:signal=KILL:when={ordinal}")
            ckptmove.recover(scene.folder)
            assert scene.contents(scene.folder) == scene.old, (name, ordinal)


def test_whatever_was_written_of_it_is_undone(scene: FolderScene, journal: bytes) -> None:
    """Each change of each file in turn, and torn; by a command on a file whose turn it was not."""
    state = dict(scene.old)
    for name, found in parsed(scene, journal).items():
        for change in found.changes:
            content, middle = bytearray(state[name]), len(change.new) // 2 + 1
            content[change.at : change.at + middle] = change.new[:middle]
            scene.reset({**state, name: bytes(content), FOLDER_JOURNAL: journal})
            report = ckptmove.recover(scene.folder)
            assert [each.outcome for each in report.files] == ["rolled-back"]
            assert report.files[0].path == str(scene.folder)
            assert scene.contents(scene.folder) == scene.old
            content[change.at : change.at + len(change.new)] = change.new
            state[name] = bytes(content)
        scene.reset({**state, FOLDER_JOURNAL: journal})
        other = next(each for each in ("epochs/last.pt", "optimizer.pt") if each != name)
        assert "cuda:1" in ckptmove.inspect(scene.folder / other).devices
        assert scene.contents(scene.folder) == scene.old
    assert state == scene.new


# Errors


@needs_strace
@pytest.mark.sample(2)
@pytest.mark.parametrize("call", ["pwrite64", "fsync", "renameat", "unlinkat", "openat"])
def test_an_error_on_the_way_undoes_it_at_once(
    call: str, scene: FolderScene, calls: list[Call]
) -> None:
    for each in few([each for each in calls if each.name == call], 2):
        scene.reset()
        ended = run(scene.in_place, inject=f"{call}:error=EIO:when={each.ordinal}")
        found = scene.contents(scene.folder)
        assert ended.code, each
        assert found in (scene.old, scene.new), each
        assert "Traceback" not in ended.said


def test_who_comes_meanwhile_is_told(scene: FolderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmove.writing.in_place.folder_undo.PATIENCE", 0.01)
    scene.reset()
    path = scene.folder / "optimizer.pt"
    with File.open(str(path)) as source:
        before = formats.read(source)
        plan = before.plan_relocate(place(before.manifest, rules_of(to="cpu")))
        with (
            leaving_nothing(scene.root),
            InPlaceFolder(str(scene.folder), {"optimizer.pt": (source, plan)}, force=False) as it,
        ):
            it.write()
            for verb in (ckptmove.inspect, ckptmove.recover):
                for each in (scene.folder, path):
                    with pytest.raises(InputError, match="is being changed in place by another"):
                        verb(each)
            assert ckptmove.inspect(scene.folder / "epochs" / "last.pt").tensors
    assert scene.contents(scene.folder) == scene.old


# Journals that are damaged, of others, or traps


def test_a_journal_that_is_damaged_or_of_other_files_undoes_nothing(
    scene: FolderScene, journal: bytes, tmp_path: Path
) -> None:
    half = {**scene.old, "optimizer.pt": scene.new["optimizer.pt"]}
    flipped = bytearray(journal)
    flipped[len(journal) // 2] ^= 1
    scene.reset(half)
    alone = folder_journal({"optimizer.pt": parsed(scene, journal)["optimizer.pt"]})
    in_part = alone[:-32] + journal[-32:]  # of one file, with the seal of them all
    cut = (journal[:-1], journal[: len(journal) // 2], journal[:10], b"")
    for bad in (*cut, bytes(flipped), in_part):
        scene.reset({**half, FOLDER_JOURNAL: bad})
        for verb in (ckptmove.recover, ckptmove.inspect):
            with pytest.raises(InputError, match=r"journal (is|belongs)") as raised:
                verb(scene.folder)
            assert f"remove {scene.journal}" in str(raised.value.hint)
        assert scene.contents(scene.folder) == {**half, FOLDER_JOURNAL: bad}
    scene.reset({**half, FOLDER_JOURNAL: journal})
    there = Path(shutil.copytree(scene.folder, tmp_path / "copy"))
    with pytest.raises(InputError, match="is not the file that its journal belongs to"):
        ckptmove.recover(there)
    assert scene.contents(there) == {**half, FOLDER_JOURNAL: journal}
    own = FolderScene(tmp_path)
    own.reset({**half, FOLDER_JOURNAL: own.journal_bytes()})
    (own.folder / "optimizer.pt").unlink()
    with pytest.raises(InputError, match="is missing, but the journal"):
        ckptmove.recover(own.folder)


@pytest.mark.parametrize("name", ["../victim", "/etc/hostname", "a/../../victim", "link", "dir/x"])
def test_a_journal_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"precious " * 9)
    (folder / "link").symlink_to(victim)
    (tmp_path / "x").hardlink_to(victim)
    (folder / "dir").symlink_to(tmp_path)
    data = victim.read_bytes()
    old = Journal.of(len(data), victim.stat().st_ino, [Write(0, b"harmed")], _reading(data))
    back = [each._replace(old=each.new, new=each.old) for each in old.changes]
    (folder / FOLDER_JOURNAL).write_bytes(folder_journal({name: old._replace(changes=(*back,))}))
    with pytest.raises(InputError):
        ckptmove.recover(folder)
    assert victim.read_bytes() == data


def _reading(data: bytes) -> Read:
    return lambda at, nbytes: data[at : at + nbytes]


def test_a_large_journal_takes_no_memory(tmp_path: Path) -> None:
    """It says that it has very many files, or a very long one, and is a hole."""
    for head in (struct.pack("<16sQ", b"ckptmove-undo-d\n", 1 << 40), b"ckptmove-undo-d\n"):
        path = tmp_path / FOLDER_JOURNAL
        path.write_bytes(head)
        os.truncate(path, 1 << 40)
        with pytest.raises(InputError, match="its journal is damaged"):
            ckptmove.recover(tmp_path)


def test_of_a_folder_and_of_a_file_in_it_both_are_undone(
    scene: FolderScene, journal: bytes
) -> None:
    """A file was changed alone, in a folder below one that was interrupted as well."""
    scene.reset({**scene.old, "optimizer.pt": scene.new["optimizer.pt"], FOLDER_JOURNAL: journal})
    alone = shutil.copy(scene.folder / "epochs" / "last.pt", scene.folder / "epochs" / "alone.pt")
    old = interrupted(Path(alone))
    report = ckptmove.recover(scene.root)
    assert [each.outcome for each in report.files] == ["rolled-back", "rolled-back"]
    assert Path(alone).read_bytes() == old
    Path(alone).unlink()
    assert scene.contents(scene.folder) == scene.old
    assert journals(scene.root) == []


def test_an_unfinished_journal_is_removed(scene: FolderScene, journal: bytes) -> None:
    for torn in (journal[:-9], b"", journal):
        scene.reset()
        scene.unfinished.write_bytes(torn)
        assert ckptmove.inspect(scene.folder).tensors
        assert scene.contents(scene.folder) == scene.old


# Large, and new folders


def test_a_large_folder_takes_no_longer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    sparse_zip64(folder / "optimizer.pt", 20, "cuda:1")
    sparse_zip64(folder / "ema.pt", 20, "cuda:1")
    report = ckptmove.relocate(folder, to="cuda:0", in_place=True)
    assert report.nbytes > 40 << 30
    assert report.bytes_written < 2000
    assert set(ckptmove.inspect(folder).devices) == {"cuda:0"}


VERBS = ("relocate", "convert")


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_any_kind_of_call_a_new_folder_is_whole_or_absent(
    verb: str, scene: FolderScene, tmp_path: Path
) -> None:
    """Of calls of one name, the first five and the last: most write to files that have no names."""
    ends = killed_beside(scene, verb, lambda calls: few(calls, 6), tmp_path / "log")
    assert list(dict.fromkeys(ends)) == [False, True]


@pytest.mark.sample(1)
@needs_strace
@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_some_calls_a_new_folder_is_whole_or_absent(
    verb: str, scene: FolderScene, tmp_path: Path
) -> None:
    def about_the_rename(calls: list[Call]) -> list[Call]:
        renamed = next(n for n, call in enumerate(calls) if call.name.startswith("rename"))
        return calls[renamed : renamed + 2]

    assert killed_beside(scene, verb, about_the_rename, tmp_path / "log") == [False, True]


def killed_beside(
    scene: FolderScene, verb: str, chosen: Callable[[list[Call]], list[Call]], log: Path
) -> list[bool]:
    """Kill a relocation or conversion at chosen calls; tells each time if the result is there."""
    made, new = {
        "relocate": (scene.beside, scene.new),
        "convert": (scene.convert, scene.converted),
    }[verb]
    ends = []
    for call in chosen(scene.calls(made, log)):
        scene.reset()
        ended = run(made, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        assert scene.contents(scene.folder) == scene.old, call
        assert not scene.out.exists() or scene.contents(scene.out) == new, call
        ends.append(scene.out.exists())
    scene.reset()
    return ends


@pytest.mark.parametrize("verb", VERBS)
def test_on_a_full_disk_nothing_is_left_of_a_new_folder(
    verb: str, scene: FolderScene, tmp_path: Path, run_cli: RunCli
) -> None:
    """Too full from the start, and filled up while files are copied into it."""
    scene.reset()
    more = ("--to=cpu",) if verb == "relocate" else ()
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=32k", "none") as small:
        done = run_cli(verb, scene.folder, f"{small / 'out'}/", *more, exit=4)
        assert "not enough free space" in done.stderr
        assert list(small.iterdir()) == []
    with mounted(tmp_path / "few", "-t", "tmpfs", "-o", "nr_inodes=4", "none") as few_files:
        done = run_cli(verb, scene.folder, f"{few_files / 'out'}/", *more, exit=5)
        assert "No space left on device" in done.stderr
        assert list(few_files.iterdir()) == []
    assert scene.contents(scene.folder) == scene.old


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_journal_of_another_user_changes_no_file_of_mine(
    scene: FolderScene, journal: bytes
) -> None:
    """Who owns a folder could write the journal, and have the files of others in it changed."""
    owner, other = 1001, 1002
    state = {**scene.old, "optimizer.pt": scene.new["optimizer.pt"], FOLDER_JOURNAL: journal}
    scene.reset(state)
    files = [scene.folder / name for name in parsed(scene, journal)]
    try:
        for path in (scene.folder, scene.journal):
            os.chown(path, owner, owner)
        for path in files:
            os.chown(path, other, other)
        with pytest.raises(InputError, match="belongs to another user"):
            ckptmove.recover(scene.folder)
        assert "cuda:1" not in ckptmove.inspect(scene.folder / "optimizer.pt").devices
        assert scene.contents(scene.folder) == state
        for path in files:
            os.chown(path, owner, owner)
        ckptmove.recover(scene.folder)
        assert scene.contents(scene.folder) == scene.old
    finally:
        for path in (scene.folder, *files):
            os.chown(path, 0, 0)
