"""Changes in place that are killed, interrupted or lied to, at every step there is.

Whatever happens: after `recover`, or after any other command, the file is byte for byte the old one
or the complete new one.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptmove
from ckptmove.journal import Journal, journal_name
from tests.checkpoints import MAKERS, save
from tests.injecting import LOCKING, WRITING, Call, calls_of, command, needs_strace, run, start
from tests.oracles import assert_same_checkpoint

CHANGING = (*WRITING, *LOCKING, "write")


class Scene:
    """A file to be changed in place, as it was and as it is to be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "in.pt"
        save(self.path, MAKERS["adamw_training"](), "cuda:1")
        self.old = self.path.read_bytes()
        ckptmove.relocate(self.path, folder / "out.pt", to="cpu")
        self.new = (folder / "out.pt").read_bytes()
        assert_same_checkpoint(self.path, folder / "out.pt", {"cuda:1": "cpu"})
        (folder / "out.pt").unlink()
        self.journal = folder / journal_name("in.pt")
        self.command = command("relocate", "-q", self.path, "--to", "cpu", "--in-place")
        self.recover = command("recover", "-q", self.path)

    def calls(self, log: Path) -> list[Call]:
        """Those of a change in place, from opening the file on."""
        calls = calls_of(self.command, self.path, log, CHANGING)
        assert self.path.read_bytes() == self.new
        self.reset()
        return list(without_imports(calls))

    def calls_of_recovery(self, folder: Path) -> list[Call]:
        """Those of a recovery, from opening the folder on."""
        calls = calls_of(self.recover, self.folder, folder / "log", CHANGING)
        return list(without_imports(calls))

    def reset(self, content: bytes | None = None, journal: bytes | None = None) -> None:
        """The file as it was, or as it is said to be."""
        for path in self.folder.iterdir():
            if path != self.path:
                path.unlink()
        self.path.write_bytes(self.old if content is None else content)
        if journal is not None:
            self.journal.write_bytes(journal)

    def journal_bytes(self) -> bytes:
        """The journal of the whole change."""
        self.reset()
        assert run(self.command, inject="unlinkat:signal=KILL:when=1").code == -signal.SIGKILL
        return self.journal.read_bytes()

    def is_settled(self) -> bool:
        """Whether only the file is there, and is the old or the new one."""
        content = self.path.read_bytes()
        return content in (self.old, self.new) and list(self.folder.iterdir()) == [self.path]


def without_imports(calls: list[Call]) -> Iterator[Call]:
    """The calls but for those on modules of Python, which may be imported meanwhile."""
    foreign = set()
    for call in calls:
        fd, ended = re.split(r"[,)]", call.text)[0], call.text.rpartition("= ")[2]
        if call.name == "openat" and re.search(r'"[^"]*(/lib|\.py|\.so)', call.text):
            foreign.add(ended)
        elif call.name == "openat" or fd not in foreign:
            yield call
        elif call.name == "close":
            foreign.discard(fd)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A training checkpoint from a GPU."""
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def calls(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The calls that the tests below break one by one."""
    return scene.calls(tmp_path_factory.mktemp("log") / "log")


@pytest.fixture(scope="module")
def journal(scene: Scene) -> bytes:
    """That of the change."""
    return scene.journal_bytes()


def settlers(scene: Scene) -> Iterator[Callable[[], object]]:
    """Everything that settles a file, each with the file and the journal as they are now."""
    content = scene.path.read_bytes()
    journal = scene.journal.read_bytes() if scene.journal.exists() else None
    verbs: tuple[Callable[[], object], ...] = (
        lambda: ckptmove.recover(scene.path),
        lambda: ckptmove.inspect(scene.path),
        lambda: ckptmove.relocate(scene.path, to="cpu", dry_run=True),
    )
    for verb in verbs:
        scene.reset(content, journal)
        yield verb


# The order of things


