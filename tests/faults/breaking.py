"""A change in place, and the calls that it makes, for tests that break them one by one."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptmove
from ckptmove.writing.in_place.journal import Journal
from ckptmove.writing.in_place.journal_name import UNFINISHED, journal_name
from tests.faults.injecting import LOCKING, WRITING, Call, calls_of, command, run
from tests.making.checkpoints import MAKERS, save
from tests.oracles.readers import assert_same_checkpoint

CHANGING = (*WRITING, *LOCKING, "write")


class Scene:
    """A file to be changed in place, before and after."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "in.pt"
        save(self.path, MAKERS["adamw_training"](), "cuda:1")
        self.old = self.path.read_bytes()
        ckptmove.relocate(self.path, folder / "out.pt", to="cpu")
        self.new = (folder / "out.pt").read_bytes()
        assert_same_checkpoint(self.path, folder / "out.pt", {"cuda:1": "cpu"})
        (folder / "out.pt").unlink()
        self.journal = folder / journal_name("in.pt")
        self.unfinished = folder / (journal_name("in.pt") + UNFINISHED)
        self.command = command("relocate", "-q", self.path, "--to", "cpu", "--in-place")
        self.recover = command("recover", "-q", self.path)

    def calls(self, log: Path) -> list[Call]:
        """The system calls of a change in place, from opening the file on."""
        calls = calls_of(self.command, self.path, log, CHANGING)
        assert self.path.read_bytes() == self.new
        self.reset()
        return list(without_imports(calls))

    def calls_of_recovery(self, folder: Path) -> list[Call]:
        """The system calls of a recovery, from opening the folder on."""
        calls = calls_of(self.recover, self.folder, folder / "log", CHANGING)
        return list(without_imports(calls))

    def reset(
        self,
        content: bytes | None = None,
        journal: bytes | None = None,
        unfinished: bytes | None = None,
    ) -> None:
        """Restore the file, by default to its old content; always the same inode."""
        for path in self.folder.iterdir():
            if path != self.path:
                path.unlink()
        self.path.write_bytes(self.old if content is None else content)
        if journal is not None:
            self.journal.write_bytes(journal)
        if unfinished is not None:
            self.unfinished.write_bytes(unfinished)

    def journal_bytes(self) -> bytes:
        self.reset()
        ended = run(self.command, inject="unlinkat:signal=KILL:when=1", cold=True)
        assert ended.code == -signal.SIGKILL
        return self.journal.read_bytes()

    def is_settled(self) -> bool:
        """Whether only the file is there, and is the old or the new one."""
        content = self.path.read_bytes()
        return content in (self.old, self.new) and list(self.folder.iterdir()) == [self.path]


def without_imports(calls: list[Call]) -> Iterator[Call]:
    """The calls except those on Python modules, which may be imported meanwhile."""
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
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def calls(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The calls that the tests below break one by one."""
    return scene.calls(tmp_path_factory.mktemp("log") / "log")


@pytest.fixture(scope="module")
def journal(scene: Scene) -> bytes:
    return scene.journal_bytes()


def settlers(scene: Scene) -> Iterator[Callable[[], object]]:
    """Everything that settles a file, each starting with the present file and journal."""
    content = scene.path.read_bytes()
    journal, unfinished = (
        each.read_bytes() if each.exists() else None for each in (scene.journal, scene.unfinished)
    )
    verbs: tuple[Callable[[], object], ...] = (
        lambda: ckptmove.recover(scene.path),
        lambda: ckptmove.inspect(scene.path),
        lambda: ckptmove.relocate(scene.path, to="cpu", dry_run=True),
    )
    for verb in verbs:
        scene.reset(content, journal, unfinished)
        yield verb


def half_written(scene: Scene, journal: bytes) -> bytes:
    """The file with half of each change in the journal."""
    found = Journal.from_bytes(journal)
    content = bytearray(scene.old)
    for change in found.changes:
        half = change.new[: len(change.new) // 2]
        content[change.at : change.at + len(half)] = half
    return bytes(content)
