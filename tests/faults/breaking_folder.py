"""A folder that is relocated, in place or not, or converted, and the calls that this makes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.writing.in_place.journal_name import FOLDER_JOURNAL, UNFINISHED
from tests.faults.breaking import CHANGING, without_imports
from tests.faults.injecting import Call, calls_of, command, run
from tests.making.checkpoints import MAKERS
from tests.making.saving import kept_on_cpu, save

NAMES = (*CHANGING, "mkdir", "mkdirat", "rmdir")


class FolderScene:
    """A folder with a model, its optimizer and another checkpoint below, before and after."""

    first = "epochs/last.pt"  #: the file that is opened first

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.out = root, root / "run", root / "out"
        self.fill()
        self.journal = self.folder / FOLDER_JOURNAL
        self.unfinished = self.folder / (FOLDER_JOURNAL + UNFINISHED)
        self.old = self.contents(self.folder)
        ckptmove.relocate(self.folder, self.out, to="cpu")
        self.new = self.contents(self.out)
        shutil.rmtree(self.out)
        ckptmove.convert(self.folder, self.out)
        self.converted = self.contents(self.out)
        shutil.rmtree(self.out)
        to = ("--to", "cpu")
        self.in_place = command("relocate", "-q", self.folder, *to, "--in-place")
        self.beside = command("relocate", "-q", self.folder, self.out, *to)
        self.convert = command("convert", "-q", self.folder, f"{self.out}/")
        self.recover = command("recover", "-q", self.folder)

    def fill(self) -> None:
        """Make the folder, on `cuda:1`."""
        self.folder.mkdir()
        saved = MAKERS["adamw_training"]()
        save(self.folder / "optimizer.pt", saved, "cuda:1", keep_cpu=kept_on_cpu(saved))
        (self.folder / "epochs").mkdir()
        save(self.folder / "epochs" / "last.pt", {"w": torch.arange(9.0)}, "cuda:1")
        save_file({"w": torch.ones(3)}, self.folder / "model.safetensors", {"format": "pt"})
        (self.folder / "notes.txt").write_text("precious")

    @property
    def changed(self) -> list[str]:
        """The files that a relocation changes."""
        return [name for name in self.old if self.old[name] != self.new[name]]

    @staticmethod
    def contents(folder: Path) -> dict[str, bytes]:
        """Every file in a folder and below."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    def reset(self, state: dict[str, bytes] | None = None) -> None:
        """Restore the files, by default as they were at first; always the same inodes."""
        state = self.old if state is None else state
        for path in self.root.iterdir():
            if path != self.folder:
                shutil.rmtree(path)
        for name in self.contents(self.folder).keys() - state.keys():
            (self.folder / name).unlink()
        for name, data in state.items():
            (self.folder / name).write_bytes(data)

    def calls(self, command: list[str], log: Path) -> list[Call]:
        """The calls that may change something, from opening the first file on."""
        self.reset()
        found = calls_of(command, self.folder / self.first, log, NAMES)
        return list(without_imports(found))

    def journal_bytes(self) -> bytes:
        """The journal of the change in place, as a killed process leaves it."""
        self.reset()
        run(self.in_place, inject="unlinkat:signal=KILL:when=1")
        return self.journal.read_bytes()


def settlers(scene: FolderScene) -> Iterator[Callable[[], object]]:
    """Everything that settles the folder, each starting with it as it is now."""
    state = scene.contents(scene.folder)
    verbs: tuple[Callable[[], object], ...] = (
        lambda: ckptmove.recover(scene.folder),
        lambda: ckptmove.recover(scene.root),
        lambda: ckptmove.inspect(scene.folder),
        lambda: ckptmove.inspect(scene.folder / scene.first),
        lambda: ckptmove.relocate(scene.folder, to="cpu", dry_run=True),
    )
    for verb in verbs:
        scene.reset(state)
        yield verb