@needs_strace
def test_the_journal_is_on_disk_before_and_the_change_before_it_goes(calls: list[Call]) -> None:
    """What is synced when, by the descriptors of the calls."""
    steps = []
    journal = folder = "?"
    for call in calls:
        fd, ended = re.split(r"[,)]", call.text)[0], call.text.rpartition("= ")[2]
        if call.name == "openat" and "ckptmove-journal" in call.text:
            assert "O_EXCL" in call.text
            assert "0600" in call.text
            journal = ended
            steps.append("made")
        elif call.name == "openat" and "O_DIRECTORY" in call.text:
            folder = ended
        elif call.name in ("pwrite64", "fsync", "fdatasync"):
            of = "journal" if fd == journal else "folder" if fd == folder else "file"
            steps.append(f"{'wrote' if call.name == 'pwrite64' else 'synced'} {of}")
        elif call.name in ("unlink", "unlinkat"):
            steps.append("gone")
        elif call.name == "close" and fd == journal:
            journal = "?"
    order = list(dict.fromkeys(steps[:-1])) + steps[-1:]
    assert order == [
        *("made", "wrote journal", "synced journal", "synced folder"),
        *("wrote file", "synced file", "gone", "synced folder"),
    ]
    assert steps.count("wrote file") > 2
    assert steps[::-1].index("wrote file") > steps[::-1].index("synced file")


@needs_strace
def test_what_is_traced_is_all_that_matters(calls: list[Call]) -> None:
    names = {call.name for call in calls}
    assert names == {"openat", "pwrite64", "fsync", "unlinkat", "flock", "fcntl", "close"}


# Killed


@needs_strace
def test_killed_at_any_call_it_is_the_old_or_the_new_file(scene: Scene, calls: list[Call]) -> None:
    ends = []
    for call in calls:
        scene.reset()
        ended = run(scene.command, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
        assert ended.code == -signal.SIGKILL, call
        unfinished = scene.journal.exists()
        for settle in settlers(scene):
            settle()
            assert scene.is_settled(), call
            is_old = scene.path.read_bytes() == scene.old
            assert is_old or not unfinished, call
        ends.append((unfinished, is_old))
    steps = list(dict.fromkeys(ends))  # untouched, journalled and undone, done
    assert steps == [(False, True), (True, True), (False, False)]


@needs_strace
def test_killed_at_any_call_of_the_recovery_it_is_recovered_again(
    scene: Scene, journal: bytes, tmp_path: Path
) -> None:
    half = half_written(scene, journal)
    for content, there in ((half, journal), (scene.old, journal[:-1])):
        scene.reset(content, there)
        calls = scene.calls_of_recovery(tmp_path)
        assert scene.path.read_bytes() == scene.old
        assert [call.name for call in calls].count("fsync") == 2
        for call in calls:
            scene.reset(content, there)
            ended = run(scene.recover, inject=f"{call.name}:signal=KILL:when={call.ordinal}")
            assert ended.code == -signal.SIGKILL, call
            ckptmove.recover(scene.path)
            assert scene.is_settled(), call
            assert scene.path.read_bytes() == scene.old, call


def half_written(scene: Scene, journal: bytes) -> bytes:
    """The file with half of each change that the journal holds."""
    found = Journal.from_bytes(journal)
    assert found is not None
    content = bytearray(scene.old)
    for change in found.changes:
        half = change.new[: len(change.new) // 2]
        content[change.at : change.at + len(half)] = half
    return bytes(content)


@needs_strace
def test_a_write_may_have_been_torn_anywhere(scene: Scene, journal: bytes) -> None:
    found = Journal.from_bytes(journal)
    assert found is not None
    content = bytearray(scene.old)
    assert any(len(change.new) > 1 for change in found.changes)
    for change in found.changes:
        for cut in {1, len(change.new) // 2, len(change.new) - 1}:
            torn = bytearray(content)
            torn[change.at : change.at + cut] = change.new[:cut]  # from its start
            scene.reset(bytes(torn), journal)
            ckptmove.recover(scene.path)
            assert scene.path.read_bytes() == scene.old
            torn = bytearray(content)
            end = change.at + len(change.new)
            torn[end - cut : end] = change.new[-cut:]  # or its end first
            scene.reset(bytes(torn), journal)
            ckptmove.recover(scene.path)
            assert scene.is_settled()
            assert scene.path.read_bytes() == scene.old
        content[change.at : change.at + len(change.new)] = change.new
    assert content == scene.new


@needs_strace
def test_a_journal_may_have_been_torn_anywhere(scene: Scene, journal: bytes) -> None:
    cuts = {*range(0, 200, 7), *range(0, len(journal), 999), len(journal) - 1}
    for cut in cuts:
        for torn in (journal[:cut], journal[:cut].ljust(len(journal), b"\0")):
            if torn != journal:
                scene.reset(scene.old, torn)
                assert ckptmove.recover(scene.path).files[0].outcome == "unchanged"
                assert scene.is_settled()
                assert scene.path.read_bytes() == scene.old


# Interrupted, refused, lied to


@needs_strace
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_at_any_call_it_is_undone_at_once(
    number: signal.Signals, scene: Scene, calls: list[Call]
) -> None:
    for call in calls[1:-1]:
        if number is signal.SIGINT and call.name in ("close", "fcntl", "pwrite64"):
            continue  # one signal is handled as another is
        scene.reset()
        what = f"{call.name}:signal={number.name[3:]}:when={call.ordinal}"
        ended = run(scene.command, inject=what)
        assert ended.code == -number, call
        assert scene.is_settled(), call


@needs_strace
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_an_error_of_any_call_is_undone_and_said(
    error: str, scene: Scene, calls: list[Call]
) -> None:
    for call in calls:
        if error == "EACCES" and call.name in ("pwrite64", "fsync", "close"):
            continue  # they never say so
        scene.reset()
        ended = run(scene.command, inject=f"{call.name}:error={error}:when={call.ordinal}")
        assert ended.code in (0, 3, 4, 5), (call, ended)
        assert ended.said.count("\n") == (ended.code != 0), (call, ended)
        if scene.journal.exists():  # it could not be removed
            assert "ckptmove recover" in ended.said, call
            ckptmove.recover(scene.path)
        assert scene.is_settled(), call
        is_new = scene.path.read_bytes() == scene.new
        assert is_new == (ended.code == 0 or "power cut" in ended.said), call


@needs_strace
@pytest.mark.parametrize("name", ["pwrite64", "fsync", "unlinkat"])
def test_where_it_can_not_be_undone_the_journal_stays(
    name: str, scene: Scene, calls: list[Call]
) -> None:
    """From some call on, all of a kind fail."""
    first = next(n for n, call in enumerate(calls) if call.name == "pwrite64")
    for call in [each for each in calls[first + 1 :] if each.name == name]:
        scene.reset()
        ended = run(scene.command, inject=f"{name}:error=EIO:when={call.ordinal}+")
        assert ended.code == 5, call
        assert ended.said.count("\n") == 1, call
        if scene.journal.exists():
            assert f"(ckptmove recover {scene.path})" in ended.said, call
        for settle in settlers(scene):
            settle()
            assert scene.is_settled(), call
        assert scene.path.read_bytes() in (scene.old, scene.new)


@needs_strace
@pytest.mark.parametrize("failing", ["fsync", "pwrite64"])
def test_killed_while_it_is_undone_it_can_be_undone(
    failing: str, scene: Scene, calls: list[Call]
) -> None:
    """A write that did nothing, or a sync that failed, and then a kill."""
    syncs = [call for call in calls if call.name == "fsync"]
    assert len(syncs) == 4  # journal, folder, file, folder
    writes = [call for call in calls if call.name == "pwrite64"]
    lie = int(writes[-1].text.rpartition("= ")[2])
    what = {
        "fsync": f"fsync:error=EIO:when={syncs[2].ordinal}",
        "pwrite64": f"pwrite64:retval={lie}:when={writes[-1].ordinal}",
    }[failing]
    others = {"fsync": ("pwrite64", "unlinkat", "close"), "pwrite64": ("fsync", "unlinkat")}
    for name in others[failing]:
        first = {"pwrite64": writes[-1].ordinal + 1, "fsync": syncs[2].ordinal + 1}.get(name, 1)
        for ordinal in range(first, first + 9):
            scene.reset()
            kill = f"{name}:signal=KILL:when={ordinal}"
            with start(scene.command, what, kill) as process:
                process.communicate(timeout=60)
            if process.returncode == 5:
                break  # it came to its end before
            assert process.returncode == -signal.SIGKILL
            for settle in settlers(scene):
                settle()
                assert scene.is_settled()
                assert scene.path.read_bytes() == scene.old
        assert ordinal > first or name == "close"


@needs_strace
def test_an_error_of_the_recovery_keeps_the_journal(
    scene: Scene, journal: bytes, tmp_path: Path
) -> None:
    half = half_written(scene, journal)
    scene.reset(half, journal)
    calls = scene.calls_of_recovery(tmp_path)
    for call in calls:
        scene.reset(half, journal)
        ended = run(scene.recover, inject=f"{call.name}:error=EIO:when={call.ordinal}")
        assert ended.code in (0, 3, 4, 5), (call, ended)
        assert ended.said.count("\n") == (ended.code != 0), (call, ended)
        ckptmove.recover(scene.path)
        assert scene.is_settled(), call
        assert scene.path.read_bytes() == scene.old, call


@needs_strace
def test_what_was_not_written_is_noticed(scene: Scene, calls: list[Call]) -> None:
    """The call says that it did all, and did nothing."""
    changing = [call for call in calls if call.name == "pwrite64"][1:]  # after the journal
    assert len(changing) > 2
    for call in changing:
        scene.reset()
        nbytes = int(call.text.rpartition("= ")[2])
        ended = run(scene.command, inject=f"pwrite64:retval={nbytes}:when={call.ordinal}")
        assert (ended.code, scene.is_settled()) == (5, True), call
        assert "can't be read back (it is again as it was)" in ended.said
        assert scene.path.read_bytes() == scene.old


@needs_strace
def test_what_was_not_undone_is_noticed(scene: Scene, journal: bytes, tmp_path: Path) -> None:
    half = half_written(scene, journal)
    scene.reset(half, journal)
    writes = [call for call in scene.calls_of_recovery(tmp_path) if call.name == "pwrite64"]
    assert len(writes) > 2
    for call in writes:
        scene.reset(half, journal)
        nbytes = int(call.text.rpartition("= ")[2])
        ended = run(scene.recover, inject=f"pwrite64:retval={nbytes}:when={call.ordinal}")
        assert ended.code == 5, call
        assert "can't be read back" in ended.said
        assert scene.journal.read_bytes() == journal


@needs_strace
@pytest.mark.parametrize("error", ["EINVAL", "ENOLCK", "EACCES", "EPERM"])
def test_without_leases_it_goes_on(error: str, scene: Scene, calls: list[Call]) -> None:
    asking = next(call for call in calls if "F_RDLCK" in call.text)
    scene.reset()
    assert run(scene.command, inject=f"fcntl:error={error}:when={asking.ordinal}") == (0, "")
    assert scene.path.read_bytes() == scene.new


@needs_strace
@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_without_locks_it_is_refused_but_recovered(
    error: str, scene: Scene, journal: bytes
) -> None:
    scene.reset()
    ended = run(scene.command, inject=f"flock:error={error}:when=1+")
    assert ended.code == 4
    assert "knows no locks (--force insists)" in ended.said
    assert scene.is_settled()
    assert run([*scene.command, "--force"], inject=f"flock:error={error}:when=1+") == (0, "")
    assert scene.path.read_bytes() == scene.new
    scene.reset(half_written(scene, journal), journal)
    assert run(scene.recover, inject=f"flock:error={error}:when=1+") == (0, "")
    assert scene.path.read_bytes() == scene.old


@needs_strace
def test_a_copy_of_both_is_recovered_as_well(scene: Scene, journal: bytes, tmp_path: Path) -> None:
    scene.reset(half_written(scene, journal), journal)
    there = Path(shutil.copytree(scene.folder, tmp_path / "copy")) / "in.pt"
    ckptmove.recover(there)
    assert there.read_bytes() == scene.old
